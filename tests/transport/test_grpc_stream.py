"""gRPC streams: who is let in, and what ends a stream before memory is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
import torch
from transport_helpers import DEADLINE_S, Workers, spec_of, start

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import FrameError, TransportError
from graphsplit.transport.base import Receiver
from graphsplit.transport.frame import MESSAGE, FrameEncoder
from graphsplit.transport.grpc.calls import CARRY, HELLO_KEY, write_hello
from graphsplit.transport.grpc.inbound import Inbound
from graphsplit.transport.grpc.listener import GrpcListener
from graphsplit.transport.grpc.outbound import COMPANION_BYTES
from graphsplit.transport.grpc.transport import GrpcTransport
from graphsplit.transport.hub import Hub
from graphsplit.transport.session import Hello, Session
from graphsplit.transport.wait import WaitPolicy

TOKENS = ("0" * 32, "1" * 32)
SOURCE = Session("job", 1, 0, TOKENS)
HELLO = SOURCE.hello_to(1)
SPEC = spec_of(depth=1)


class Stranger:
    """A client that says what it likes."""

    def __init__(self, address: str) -> None:
        # Two strangers never share a connection: a port allows one stream on each.
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(address, options=options)
        self.requests: SimpleQueue[pb.Chunk | None] = SimpleQueue()
        self.call: Any = None

    def hello(self, hello: Hello | bytes, *, source: Session = SOURCE, proof: bytes = b"") -> None:
        if isinstance(hello, Hello):
            names = ("generation", "source", "destination")
            fields = {name: getattr(hello, name) for name in names}
            hello = pb.Hello(**fields).SerializeToString()
        dialer = source.dialer_to(1)
        carry = self._channel.stream_stream(
            CARRY,
            request_serializer=pb.Chunk.SerializeToString,
            response_deserializer=pb.Credit.FromString,
        )
        requests = iter(self.requests.get, None)
        metadata = [(HELLO_KEY, hello), *dialer.metadata()]
        self.call = carry(requests, metadata=metadata, timeout=DEADLINE_S)
        # The answer of somebody with other secrets is sent all the same.
        answer = dialer.answer(self.call.initial_metadata() or ())
        self.requests.put(pb.Chunk(proof=proof or answer or b"?" * 32))

    def chunk(
        self,
        header: bytes = b"",
        payload: bytes = b"",
        edge: int = 0,
        companions: Sequence[pb.Chunk] = (),
    ) -> None:
        with_it = [companion.SerializeToString() for companion in companions]
        self.requests.put(
            pb.Chunk(plan=0, edge=edge, header=header, payload=payload, companions=with_it)
        )

    def error(self) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError):
            for _ in self.call:
                pass
        return self.call.code(), self.call.details()

    def close(self) -> None:
        self.requests.put(None)
        if self.call is not None:
            self.call.cancel()
        self._channel.close()


@pytest.fixture
def victim() -> Iterator[tuple[GrpcTransport, str]]:
    """Worker 1 of a job of two, and its address."""
    listener = GrpcListener("127.0.0.1")
    transport = GrpcTransport(
        listener,
        session=Session("job", 1, 1, TOKENS),
        targets=(None, listener.address),
        policy=WaitPolicy(deadline_s=DEADLINE_S),
    )
    yield transport, listener.address
    transport.close()


@pytest.fixture
def stranger(victim: tuple[GrpcTransport, str]) -> Iterator[Stranger]:
    client = Stranger(victim[1])
    yield client
    client.close()


@pytest.fixture
def receiver(victim: tuple[GrpcTransport, str]) -> Receiver:
    return victim[0].open_receiver(SPEC)


def header(sequence: int = 0, generation: int = 1) -> bytes:
    frame = FrameEncoder(SPEC, generation=generation).frame_of(torch.ones(4))
    return MESSAGE.pack(sequence, 0, 0) + frame.raw


@pytest.mark.parametrize(
    ("hello", "source"),
    [
        (HELLO, Session("other", 1, 0, TOKENS)),
        (HELLO, Session("job", 1, 0, ("x" * 32, TOKENS[1]))),
        (HELLO, Session("job", 2, 0, TOKENS)),
        (replace(HELLO, generation=2), Session("job", 2, 0, TOKENS)),
        (replace(HELLO, source=2), SOURCE),
        (replace(HELLO, source=-1), SOURCE),
        (replace(HELLO, destination=0), SOURCE),
        (b"\xff\xff\xff", SOURCE),
    ],
)
def test_who_is_no_member_is_refused_at_once_and_told_nothing(
    stranger: Stranger, hello: Hello | bytes, source: Session
) -> None:
    stranger.hello(hello, source=source)
    assert stranger.error() == (
        grpc.StatusCode.PERMISSION_DENIED,
        "no hello of a member of this worker's job",
    )
    assert not stranger.call.initial_metadata()


def test_a_dialer_names_neither_its_job_nor_its_secret(stranger: Stranger) -> None:
    session = replace(SOURCE, job="a job that nobody knows")
    said = write_hello(session.hello_to(1)) + b"".join(
        value for _, value in session.dialer_to(1).metadata()
    )
    for hidden in (session.job, *TOKENS):
        assert hidden.encode() not in said


def test_who_only_repeats_first_words_is_refused_and_leaves_the_place_free(
    stranger: Stranger, victim: tuple[GrpcTransport, str], receiver: Receiver
) -> None:
    stranger.hello(HELLO, proof=b"?" * 32)
    code, details = stranger.error()
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert details == "source: this is not worker 0, it does not know its secret"
    member = Stranger(victim[1])
    member.hello(HELLO)
    assert next(member.call) == pb.Credit(messages=1)
    member.close()


def test_a_second_stream_of_one_source_is_refused(
    victim: tuple[GrpcTransport, str], stranger: Stranger, receiver: Receiver
) -> None:
    stranger.hello(HELLO)
    assert next(stranger.call) == pb.Credit(messages=1)
    second = Stranger(victim[1])
    second.hello(HELLO)
    assert second.error()[0] is grpc.StatusCode.ALREADY_EXISTS
    second.close()


def test_pieces_are_put_together(stranger: Stranger, receiver: Receiver) -> None:
    payload = bytes(torch.ones(4).view(torch.uint8).tolist())
    stranger.hello(HELLO)
    stranger.chunk(header(), payload[:5])
    stranger.chunk(b"", payload[5:])
    value = receiver.receive(step=0, microbatch=0)
    assert value is not None and value.tolist() == [1] * 4


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (lambda s: s.chunk(header(generation=2)), "generation: expected 1, got 2"),
        (lambda s: s.chunk(header(sequence=1)), "sequence number: expected 0, got 1"),
        (lambda s: s.chunk(header(), bytes(17)), "a piece of 17 bytes that fits nowhere"),
        (lambda s: s.chunk(b"", bytes(4)), "a piece of 4 bytes that fits nowhere"),
        (lambda s: [s.chunk(header()), s.chunk(header())], "before the last one ended"),
        (
            lambda s: [s.chunk(header(), bytes(16)), s.chunk(header(1), bytes(16))],
            "expected at most 1 messages under way",
        ),
        (lambda s: s.chunk(b"noise"), "header bytes: expected"),
        (lambda s: s.chunk(header(), edge=7), "plan 0, edge 7, which is not open"),
        (lambda s: s.chunk(companions=[pb.Chunk(edge=7, header=header())]), "edge 7, which is not"),
        (lambda s: s.chunk(companions=[pb.Chunk(payload=b"x")]), "a companion that is no small"),
        (
            lambda s: s.chunk(companions=[pb.Chunk(header=header(), companions=[b""])]),
            "a companion that is no small value",
        ),
    ],
)
def test_what_the_plan_does_not_expect_ends_the_stream_on_both_sides(
    stranger: Stranger, receiver: Receiver, attack: Callable[[Stranger], object], reason: str
) -> None:
    stranger.hello(HELLO)
    attack(stranger)
    code, details = stranger.error()
    assert code is grpc.StatusCode.INVALID_ARGUMENT and reason in details
    with pytest.raises(FrameError, match=reason):
        for _ in range(2):
            receiver.receive(step=0, microbatch=0)


def test_an_oversized_chunk_is_refused(stranger: Stranger, receiver: Receiver) -> None:
    stranger.hello(HELLO)
    stranger.chunk(header(), bytes(3 << 20))
    with pytest.raises(
        TransportError, match=r"worker 0: (the connection to it broke|closed its end)"
    ):
        receiver.receive(step=0, microbatch=0)


@pytest.mark.parametrize(("said", "reason"), [("", ""), ("No route", ": No route")])
def test_a_stream_that_raises_is_told_as_a_connection_that_broke(said: str, reason: str) -> None:
    def messages() -> Iterator[object]:
        raise RuntimeError(said)
        yield

    inbound = Inbound(0, lambda plan, edge, messages: None)
    inbound.read(messages(), lambda: False)
    assert str(inbound.broken) == f"the connection to it broke{reason}"


def test_values_that_may_wait_for_the_next_travel_in_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    take = Inbound.take

    def counting(self: Inbound, data: bytes) -> bytes:
        taken.append(len(data))
        return take(self, data)

    monkeypatch.setattr(Inbound, "take", counting)
    workers = Workers("grpc", 2, DEADLINE_S)
    large = COMPANION_BYTES + 4
    sizes = [16, COMPANION_BYTES, 0, 16, large, 16]
    ends = [
        workers.open(spec_of(edge=edge, shape=(None,), max_bytes=large))
        for edge in range(len(sizes))
    ]
    for sender, receiver in ends:  # who waits for its first credit holds nothing back
        sender.send(None, step=0, microbatch=0)
        receiver.receive(step=0, microbatch=0)
    taken.clear()
    for (sender, _), size in zip(ends, sizes, strict=True):
        sender.hold()
        value = torch.full((size // 4,), float(size)) if size else None
        sender.send(value, step=1, microbatch=0)
    # The large one waits for nobody, and takes those before it along; the last one is held back.
    for (_, receiver), size in zip(ends[:-1], sizes[:-1], strict=True):
        value = receiver.receive(step=1, microbatch=0)
        assert (0 if value is None else value.nbytes) == size
    assert len(taken) == 1
    closing = start(workers.transports[0].close)
    assert ends[-1][1].receive(step=1, microbatch=0) is not None
    assert len(taken) == 2
    workers.close()
    closing.result(DEADLINE_S)


def test_a_refused_source_is_told_why() -> None:
    hubs = [Hub(bind_host="127.0.0.1", mode="grpc") for _ in range(2)]
    peers = [hub.endpoints for hub in hubs]
    policy = WaitPolicy(deadline_s=DEADLINE_S)
    transports = [
        hub.connect(rank=rank, job="job", generation=rank, peers=peers, policy=policy)
        for rank, hub in enumerate(hubs)
    ]
    sender = transports[0].open_sender(SPEC)
    with pytest.raises(TransportError, match="worker 1: permission_denied: no hello of a member"):
        sender.send(None, step=0, microbatch=0)
    for transport in transports:
        transport.close()


def test_a_source_may_come_before_its_destination_serves() -> None:
    hubs = [Hub(bind_host="127.0.0.1", mode="grpc") for _ in range(2)]
    peers = [hub.endpoints for hub in hubs]
    policy = WaitPolicy(deadline_s=DEADLINE_S)

    def connect(rank: int) -> Any:
        hub = hubs[rank]
        return hub.connect(rank=rank, job="job", generation=1, peers=peers, policy=policy)

    early = connect(0)
    sender = early.open_sender(SPEC)
    sending = start(lambda: sender.send(torch.ones(4), step=0, microbatch=0))
    with pytest.raises(futures.TimeoutError):
        sending.result(0.2)
    late = connect(1)
    assert late.open_receiver(SPEC).receive(step=0, microbatch=0) is not None
    sending.result(DEADLINE_S)
    closing = start(early.close)
    late.close()
    closing.result(DEADLINE_S)
