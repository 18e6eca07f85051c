"""A destination pulls its values: who may, what is taken, and what happens where it cannot."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from transport_helpers import DEADLINE_S, Workers, note_pulled, spec_of, start

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import FrameError, TransportError
from graphsplit.security.handshake import PROOF_KEY, Recall
from graphsplit.transport.frame import MESSAGE, FrameEncoder
from graphsplit.transport.grpc import pull
from graphsplit.transport.grpc import transport as grpc_transport
from graphsplit.transport.grpc.calls import CARRY, HELLO_KEY, PULL, write_hello
from graphsplit.transport.grpc.chunk import PULLS, write_credit
from graphsplit.transport.grpc.inbound import Inbound
from graphsplit.transport.grpc.listener import GrpcListener
from graphsplit.transport.grpc.outbound import Outbound
from graphsplit.transport.grpc.pull import Puller
from graphsplit.transport.grpc.transport import GrpcTransport
from graphsplit.transport.session import Session
from graphsplit.transport.wait import WaitPolicy

TOKENS = ("0" * 32, "1" * 32)
SOURCE, DESTINATION = Session("job", 1, 0, TOKENS), Session("job", 1, 1, TOKENS)
HELLO = SOURCE.hello_to(1)
SPEC = spec_of(depth=1)
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
RAW = FrameEncoder(SPEC, generation=1).frame_of(torch.ones(4)).raw


def chunk(sequence: int) -> bytes:
    header = MESSAGE.pack(sequence, sequence, 0) + RAW
    return pb.Chunk(plan=0, edge=0, header=header, payload=bytes(16)).SerializeToString()


@pytest.fixture
def port() -> Iterator[Callable[..., str]]:
    """Starts servers that answer as a test says; each gives its address."""
    servers: list[Any] = []

    def serve(**methods: Callable[..., Any]) -> str:
        class Handlers(grpc.GenericRpcHandler):
            def service(self, details: Any) -> Any:
                name = details.method.rpartition("/")[2]
                if name not in methods:
                    return None
                if name == "Pull":
                    return grpc.unary_stream_rpc_method_handler(methods[name])
                return grpc.stream_stream_rpc_method_handler(methods[name])

        server = grpc.server(futures.ThreadPoolExecutor(4))
        server.add_generic_rpc_handlers((Handlers(),))
        number = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{number}"

    yield serve
    for server in servers:
        server.stop(0).wait()


@contextlib.contextmanager
def transport_of(session: Session, *targets: str | None) -> Iterator[tuple[GrpcTransport, str]]:
    listener = GrpcListener("127.0.0.1", num_workers=2)
    transport = GrpcTransport(
        listener, session=session, targets=targets, policy=WaitPolicy(deadline_s=DEADLINE_S)
    )
    try:
        yield transport, listener.address
    finally:
        transport.close()


class Source:
    """A member that opens the stream, and then says what a test wants."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=OWN_CONNECTION)
        dialer = SOURCE.dialer_to(1)
        self.proved = threading.Event()
        self.said: list[bytes] = []
        self.over = threading.Event()
        self.answers: Any = None
        self.recall: Recall | None = None
        self._dialer = dialer

    def open(self) -> None:
        metadata = [(HELLO_KEY, write_hello(HELLO)), *self._dialer.metadata()]
        self.answers = self.channel.stream_stream(CARRY)(self._requests(), metadata=metadata)
        theirs = self.answers.initial_metadata()
        answer = self._dialer.answer(theirs)
        assert answer is not None
        self.recall = self._dialer.recall(theirs)
        self.said.insert(0, pb.Chunk(proof=answer).SerializeToString())
        self.proved.set()

    def _requests(self) -> Iterator[bytes]:
        self.proved.wait(DEADLINE_S)
        yield from self.said
        self.over.wait(DEADLINE_S)

    def close(self) -> None:
        self.proved.set()
        self.over.set()
        if self.answers is not None:
            self.answers.cancel()
        self.channel.close()


def test_values_are_pulled_and_nothing_else_is_read_from_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pulled = note_pulled(monkeypatch)
    workers = Workers("grpc", 2, DEADLINE_S)
    sender, receiver = workers.open(spec_of(depth=2))
    for step in range(20):
        sender.send(torch.full((4,), float(step)), step=step, microbatch=0)
        value = receiver.receive(step=step, microbatch=0)
        assert value is not None and value.tolist() == [step] * 4
    workers.close()
    assert len(pulled) >= 21  # a proof, values, and a word of who waits for credit


def answer_of(address: str, metadata: list[Any]) -> list[bytes] | str:
    """What a stranger gets who pulls; the status if he gets nothing."""
    with grpc.insecure_channel(address, options=OWN_CONNECTION) as channel:
        call = channel.unary_stream(PULL)(b"", metadata=metadata, timeout=DEADLINE_S)
        try:
            return [next(call)]
        except grpc.RpcError:
            return f"{call.code().name}: {call.details()}"


REFUSED = "PERMISSION_DENIED: no stream of yours"


