"""The data plane under TLS: values arrive, and only from whom the certificate names."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import pytest
import torch
from security_helpers import expired, protection, worker_name
from transport_helpers import DEADLINE_S, note_pulled, spec_of, start

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import ConfigurationError, TransportError
from graphsplit.security.grpc_ports import open_channel
from graphsplit.security.handshake import PROOF_KEY
from graphsplit.security.protection import UNPROTECTED, Protection
from graphsplit.transport.grpc import transport as grpc_transport
from graphsplit.transport.grpc.calls import CARRY, HELLO_KEY, PULL
from graphsplit.transport.grpc.listener import GrpcListener
from graphsplit.transport.grpc.transport import GrpcTransport
from graphsplit.transport.hub import Hub
from graphsplit.transport.session import Session
from graphsplit.transport.wait import WaitPolicy

SPEC = spec_of(shape=(None,), max_bytes=8 << 20)
TOKENS = ("0" * 32, "1" * 32)
SOURCE, VICTIM = Session("job", 1, 0, TOKENS), Session("job", 1, 1, TOKENS)


def hubs_of(*protections: Protection) -> list[Hub]:
    return [
        Hub(bind_host="127.0.0.1", mode="grpc", protection=one, num_workers=len(protections))
        for one in protections
    ]


def connect(hubs: list[Hub], peers: list[dict[str, str]] | None = None) -> list[Any]:
    policy = WaitPolicy(deadline_s=DEADLINE_S)
    peers = peers or [hub.endpoints for hub in hubs]
    return [
        hub.connect(rank=rank, job="job", generation=1, peers=peers, policy=policy)
        for rank, hub in enumerate(hubs)
    ]


def close(transports: list[Any]) -> None:
    for future in [start(transport.close) for transport in transports]:
        future.result(DEADLINE_S)


@pytest.mark.parametrize("ranks", [(0, 1), (None, None)])
def test_values_cross_under_tls_with_certificates_of_one_rank_or_any(
    ranks: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = note_pulled(monkeypatch)
    transports = connect(hubs_of(*(protection(worker_name(rank)) for rank in ranks)))
    sender, receiver = transports[0].open_sender(SPEC), transports[1].open_receiver(SPEC)
    value = torch.arange(1_000_000, dtype=torch.float32)
    sender.send(value, step=0, microbatch=0)
    received = receiver.receive(step=0, microbatch=0)
    assert received is not None and torch.equal(received, value)
    close(transports)
    assert sum(map(len, pulled)) > value.nbytes


@pytest.mark.parametrize(("rank", "is_answered"), [(1, True), (2, False)])
def test_only_who_has_the_certificate_of_the_destination_pulls(
    monkeypatch: pytest.MonkeyPatch, rank: int, is_answered: bool
) -> None:
    asked: list[tuple[Any, ...]] = []

    class Asking:
        """Notes what it would ask with, and asks nothing."""

        def __init__(self, *told: Any, **more: Any) -> None:
            asked.append((*told, more["expected"]))

        def is_answered(self) -> bool:
            return False

        def stop(self) -> None: ...

        wait = stop

    monkeypatch.setattr(grpc_transport, "Puller", Asking)
    transports = connect(hubs_of(*(protection(worker_name(rank)) for rank in (0, 1))))
    transports[1].open_receiver(SPEC)
    transports[0].open_sender(SPEC).send(torch.ones(1), step=0, microbatch=0)
    target, hello, recall, _, expected = asked[0]
    options = [("grpc.use_local_subchannel_pool", 1)]
    shown = protection(worker_name(rank))
    with open_channel(target, shown, expected=expected, options=options) as channel:
        call = channel.unary_stream(PULL)(b"", metadata=(hello, (PROOF_KEY, recall.listener)))
        if is_answered:
            assert recall.dialer in next(call)
        else:
            with pytest.raises(grpc.RpcError):
                next(call)
            assert call.details() == "no stream of yours"
        call.cancel()
    close(transports)


def test_a_peer_that_another_rank_answers_for_is_not_talked_to() -> None:
    hubs = hubs_of(protection(worker_name(0)), protection(worker_name(2)))
    peers = [hubs[0].endpoints, {**hubs[1].endpoints, "certificate": worker_name(1).dns}]
    # As worker 0 sees it, worker 1 is at that address; who listens there is worker 2.
    source = connect(hubs[:1], peers)[0]
    victim = GrpcTransport(
        hubs[1]._grpc,  # type: ignore[arg-type]
        session=VICTIM,
        targets=(None, None),
        policy=WaitPolicy(deadline_s=DEADLINE_S),
    )
    with pytest.raises(TransportError, match="Hostname Verification Check failed"):
        source.open_sender(SPEC).send(torch.ones(1), step=0, microbatch=0)
    close([source, victim])


def test_a_worker_that_registers_the_certificate_of_another_is_named() -> None:
    hubs = hubs_of(protection(worker_name(0)), protection(worker_name(2)))
    with pytest.raises(ConfigurationError, match="worker 1 cannot be reached under TLS: its cert"):
        connect(hubs)
    for hub in hubs:
        hub.close()


class Tap:
    """Stands between a dialer and a port, and keeps what goes by."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self._ends: list[socket.socket] = []
        self._running = [start(self._accept)]

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ends = self._listener.accept()[0], socket.create_connection(self._target)
                self._ends += ends
                self._running += [
                    start(partial(self._carry, *ends)),
                    start(partial(self._carry, *ends[::-1])),
                ]

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                self.seen += data
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._running:
            one.result(DEADLINE_S)
        for end in self._ends:
            end.close()


