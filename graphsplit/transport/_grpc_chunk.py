"""The messages of a stream, written and read without protobuf objects.

The bytes are those of ``proto/graphsplit/data_plane.proto``. Protobuf would copy a payload into a
message and out of it again, on both sides; here it is copied once on each, and a small value does
not pay for objects that live for microseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import FrameError
from graphsplit.transport.base import ChannelSpec

CHUNK_BYTES = 1 << 20

_PLAN, _EDGE, _WAITS = 0x08, 0x10, 0x38  # tags: field number << 3, a varint
_HEADER, _PAYLOAD, _PROOF = 0x1A, 0x22, 0x2A  # tags: field number << 3 | 2, bytes
_CREDIT, _COMPANION = 0x32, 0x42
_PAYLOAD_TAG, _COMPANION_TAG = bytes([_PAYLOAD]), bytes([_COMPANION])
_MAX_VARINT_BYTES = 10
_SMALL_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class Piece:
    """One ``Chunk``, with its payload where it arrived.

    Attributes:
        plan: The channel's plan.
        edge: The channel's edge.
        header: Header of a value, in its first piece.
        proof: That the source is a member, alone in the first message of a stream.
        data: The whole message.
        start: Where the payload begins in it.
        size: Bytes of payload.
        credits: Serialized credits that ride along.
        waits: The source waits for credit.
        companions: Other chunks that travel along, and come first.
    """

    plan: int = 0
    edge: int = 0
    header: bytes = b""
    proof: bytes = b""
    data: bytes = b""
    start: int = 0
    size: int = 0
    credits: tuple[bytes, ...] = ()
    waits: bool = False
    companions: tuple[bytes, ...] = ()


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def write_credit(spec: ChannelSpec, messages: int) -> bytes:
    """A ``Credit``."""
    return pb.Credit(plan=spec.plan, edge=spec.edge, messages=messages).SerializeToString()


def riding(credit: bytes) -> bytes:
    """A ``Credit`` as a field of a ``Chunk``."""
    return bytes((_CREDIT, len(credit))) + credit  # a credit has at most 28 bytes


def accompanying(chunk: bytes) -> bytes:
    """A ``Chunk`` as a field of another one."""
    return b"".join((_COMPANION_TAG, _varint(len(chunk)), chunk))


def waiting(prefix: bytes) -> bytes:
    """The ``Chunk`` that says that the source waits for credit."""
    return prefix + bytes((_WAITS, 1))


def write_chunks(
    first_prefix: bytes, prefix: bytes, header: bytes, address: int, size_bytes: int
) -> Iterator[bytes]:
    """The ``Chunk`` messages of one value, copied out of its memory once.

    A protobuf message may be written field by field, so the payload needs no message of its own.
    ``prefix`` holds the channel's fields, ``first_prefix`` also what rides along.
    """
    first = first_prefix + pb.Chunk(header=header).SerializeToString()
    if size_bytes == 0:
        yield first
    for start in range(0, size_bytes, CHUNK_BYTES):
        size = min(CHUNK_BYTES, size_bytes - start)
        piece = (ctypes.c_char * size).from_address(address + start)
        fields = first if start == 0 else prefix
        yield b"".join((fields, _PAYLOAD_TAG, _varint(size), piece))


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    for octet in data[at : at + _MAX_VARINT_BYTES]:
        at += 1
        number |= (octet & 0x7F) << shift
        if octet < 0x80:
            return number, at
        shift += 7
    raise FrameError("a chunk with a number that has no end")


def _signed(number: int) -> int:
    """A ``sint64``."""
    return number >> 1 ^ -(number & 1)


def read_chunk(data: bytes) -> Piece:
    """A message of the stream; its payload is not copied.

    Raises:
        FrameError: It is no ``Chunk``.
    """
    numbers = {_PLAN: 0, _EDGE: 0, _WAITS: 0}
    repeated: dict[int, list[bytes]] = {_CREDIT: [], _COMPANION: []}
    spans = {_HEADER: (0, 0), _PAYLOAD: (0, 0), _PROOF: (0, 0)}
    at, end = 0, len(data)
    while at < end:
        tag = data[at]
        number, at = _read_varint(data, at + 1)
        if tag in numbers:
            numbers[tag] = number
        elif tag in spans and number <= end - at:
            spans[tag] = at, at + number
            at += number
        elif tag in repeated and number <= end - at:
            repeated[tag].append(data[at : at + number])
            at += number
        else:
            raise FrameError(f"a chunk with {end} bytes and a field of tag {tag} that is none")
    header, payload, proof = spans[_HEADER], spans[_PAYLOAD], spans[_PROOF]
    return Piece(
        _signed(numbers[_PLAN]),
        _signed(numbers[_EDGE]),
        data[header[0] : header[1]],
        data[proof[0] : proof[1]],
        data,
        payload[0],
        payload[1] - payload[0],
        tuple(repeated[_CREDIT]),
        numbers[_WAITS] != 0,
        tuple(repeated[_COMPANION]),
    )


def copy_payload(piece: Piece, address: int) -> None:
    """Copy a piece's payload to where it belongs.

    A small copy keeps the interpreter's lock: with other threads waiting for it, getting it back
    takes longer than the copy.
    """
    if piece.size <= _SMALL_BYTES:
        target = (ctypes.c_ubyte * piece.size).from_address(address)
        source = memoryview(piece.data)[piece.start : piece.start + piece.size]
        memoryview(target).cast("B")[:] = source
    else:
        start = ctypes.cast(ctypes.c_char_p(piece.data), ctypes.c_void_p).value or 0
        ctypes.memmove(address, start + piece.start, piece.size)