@pytest.mark.parametrize(
    "hello",
    [
        b"\xff\xff\xff",
        b"",
        write_hello(replace(HELLO, generation=2)),
        write_hello(replace(HELLO, source=1)),
        write_hello(replace(HELLO, destination=0)),
        write_hello(replace(HELLO, destination=-1)),
        write_hello(replace(HELLO, destination=7)),
    ],
)
def test_who_names_no_stream_of_this_worker_pulls_nothing(
    port: Callable[..., str], hello: bytes
) -> None:
    with transport_of(SOURCE, None, port()) as (transport, address):
        transport.open_sender(SPEC)
        metadata = [(HELLO_KEY, hello), (PROOF_KEY, b"?" * 32)]
        assert answer_of(address, metadata) == REFUSED


class Destination:
    """Serves the stream of a source as a member would, and lets a test pull."""

    def __init__(self) -> None:
        self.recall: Recall | None = None
        self.met = threading.Event()
        self.goes_on = threading.Event()
        self.said: list[bytes] = []
        self.got: list[bytes] = []

    def carry(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        listener = DESTINATION.listener_to(0, context.invocation_metadata())
        context.send_initial_metadata(listener.metadata())
        assert listener.accepts(pb.Chunk.FromString(next(requests)).proof)
        self.recall = listener.recall()
        self.met.set()
        self.goes_on.wait(DEADLINE_S)
        yield from self.said
        self.got += requests

    def met_as(self) -> Recall:
        assert self.met.wait(DEADLINE_S) and self.recall is not None
        return self.recall

    def metadata(self, proof: bytes | None = None) -> list[tuple[str, bytes]]:
        proof = self.met_as().listener if proof is None else proof
        return [(HELLO_KEY, write_hello(HELLO)), (PROOF_KEY, proof)]


@pytest.fixture
def member(port: Callable[..., str]) -> Iterator[tuple[Destination, GrpcTransport, str]]:
    """The destination of a source under test, which has a channel to it."""
    destination = Destination()
    with transport_of(SOURCE, None, port(Carry=destination.carry)) as (transport, address):
        yield destination, transport, address
        destination.goes_on.set()


def test_only_the_destination_of_this_very_stream_pulls_and_only_once(
    member: tuple[Destination, GrpcTransport, str],
) -> None:
    destination, transport, address = member
    transport.open_sender(SPEC)
    for proof in (b"", b"?" * 32, destination.met_as().dialer):
        assert answer_of(address, destination.metadata(proof)) == REFUSED
    (first,) = answer_of(address, destination.metadata())
    assert isinstance(first, bytes)
    assert pb.Chunk.FromString(first) == pb.Chunk(proof=destination.met_as().dialer)
    assert answer_of(address, destination.metadata()) == REFUSED


def test_who_pulled_and_does_not_say_so_gets_its_values_by_the_stream(
    member: tuple[Destination, GrpcTransport, str],
) -> None:
    destination, transport, address = member
    sender = transport.open_sender(SPEC)
    assert len(answer_of(address, destination.metadata())) == 1  # and hangs up
    destination.said = [write_credit(0, 0, 1)]
    destination.goes_on.set()
    sender.send(torch.ones(4), step=0, microbatch=0)
    transport.close()
    assert len(destination.got) == 1


def test_a_destination_that_says_it_pulls_and_does_not_is_refused(
    member: tuple[Destination, GrpcTransport, str],
) -> None:
    destination, transport, _ = member
    sender = transport.open_sender(SPEC)
    destination.said = [PULLS, write_credit(0, 0, 1)]
    destination.goes_on.set()
    with pytest.raises(TransportError, match="pulls what it did not ask for"):
        for step in range(2):
            sender.send(torch.ones(4), step=step, microbatch=0)


def silent(request: bytes, context: Any) -> Iterator[bytes]:
    while context.is_active():
        threading.Event().wait(0.05)
    yield from ()


@pytest.mark.parametrize(
    "answer",
    [
        lambda request, context: iter([pb.Chunk(proof=b"?" * 32).SerializeToString(), chunk(0)]),
        lambda request, context: iter([chunk(0)]),
        lambda request, context: iter([b"\xff", chunk(0)]),
        lambda request, context: iter([bytes(3 << 20)]),
        lambda request, context: iter([]),
        silent,
        None,
    ],
    ids=["wrong proof", "no proof", "noise", "oversized", "nothing", "silent", "no such method"],
)
def test_an_impostor_at_the_sources_address_gets_no_value_in(
    monkeypatch: pytest.MonkeyPatch, port: Callable[..., str], answer: Any
) -> None:
    monkeypatch.setattr(pull, "PULL_S", 0.3)
    impostor = port() if answer is None else port(Pull=answer)
    with transport_of(DESTINATION, impostor, None) as (transport, address):
        receiver = transport.open_receiver(SPEC)
        source = Source(address)
        source.said = [chunk(0)[:-1] + b"\x01"]  # the value that really comes
        source.open()
        assert next(source.answers) == write_credit(0, 0, 1)  # and not that it pulls
        value = receiver.receive(step=0, microbatch=0)
        assert value is not None and value.view(torch.uint8).tolist() == [0] * 15 + [1]
        source.close()


def test_a_source_that_cannot_be_called_back_sends_by_its_stream(port: Callable[..., str]) -> None:
    with transport_of(DESTINATION, "127.0.0.1:1", None) as (transport, address):
        receiver = transport.open_receiver(SPEC)
        source = Source(address)
        source.said = [chunk(0)]
        source.open()
        assert receiver.receive(step=0, microbatch=0) is not None
        source.close()


def test_a_destination_without_a_thread_to_spare_says_so(
    monkeypatch: pytest.MonkeyPatch, port: Callable[..., str]
) -> None:
    def refuse(*told: Any, **more: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(grpc_transport, "Puller", refuse)
    with transport_of(DESTINATION, port(), None) as (transport, address):
        receiver = transport.open_receiver(SPEC)
        source = Source(address)
        source.open()
        with pytest.raises(TransportError, match="cannot be pulled: can't start new thread"):
            receiver.receive(step=0, microbatch=0)
        source.close()


@pytest.mark.parametrize(
    ("second", "error", "reason"),
    [
        (chunk(2), FrameError, "sequence number: expected 1, got 2"),
        (b"\xff", FrameError, "a number that has no end"),
        (bytes(3 << 20), TransportError, "the connection to it broke"),
    ],
    ids=["out of order", "noise", "oversized"],
)
def test_what_the_plan_does_not_expect_ends_everything(
    port: Callable[..., str], second: bytes, error: type[Exception], reason: str
) -> None:
    recalls: list[Recall] = []
    opened, pulls = threading.Event(), threading.Event()

    def answer(request: bytes, context: Any) -> Iterator[bytes]:
        opened.wait(DEADLINE_S)
        yield pb.Chunk(proof=recalls[0].dialer).SerializeToString()
        pulls.wait(DEADLINE_S)
        yield chunk(0)
        yield second

    with transport_of(DESTINATION, port(Pull=answer), None) as (transport, address):
        receiver = transport.open_receiver(replace(SPEC, depth=2))
        source = Source(address)
        source.open()
        assert source.recall is not None
        recalls.append(source.recall)
        opened.set()
        assert next(source.answers) == PULLS
        pulls.set()
        with pytest.raises(error, match=reason):
            for step in range(2):
                receiver.receive(step=step, microbatch=0)
        with contextlib.suppress(grpc.RpcError):
            for _ in source.answers:
                pass
        is_frame = error is FrameError
        assert (source.answers.code() is grpc.StatusCode.INVALID_ARGUMENT) == is_frame
        source.close()


def test_what_was_pulled_before_the_source_left_is_taken() -> None:
    workers = Workers("grpc", 2, DEADLINE_S)
    sender, receiver = workers.open(spec_of(depth=8, shape=(1 << 18,), max_bytes=1 << 20))
    for step in range(8):
        sender.send(torch.full((1 << 18,), float(step)), step=step, microbatch=0)
    closing = start(workers.transports[0].close)
    for step in range(8):
        value = receiver.receive(step=step, microbatch=0)
        assert value is not None and value[-1] == step
    with pytest.raises(TransportError, match="worker 0: closed its end"):
        receiver.receive(step=8, microbatch=0)
    workers.close()
    closing.result(DEADLINE_S)


def test_a_pull_that_is_given_up_as_it_is_answered_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_answered = Puller.is_answered
    monkeypatch.setattr(Puller, "is_answered", lambda self: is_answered(self) and False)
    workers = Workers("grpc", 2, DEADLINE_S)
    try:
        sender, receiver = workers.open(SPEC)
        for step in range(3):
            sender.send(torch.full((4,), float(step)), step=step, microbatch=0)
            assert torch.equal(
                receiver.receive(step=step, microbatch=0), torch.full((4,), float(step))
            )
    finally:
        workers.close()


def test_a_source_that_cannot_be_called_back_ends_nothing() -> None:
    told: list[tuple[int, str]] = []
    inbound = Inbound(0, lambda plan, edge, messages: None)
    target = "127.0.0.1:1"
    puller = Puller(
        target,
        (HELLO_KEY, write_hello(HELLO)),
        Recall(b"l" * 32, b"d" * 32),
        inbound,
        take=inbound.take,
        expected="",
        silence_s=1.0,
        on_end=lambda peer, end: told.append((peer, end.reason)),
    )
    assert not puller.is_answered()
    puller.stop()
    puller.wait()
    assert inbound.broken is None and not told  # its stream may still carry values


def test_an_outbound_that_is_closing_lets_nobody_pull() -> None:
    outbound = Outbound(1, "127.0.0.1:1", SOURCE, owed=list)
    outbound._recall = recall = SOURCE.dialer_to(1).recall(())
    outbound.close(flush=False)
    assert outbound.pulled(recall.listener) is None
