"""Ports and channels of gRPC under a job's protection: the same few lines for both planes.

Imports no gRPC before it is used: pure modules above import this one.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from graphsplit.security.names import CertifiedName, holder_of
from graphsplit.security.protection import Protection

Options = Sequence[tuple[str, Any]]
ANY_PORT = (0, 0)
"""The range of ports of whoever may take any."""

# Connections that say nothing, or say it slowly, are closed after these.
_HANDSHAKE_TIMEOUT_MS = 10_000
_MAX_IDLE_MS = 20_000

# The share of the permitted silence after which the other end is asked for a sign of life.
_PINGS_PER_SILENCE = 10
_MIN_PING_INTERVAL_MS, _MAX_PING_INTERVAL_MS = 500, 10_000
_MAX_PING_STRIKES = 100
_MAX_CONNECT_MS = 20_000


def server_limits(*, max_connections: int, max_metadata_bytes: int) -> list[tuple[str, int]]:
    """Options that bound what strangers can make a server hold.

    A member opens one connection with one stream, and keeps it; so a connection without a stream
    is nobody's, and goes.
    """
    return [
        # With port reuse two processes could listen on one address, each getting half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", 1),
        ("grpc.max_metadata_size", max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", max_metadata_bytes),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", _MAX_IDLE_MS),
    ]


def keepalive(silence_s: float, *, patience: float = 1.0) -> list[tuple[str, int]]:
    """Options of either end of a connection, so that it breaks when the other one falls silent.

    A host that loses its power or its cable says nothing, and neither does the kernel here. So an
    idle connection is pinged, and one with data under way is given up by the kernel: gRPC sets
    ``TCP_USER_TIMEOUT`` to what a ping may take.

    Args:
        silence_s: How long the other end may be silent: frozen, or out of reach. The same on both
            ends: each must permit the pings of the other one.
        patience: How many times as long this end waits, where another one is to notice first.
    """
    interval_ms = int(silence_s * 1_000) // _PINGS_PER_SILENCE
    interval_ms = min(_MAX_PING_INTERVAL_MS, max(_MIN_PING_INTERVAL_MS, interval_ms))
    # A ping may have been answered just before.
    silence_ms = int(patience * max(1_000, int(silence_s * 1_000) - interval_ms))
    return [
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", silence_ms),
        ("grpc.http2.ping_timeout_ms", silence_ms),  # else a minute: a frozen process reads nothing
        ("grpc.http2.max_pings_without_data", 0),
        # Both ends ping as often as the other one; that is no attack. Floods of pings are.
        ("grpc.http2.min_ping_interval_without_data_ms", interval_ms // 2),
        ("grpc.http2.max_ping_strikes", _MAX_PING_STRIKES),
        # How long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", min(silence_ms, _MAX_CONNECT_MS)),
    ]


def free_ports(host: str, ports: tuple[int, int]) -> Iterator[int]:
    """The ports of a range that are free on a host just now, in any order; 0 for any.

    Each is looked at when it is asked for. Nothing is raised for a host that is not this one.

    Args:
        host: The address to listen on.
        ports: The first and the last.
    """
    if ports == ANY_PORT:
        yield 0
        return
    tried = list(range(ports[0], ports[1] + 1))
    while tried:
        port = tried.pop(secrets.randbelow(len(tried)))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with suppress(OSError):
            socket.create_server((host, port), family=family).close()
            yield port


def add_port(server: Any, address: str, protection: Protection) -> int:
    """Let a server listen; return the real port, or 0 if the address cannot be bound.

    Under TLS a connection without a certificate of the job's authority ends in the handshake.
    """
    import grpc

    try:
        if protection.tls is None:
            return int(server.add_insecure_port(address))
        tls = protection.tls
        credentials = grpc.ssl_server_credentials(
            [(tls.key, tls.chain)], root_certificates=tls.authority, require_client_auth=True
        )
        return int(server.add_secure_port(address, credentials))
    except RuntimeError:
        return 0


def open_channel(address: str, protection: Protection, *, expected: str, options: Options) -> Any:
    """A channel to an address.

    Args:
        address: Where the listener is.
        protection: What protects the connection.
        expected: The DNS name that the listener's certificate must have. Its host does not count:
            a role and a rank may move to another machine.
        options: More options of gRPC.
    """
    import grpc

    if protection.tls is None:
        return grpc.insecure_channel(address, options=list(options))
    tls = protection.tls
    credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.chain)
    override = ("grpc.ssl_target_name_override", expected)
    return grpc.secure_channel(address, credentials, options=[*options, override])


def first_metadata(
    call: Any, *, late_s: float = 0.0, on_late: Callable[[], None] | None = None
) -> Sequence[tuple[str, str | bytes]]:
    """The first metadata of the other end, on a stream that this end has opened; waits for it.

    A call that ended before has none. It is not enough to ask the call: of one whose connection was
    refused, gRPC 1.85 at times never tells that its metadata will not come, and asking never ends.
    So a thread of its own asks, which such a call leaves behind.

    Args:
        call: A call of ``grpc``'s that has begun.
        late_s: After this time without them ``on_late`` is called, once.
        on_late: What is called then; the wait goes on.
    """
    found: SimpleQueue[Sequence[tuple[str, str | bytes]]] = SimpleQueue()

    def ask() -> None:
        found.put(tuple(call.initial_metadata() or ()))

    threading.Thread(target=ask, name="graphsplit-grpc-metadata", daemon=True).start()
    if not call.add_callback(lambda: found.put(())):
        found.put(())
    if on_late is not None:
        try:
            return found.get(timeout=max(0.0, late_s))
        except Empty:
            on_late()
    return found.get()


def caller_of(context: Any) -> CertifiedName | None:
    """The caller, by the certificate of its connection; None if that names nobody."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return holder_of(
        name.decode("utf-8", errors="replace") if isinstance(name, bytes) else name
        for name in names
    )


# Words of gRPC and of its TLS library. None of these is mended by trying again.
_TLS_REFUSALS = (
    "CERTIFICATE_VERIFY_FAILED",
    "Hostname Verification Check failed",
    "Tls handshake failed",
    "WRONG_VERSION_NUMBER",
)


def is_refused_by_tls(detail: str) -> bool:
    """Whether a connection failed because of what the two ends showed each other."""
    return any(words in detail for words in _TLS_REFUSALS)


def tls_hint(detail: str, protection: Protection) -> str:
    """The likely cause of a failed connection, as a further line; empty if it is not TLS."""
    if "Hostname Verification" in detail:
        return "\n  The certificate over there is for another role or rank than this one expects"
    if "WRONG_VERSION_NUMBER" in detail:
        return "\n  Its end uses no TLS, and this end does (GS_TLS_CA): give all processes the same"
    if is_refused_by_tls(detail):
        return "\n  Its certificate is not of this process's authority (GS_TLS_CA), or has expired"
    if "Socket closed" in detail and protection.tls is None:
        return (
            "\n  If it uses TLS, this process needs GS_TLS_CA, GS_TLS_CERT and GS_TLS_KEY as well"
        )
    if "Socket closed" in detail:
        return "\n  It may not accept this process's certificate (GS_TLS_CERT); its output says why"
    return ""
