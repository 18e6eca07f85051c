"""Messages of gRPC streams, against protobuf's own reading of them."""

from __future__ import annotations

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import FrameError
from graphsplit.transport._grpc_chunk import (
    CHUNK_BYTES,
    Piece,
    accompanying,
    read_chunk,
    riding,
    waiting,
    write_chunks,
    write_credit,
)
from graphsplit.transport.base import ChannelSpec

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


def payload(piece: Piece) -> bytes:
    return piece.data[piece.start : piece.start + piece.size]


def same(piece: Piece, chunk: pb.Chunk) -> bool:
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
    spec = ChannelSpec(3, -4, 0, 1, torch.uint8, (None,), size)
    prefix = pb.Chunk(plan=3, edge=-4).SerializeToString()
    credit = write_credit(spec, 2)
    value = torch.arange(size).to(torch.uint8)
    written = [
        pb.Chunk.FromString(chunk)
        for chunk in write_chunks(
            riding(credit) + prefix, prefix, b"header", value.data_ptr(), size
        )
    ]
    assert b"".join(chunk.payload for chunk in written) == value.numpy().tobytes()
    assert [chunk.header for chunk in written] == [b"header"] + [b""] * (len(written) - 1)
    assert all((chunk.plan, chunk.edge) == (3, -4) for chunk in written)
    assert list(written[0].credits) == [pb.Credit(plan=3, edge=-4, messages=2)]
    (companion,) = pb.Chunk.FromString(accompanying(written[0].SerializeToString())).companions
    assert pb.Chunk.FromString(companion) == written[0]
    assert pb.Chunk.FromString(waiting(prefix)) == pb.Chunk(plan=3, edge=-4, waits=True)
