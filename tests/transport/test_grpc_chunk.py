"""Messages of gRPC streams, against protobuf's own reading of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import FrameError
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.frame import MESSAGE, FrameEncoder, header_bytes
from graphsplit.transport.grpc.chunk import (
    CHUNK_BYTES,
    ChunkPart,
    accompanying,
    credits_in,
    first_prefix,
    read_chunk,
    read_credit,
    riding,
    waiting,
    write_chunk,
    write_more,
)
from graphsplit.transport.grpc.inbound import GrpcReceiver, Inbound
from graphsplit.transport.session import AbortWatch
from graphsplit.transport.wait import WaitPolicy

int64 = st.integers(-(2**63), 2**63 - 1)
credits_ = st.builds(pb.Credit, plan=int64, edge=int64, messages=st.integers(0, 2**32 - 1))
chunks = st.builds(
    pb.Chunk,
    plan=int64,
    edge=int64,
    header=st.binary(max_size=300),
    payload=st.binary(max_size=300),
    proof=st.binary(max_size=40),
    credits=st.lists(credits_, max_size=3),
    waits=st.booleans(),
    companions=st.lists(st.binary(max_size=200), max_size=3),
)


def payload(piece: ChunkPart) -> bytes:
    return piece.data[piece.start : piece.start + piece.size]


def same(piece: ChunkPart, chunk: pb.Chunk) -> bool:
    return (
        (piece.plan, piece.edge, piece.header, piece.proof, payload(piece), piece.waits)
        == (chunk.plan, chunk.edge, chunk.header, chunk.proof, chunk.payload, chunk.waits)
        and [pb.Credit.FromString(credit) for credit in piece.credits] == list(chunk.credits)
        and list(piece.companions) == list(chunk.companions)
    )


@given(chunks)
def test_a_chunk_is_read_as_protobuf_reads_it(chunk: pb.Chunk) -> None:
    assert same(read_chunk(chunk.SerializeToString()), chunk)


@settings(max_examples=500)
@given(st.one_of(st.binary(max_size=60), chunks.map(pb.Chunk.SerializeToString)), st.data())
def test_noise_is_refused_or_read_within_its_bounds(noise: bytes, data: st.DataObject) -> None:
    noise = noise[: data.draw(st.integers(0, len(noise)))]
    try:
        piece = read_chunk(noise)
    except FrameError:
        return
    assert 0 <= piece.start <= piece.start + piece.size <= len(noise)
    try:
        chunk = pb.Chunk.FromString(noise)
    except DecodeError:
        return
    assert (piece.header, payload(piece)) == (chunk.header, chunk.payload)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_written_chunks_are_what_protobuf_expects(size: int) -> None:
    prefix = pb.Chunk(plan=3, edge=-4).SerializeToString()
    value = torch.arange(size).to(torch.uint8)
    address, size_of_first = value.data_ptr(), min(size, CHUNK_BYTES)
    before = accompanying(prefix)
    first = write_chunk(
        *(first_prefix(prefix, 6), b"header", address, size_of_first),
        before=[before],
        after=[riding(3, -4, 2), riding(1 << 40, 0, 1)],
    )
    more = write_more(prefix, address + CHUNK_BYTES, size - size_of_first)
    written = [pb.Chunk.FromString(chunk) for chunk in (first, *more)]
    assert b"".join(chunk.payload for chunk in written) == value.numpy().tobytes()
    assert [chunk.header for chunk in written] == [b"header"] + [b""] * (len(written) - 1)
    assert all((chunk.plan, chunk.edge) == (3, -4) for chunk in written)
    assert list(written[0].credits) == [
        pb.Credit(plan=3, edge=-4, messages=2),
        pb.Credit(plan=1 << 40, messages=1),
    ]
    assert list(written[0].companions) == [prefix]
    assert pb.Chunk.FromString(waiting(prefix)) == pb.Chunk(plan=3, edge=-4, waits=True)


def test_credits_after_a_value_are_told_from_everything_else() -> None:
    credits = riding(3, -4, 2) + riding(0, 1, 1)
    assert credits_in(credits) == ((3, -4, 2), (0, 1, 1))
    assert credits_in(b"") == ()
    for other in (
        pb.Chunk(edge=1).SerializeToString(),
        credits + pb.Chunk(header=b"another").SerializeToString(),
        credits + bytes((0x08, 0)),  # a plan of 0, which a reader of fields would take for the last
        *(accompanying(b""), credits[:-1], bytes((0x32, 1, 0xFF)), b"\xff"),
    ):
        assert credits_in(other) is None


def test_what_is_no_credit_is_refused_and_not_kept() -> None:
    largest = pb.Credit(plan=-(2**63), edge=-(2**63), messages=2**32 - 1)
    assert read_credit(largest.SerializeToString()) == (-(2**63), -(2**63), 2**32 - 1)
    kept = read_credit.cache_info().currsize
    for wrong in (b"\xff", bytes(29), bytes(1 << 20)):
        with pytest.raises(FrameError, match=f"a credit of {len(wrong)} bytes"):
            read_credit(wrong)
    assert read_credit.cache_info().currsize == kept


SPECS = (
    ChannelSpec(0, 0, 0, 1, torch.float32, (4,), 16, depth=3),
    ChannelSpec(2, 300, 0, 1, torch.uint8, (None,), 64, depth=3),
)


class Taken:
    """What a stream's messages came to."""

    def __init__(self, *, reads_every_field: bool) -> None:
        self.credits: list[tuple[int, ...]] = []
        self._inbound = Inbound(0, lambda *credit: self.credits.append(credit))
        watch = AbortWatch(WaitPolicy(deadline_s=1.0))
        self._receivers = [GrpcReceiver(spec, self._inbound, watch, 1) for spec in SPECS]
        for receiver in self._receivers:
            self._inbound.add(receiver)
        self._reads_every_field = reads_every_field
        self.num_alike = 0

    def take(self, data: bytes) -> None:
        if self._reads_every_field:
            self._inbound._known = {}
        self.num_alike += any(data.startswith(lead) for lead in self._inbound._known)
        self._inbound.take(data)

    def receive(self, edge: int, number: int) -> object:
        receiver = self._receivers[edge]
        if not receiver.has_message():
            return str(self._inbound.broken)
        try:
            value = receiver.receive(step=number, microbatch=0)
        except FrameError as error:
            return str(error)
        return None if value is None else (value.stride(), value.tolist())


