"""The protection of this process's connections, read from files before anything listens."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field

from graphsplit.errors import ConfigurationError
from graphsplit.security.names import CertifiedName
from graphsplit.security.options import (
    TOKEN_FIX,
    TRUSTED_NETWORK,
    SecurityOptions,
    token_problem,
)
from graphsplit.security.private_files import read_file, read_private_file


@dataclass(frozen=True)
class TlsIdentity:
    """This process's end of every TLS connection. All three are PEM.

    Attributes:
        authority: Certificates of those whose signatures count.
        chain: This process's certificate, and what lies between it and the authority.
        key: Its private key.
        name: Who it says that this process is.
    """

    authority: bytes = field(repr=False)
    chain: bytes = field(repr=False)
    key: bytes = field(repr=False)
    name: CertifiedName


@dataclass(frozen=True)
class Protection:
    """The protection of this process's connections.

    Attributes:
        tls: Encrypt, and show and demand certificates; None: plain TCP.
        token: The job's secret; empty: registration needs none.
        trusts_network: The user said in words that no protection is needed.
        unencrypted: Transports that the user allowed to go without encryption.
        networks: Where workers may listen, other than at the address that they come from.
    """

    tls: TlsIdentity | None = None
    token: bytes = field(default=b"", repr=False)
    trusts_network: bool = False
    unencrypted: frozenset[str] = frozenset()
    networks: tuple[str, ...] = ()


UNPROTECTED = Protection()
"""Enough on loopback, and nowhere else."""


def load_protection(options: SecurityOptions, *, role: str, rank: int | None = None) -> Protection:
    """Read what the options name, and check that it fits together and this process.

    Args:
        options: What the environment says.
        role: ``names.SCHEDULER`` or ``names.WORKER``.
        rank: The rank that this worker asks for, if it does.

    Raises:
        ConfigurationError: A file is missing, readable by others, or not what it should be.
    """
    tls = None
    if options.has_tls:
        from graphsplit.security.certificates import checked_name

        authority = read_file("GS_TLS_CA", options.tls_ca)
        chain = read_file("GS_TLS_CERT", options.tls_cert)
        key = read_private_file("GS_TLS_KEY", options.tls_key)
        name = checked_name(options, authority, chain, key, role=role, rank=rank)
        tls = TlsIdentity(authority, chain, key, name)
    return Protection(
        tls=tls,
        token=_token(options),
        trusts_network=options.trusts_network,
        unencrypted=frozenset(options.unencrypted),
        networks=options.networks,
    )


def _token(options: SecurityOptions) -> bytes:
    if not options.job_token_file:
        return options.job_token.encode()
    path = options.job_token_file
    token = read_private_file("GS_JOB_TOKEN_FILE", path).decode("utf-8", errors="replace").strip()
    expected = token_problem(token)
    if expected is not None:
        raise ConfigurationError(
            f"GS_JOB_TOKEN_FILE={path!r} holds no token (what it holds is not shown)\n"
            f"    expected: {expected}\n    Fix: {TOKEN_FIX}"
        )
    return token.encode()


def is_loopback(host: str) -> bool:
    """Whether an address, or every address of a name, is this machine's loopback."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(
        ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found
    )


def require_certificates(host: str, protection: Protection, *, what: str) -> None:
    """Refuse to listen where others can connect, unless they must show a certificate.

    For protocols that have no place for the job's token, such as HTTP, and need none to do harm.

    Args:
        host: The address to listen on.
        protection: What protects the connections.
        what: What would listen, in words.

    Raises:
        ConfigurationError: The address is beyond loopback, and there are no certificates.
    """
    if protection.tls or protection.trusts_network or is_loopback(host):
        return
    raise ConfigurationError(
        f"{what} would be served on {host}, which other machines can reach, and whoever connects "
        f"could read them: a job token does not protect them\n"
        f"  Fix: keep to 127.0.0.1; or give all processes certificates (`graphsplit certs`; "
        f"GS_TLS_CA, GS_TLS_CERT, GS_TLS_KEY); or, if nobody else can reach this network, set "
        f"GS_INSECURE={TRUSTED_NETWORK}"
    )


def require_protection(host: str, protection: Protection, *, what: str) -> None:
    """Refuse to listen where others can connect, unless they must prove who they are.

    Args:
        host: The address to listen on.
        protection: What protects the connections.
        what: What would listen, in words: ``"the scheduler"``.

    Raises:
        ConfigurationError: The address is beyond loopback, and nothing protects it.
    """
    if protection.tls or protection.token or protection.trusts_network or is_loopback(host):
        return
    raise ConfigurationError(
        f"{what} would listen on {host}, which other machines can reach, and nothing protects it: "
        f"whoever connects could join the job\n"
        f"  Fix: give all processes certificates (`graphsplit certs`; GS_TLS_CA, GS_TLS_CERT, "
        f"GS_TLS_KEY) or one secret (GS_JOB_TOKEN_FILE); or, if nobody else can reach this "
        f"network, set GS_INSECURE={TRUSTED_NETWORK}"
    )


def require_encryption(transport: str, *, encrypts: bool, protection: Protection) -> None:
    """Refuse a transport that cannot encrypt where TLS was asked for.

    Raises:
        ConfigurationError: TLS is on, the transport does not encrypt, and nobody allowed that.
    """
    if protection.tls is None or encrypts or transport in protection.unencrypted:
        return
    raise ConfigurationError(
        f"TLS is asked for (GS_TLS_CA), and the transport {transport!r} cannot encrypt: values and "
        f"gradients would travel in clear\n"
        f"  Fix: set GS_TRANSPORT=grpc, or, if nobody can read this network, set "
        f"GS_ALLOW_UNENCRYPTED={transport}"
    )
