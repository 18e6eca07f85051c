"""Noise against a worker's port: streams end, the receiver is told, and the real source gets in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_fuzzer import DEADLINE_S, held, wait_released

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import FrameError, TransportError
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.frame import MESSAGE, FrameEncoder
from graphsplit.transport.grpc import listener as grpc_listener
from graphsplit.transport.grpc import transport as grpc_transport
from graphsplit.transport.grpc.calls import CARRY, HELLO_KEY
from graphsplit.transport.grpc.listener import GrpcListener
from graphsplit.transport.grpc.transport import GrpcTransport
from graphsplit.transport.session import Session
from graphsplit.transport.wait import WaitPolicy

TOKENS = ("0" * 32, "1" * 32)
SOURCE = Session("job", 1, 0, TOKENS)
SPEC = ChannelSpec(0, 0, 0, 1, torch.float32, (4,), 16, 2)
HELLO = pb.Hello(generation=1, source=0, destination=1).SerializeToString()
HEADER = MESSAGE.pack(0, 0, 0) + FrameEncoder(SPEC, generation=1).frame_of(torch.ones(4)).raw
# Stands for a message beyond all bounds: hypothesis should not have to print it.
LARGE = b"large"
GOOD = pb.Chunk(plan=0, edge=0, header=HEADER, payload=bytes(16)).SerializeToString()
CHUNKS = st.lists(
    st.one_of(
        st.binary(max_size=120),
        st.sampled_from([GOOD, GOOD[:40], LARGE]),
        st.builds(
            lambda plan, edge, header, payload: pb.Chunk(
                plan=plan, edge=edge, header=header, payload=payload
            ).SerializeToString(),
            st.integers(-(2**63), 2**63 - 1) | st.just(0),
            st.integers(-(2**63), 2**63 - 1) | st.just(0),
            st.binary(max_size=100) | st.just(HEADER),
            st.binary(max_size=40),
        ),
    ),
    max_size=5,
)
FEW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


class Victim:
    """Worker 1 of two, and ways to bother it."""

    def __init__(self) -> None:
        self.held = held()
        self.listener = GrpcListener("127.0.0.1", num_workers=2)
        self.transport = GrpcTransport(
            self.listener,
            session=Session("job", 1, 1, TOKENS),
            targets=(None, None),
            policy=WaitPolicy(deadline_s=DEADLINE_S),
        )
        self.receiver = self.transport.open_receiver(SPEC)
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(self.listener.address, options=options)

    def bother(self, hello: bytes, chunks: list[bytes], *, as_member: bool) -> grpc.StatusCode:
        """Open a stream, say all that, and wait for its end."""
        carry: Callable[..., Any] = self.channel.stream_stream(CARRY)
        dialer = SOURCE.dialer_to(1)
        proved = threading.Event()
        answers: list[bytes] = []

        def requests() -> Any:
            proved.wait(DEADLINE_S)
            yield from answers
            yield from (bytes(3 << 20) if chunk is LARGE else chunk for chunk in chunks)

        metadata = [(HELLO_KEY, hello), *dialer.metadata()]
        call = carry(requests(), metadata=metadata, timeout=DEADLINE_S)
        answer = dialer.answer(call.initial_metadata() or ())
        if as_member and answer is not None:
            answers.append(pb.Chunk(proof=answer).SerializeToString())
        proved.set()
        try:
            for _ in call:
                pass
            return grpc.StatusCode.OK
        except grpc.RpcError:
            return call.code()

    def close(self) -> None:
        self.channel.close()
        self.transport.close()
        wait_released(self.held)


@FEW
@given(st.one_of(st.binary(max_size=60), st.just(HELLO)), CHUNKS)
def test_no_noise_of_strangers_gets_in_or_takes_the_place_of_the_source(
    hello: bytes, chunks: list[bytes]
) -> None:
    victim = Victim()
    try:
        code = victim.bother(hello, chunks, as_member=False)
        assert code is not grpc.StatusCode.OK
        victim.bother(HELLO, [GOOD], as_member=True)
        value = victim.receiver.receive(step=0, microbatch=0)
        assert value is not None and value.tolist() == [0.0] * 4
    finally:
        victim.close()


@FEW
@given(CHUNKS)
def test_noise_of_a_member_ends_its_stream_and_nothing_else(chunks: list[bytes]) -> None:
    victim = Victim()
    try:
        victim.bother(HELLO, chunks, as_member=True)
        with pytest.raises((FrameError, TransportError)):
            for _ in range(SPEC.depth + 1):
                victim.receiver.receive(step=0, microbatch=0)
    finally:
        victim.close()


def test_who_proves_nothing_is_sent_away_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_transport, "PROVE_S", 0.2)
    victim = Victim()
    carry = victim.channel.stream_stream(CARRY)
    hold = threading.Event()

    def silence() -> Any:
        hold.wait(DEADLINE_S)
        yield from ()

    metadata = [(HELLO_KEY, HELLO), *SOURCE.dialer_to(1).metadata()]
    call = carry(silence(), metadata=metadata, timeout=DEADLINE_S)
    with pytest.raises(grpc.RpcError):
        next(call)
    assert call.details() == "source: no proof within 0.2 s"
    hold.set()
    victim.close()


def test_a_flood_of_streams_starts_a_bounded_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    victim = Victim()
    before = set(threading.enumerate())
    hold = threading.Event()

    def silence() -> Any:
        hold.wait(DEADLINE_S)
        yield from ()

    channels = [
        grpc.insecure_channel(
            victim.listener.address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        for _ in range(60)
    ]
    metadata = [(HELLO_KEY, HELLO), *SOURCE.dialer_to(1).metadata()]
    calls = [channel.stream_stream(CARRY)(silence(), metadata=metadata) for channel in channels]
    for call in calls:
        call.initial_metadata()
    started = set(threading.enumerate()) - before
    streams = [t for t in started if t.name.startswith("graphsplit-grpc")]
    assert started
    assert len(streams) <= 2 * (2 * 2 + 16)
    for call in calls:
        call.cancel()
    hold.set()
    for channel in channels:
        channel.close()
    victim.close()
    assert grpc_listener.PROVE_S == 10.0