@pytest.mark.parametrize("is_protected", [True, False])
def test_who_listens_on_the_way_reads_nothing(is_protected: bool) -> None:
    """Neither a value nor the job's name; without TLS both go by as they are."""
    shown = [protection(worker_name(rank)) if is_protected else UNPROTECTED for rank in range(2)]
    hubs = hubs_of(*shown)
    taps = [Tap(hub.endpoints["grpc"]) for hub in hubs]
    peers = [{**hub.endpoints, "grpc": tap.address} for hub, tap in zip(hubs, taps, strict=True)]
    transports = connect(hubs, peers)
    sender, receiver = transports[0].open_sender(SPEC), transports[1].open_receiver(SPEC)
    value = torch.frombuffer(bytearray(b"in the clear" * 10_000), dtype=torch.float32)
    sender.send(value, step=0, microbatch=0)
    received = receiver.receive(step=0, microbatch=0)
    assert received is not None and torch.equal(received.view(torch.uint8), value.view(torch.uint8))
    close(transports)
    seen = b"".join(bytes(tap.seen) for tap in taps)
    assert len(seen) > value.nbytes
    assert (b"in the clear" in seen) is not is_protected
    for one in (*hubs, *taps):
        one.close()


@pytest.fixture
def victim() -> Iterator[str]:
    """The address of worker 1, under TLS."""
    mine = protection(worker_name(1))
    listener = GrpcListener("127.0.0.1", protection=mine, num_workers=2)
    transport = GrpcTransport(
        listener,
        session=VICTIM,
        targets=(None, None),
        policy=WaitPolicy(deadline_s=DEADLINE_S),
    )
    transport.open_receiver(SPEC)
    yield listener.address
    transport.close()


def knock(address: str, shown: Protection) -> Any:
    """What worker 1 says to somebody who says that it is worker 0, and cannot prove it."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = open_channel(address, shown, expected=worker_name(1).dns, options=options)
    carry = channel.stream_stream(
        CARRY,
        request_serializer=pb.Chunk.SerializeToString,
        response_deserializer=pb.Credit.FromString,
    )
    hello = pb.Hello(generation=1, source=0, destination=1).SerializeToString()
    metadata = [(HELLO_KEY, hello), *SOURCE.dialer_to(1).metadata()]
    call = carry(iter([pb.Chunk(proof=bytes(32))]), metadata=metadata, timeout=DEADLINE_S)
    try:
        return next(call)
    except grpc.RpcError as error:
        return error.code(), error.details()
    finally:
        call.cancel()
        channel.close()


@pytest.mark.parametrize(
    "shown",
    [UNPROTECTED, protection(worker_name(0), signed_by="other"), expired(worker_name(0))],
    ids=["no certificate", "another authority", "expired"],
)
def test_who_has_no_right_certificate_never_comes_to_speak(victim: str, shown: Protection) -> None:
    assert knock(victim, shown)[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_of_the_protocol_are_refused(victim: str, version: ssl.TLSVersion) -> None:
    host, _, port = victim.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")  # this side would speak it
    context.minimum_version = context.maximum_version = version
    link = socket.create_connection((host, int(port)), DEADLINE_S)
    with link, pytest.raises((ssl.SSLError, ConnectionError)) as refused:
        context.wrap_socket(link)
    assert "NO_PROTOCOLS_AVAILABLE" not in str(refused.value), "this side has said nothing"


def test_a_right_certificate_of_another_rank_is_refused_naming_both(victim: str) -> None:
    code, details = knock(victim, protection(worker_name(2)))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert details == "its certificate is for worker 2, and it says that it is worker 0"


def test_a_right_certificate_without_the_members_secret_is_refused(victim: str) -> None:
    code, details = knock(victim, protection(worker_name(0)))
    assert code is grpc.StatusCode.PERMISSION_DENIED and "does not know its secret" in details


def test_shared_memory_is_allowed_under_tls_within_one_user() -> None:
    mine = [protection(worker_name(rank)) for rank in range(2)]
    hubs = [Hub(bind_host="127.0.0.1", mode="auto", protection=one) for one in mine]
    transports = connect(hubs)
    assert {name for one in transports for name, _ in one.routes} == {"shm"}
    close(transports)