def messages_of(edge: int, sizes: Sequence[int]) -> list[bytes]:
    """Values of one channel, in one message each."""
    spec = SPECS[edge]
    encoder = FrameEncoder(spec, generation=1)
    first = first_prefix(
        pb.Chunk(plan=spec.plan, edge=spec.edge).SerializeToString(), header_bytes(spec)
    )
    written = []
    for number, size in enumerate(sizes):
        value = torch.arange(size).to(spec.dtype) if edge else torch.full((4,), float(number))
        frame = encoder.frame_of(value)
        header = MESSAGE.pack(number, number, 0) + frame.raw
        after = [riding(1, 1, 1)] * (number % 3)
        written.append(
            write_chunk(first, header, value.data_ptr(), frame.payload_bytes, after=after)
        )
    return written


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_message_like_the_one_before_is_taken_as_one_that_is_read_field_by_field(
    data: st.DataObject,
) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 5, 5, 5, 64]), min_size=3, max_size=3))
    messages = [
        (edge, number, message)
        for edge in (0, 1)
        for number, message in enumerate(messages_of(edge, sizes))
    ]
    if data.draw(st.booleans()):  # the channels take turns
        messages.sort(key=lambda one: one[1])
    spoilt = data.draw(st.integers(0, len(messages)))
    if spoilt < len(messages):
        edge, number, message = messages[spoilt]
        at = data.draw(st.integers(0, len(message)))
        noise = data.draw(st.one_of(st.binary(max_size=3), st.just(riding(5, 6, 7))))
        gap = data.draw(st.sampled_from([0, len(noise)]))
        messages[spoilt] = edge, number, message[:at] + noise + message[at + gap :]
    quick, thorough = Taken(reads_every_field=False), Taken(reads_every_field=True)
    for _, _, message in messages:
        quick.take(message)
        thorough.take(message)
    for edge, number, _ in messages:
        assert quick.receive(edge, number) == thorough.receive(edge, number)
    assert quick.credits == thorough.credits
    assert thorough.num_alike == 0


def test_values_of_one_layout_are_taken_without_reading_every_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = Taken(reads_every_field=False)
    first, *others = messages_of(0, [4, 4, 4])
    taken.take(first)
    monkeypatch.setattr(
        "graphsplit.transport.grpc.inbound.read_chunk", lambda data: pytest.fail("it was read")
    )
    for message in others:
        taken.take(message)
    assert [taken.receive(0, number) for number in range(3)] == [
        ((1,), [float(number)] * 4) for number in range(3)
    ]
    assert taken.credits == [(1, 1, 1)] * 3
