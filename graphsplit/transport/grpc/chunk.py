"""The messages of a stream, written and read without protobuf objects.

The bytes are those of ``proto/graphsplit/data_plane.proto``. Protobuf would copy a payload into a
message and out of it again, on both sides; here it is copied once on each, and a small value does
not pay for objects that live for microseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import FrameError

CHUNK_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 2 * CHUNK_BYTES

_PLAN, _EDGE, _WAITS = 0x08, 0x10, 0x38  # tags: field number << 3, a varint
_HEADER, _PAYLOAD, _PROOF = 0x1A, 0x22, 0x2A  # tags: field number << 3 | 2, bytes
_CREDIT, _COMPANION = 0x32, 0x42
_HEADER_TAG, _PAYLOAD_TAG = bytes([_HEADER]), bytes([_PAYLOAD])
_MAX_VARINT_BYTES = 10
_MAX_CREDIT_BYTES = 28
_SMALL_BYTES = 128 << 10


class ChunkPart(NamedTuple):
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


@lru_cache(maxsize=1024)
def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


@lru_cache(maxsize=1024)
def _octets(size: int) -> Any:
    """The type of so many bytes."""
    return ctypes.c_char * size


@lru_cache(maxsize=1024)
def write_credit(plan: int, edge: int, messages: int) -> bytes:
    """A ``Credit``."""
    return pb.Credit(plan=plan, edge=edge, messages=messages).SerializeToString()


PULLS = write_credit(-1, -1, 0)
"""A destination says this in place of a credit, and before any, once it pulls all values."""


@lru_cache(maxsize=1024)
def read_credit(data: bytes) -> tuple[int, int, int]:
    """Plan, edge and messages of a ``Credit``.

    Raises:
        FrameError: It is none.
    """
    if len(data) > _MAX_CREDIT_BYTES:  # what is remembered must be small
        raise FrameError(f"a credit of {len(data)} bytes")
    try:
        credit = pb.Credit.FromString(data)
    except DecodeError as error:
        raise FrameError(f"a credit of {len(data)} bytes that is none") from error
    return credit.plan, credit.edge, credit.messages


@lru_cache(maxsize=1024)
def riding(plan: int, edge: int, messages: int) -> bytes:
    """A ``Credit`` as a field of a ``Chunk``."""
    return _field(_CREDIT, write_credit(plan, edge, messages))


def accompanying(chunk: bytes) -> bytes:
    """A ``Chunk`` as a field of another one."""
    return _field(_COMPANION, chunk)


def _field(tag: int, content: bytes) -> bytes:
    return b"".join((bytes((tag,)), _varint(len(content)), content))


def waiting(prefix: bytes) -> bytes:
    """The ``Chunk`` that says that the source waits for credit."""
    return prefix + bytes((_WAITS, 1))


def first_prefix(prefix: bytes, header_bytes: int) -> bytes:
    """The bytes before the header in the first chunk of each of a channel's values.

    Args:
        prefix: The channel's fields.
        header_bytes: Size of its headers.
    """
    return b"".join((prefix, _HEADER_TAG, _varint(header_bytes)))


def write_chunk(
    first: bytes,
    header: bytes,
    address: int,
    size_bytes: int,
    *,
    before: Iterable[bytes] = (),
    after: Iterable[bytes] = (),
) -> bytes:
    """A value in one ``Chunk``, copied out of its memory once.

    A protobuf message may be written field by field, so the payload needs no message of its own.

    Args:
        first: What ``first_prefix`` gave for its channel.
        header: The value's header.
        address: Where its payload is.
        size_bytes: Size of the payload.
        before: Fields of what travels along, before the value.
        after: Fields of what travels along, after it.
    """
    if size_bytes == 0:
        return b"".join((*before, first, header, *after))
    piece = _octets(size_bytes).from_address(address)
    return b"".join((*before, first, header, _PAYLOAD_TAG, _varint(size_bytes), piece, *after))


def write_more(prefix: bytes, address: int, size_bytes: int) -> Iterator[bytes]:
    """The ``Chunk`` messages of what follows the first ``CHUNK_BYTES`` of a value's payload.

    Args:
        prefix: The channel's fields.
        address: Where the rest of its payload is.
        size_bytes: Size of that.
    """
    for start in range(0, size_bytes, CHUNK_BYTES):
        size = min(CHUNK_BYTES, size_bytes - start)
        piece = _octets(size).from_address(address + start)
        yield b"".join((prefix, _PAYLOAD_TAG, _varint(size), piece))


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


def read_chunk(data: bytes) -> ChunkPart:
    """A message of the stream; its payload is not copied.

    Raises:
        FrameError: It is no ``Chunk``.
    """
    plan = edge = waits = start = size = at = 0
    header = proof = b""
    repeated: dict[int, list[bytes]] = {_CREDIT: [], _COMPANION: []}
    end = len(data)
    while at < end:
        tag = data[at]
        at += 1
        if at < end and data[at] < 0x80:  # most numbers have one octet
            number = data[at]
            at += 1
        else:
            number, at = _read_varint(data, at)
        if tag == _PLAN:
            plan = number
        elif tag == _EDGE:
            edge = number
        elif tag == _WAITS:
            waits = number
        elif number > end - at:
            raise _no_chunk(end, tag)
        else:
            first, at = at, at + number
            if tag == _PAYLOAD:
                start, size = first, number
            elif tag == _HEADER:
                header = data[first:at]
            elif tag == _PROOF:
                proof = data[first:at]
            elif tag in repeated:
                repeated[tag].append(data[first:at])
            else:
                raise _no_chunk(end, tag)
    credits, companions = map(tuple, repeated.values())
    return ChunkPart(
        *(_signed(plan), _signed(edge), header, proof, data, start, size),
        *(credits, waits != 0, companions),
    )


def _no_chunk(size: int, tag: int) -> FrameError:
    return FrameError(f"a chunk with {size} bytes and a field of tag {tag} that is none")


class Outline(NamedTuple):
    """The common parts of a channel's messages whose values have one layout.

    They differ in the first numbers of their headers, in their payloads, and in the credits that
    follow. So a message with these bytes in these places says what the first one said, and need
    not be read field by field.

    Attributes:
        lead: How they begin, up to the header.
        numbers_at: Where the header begins, with its own numbers.
        fixed_at: Where, after those, they are alike again.
        fixed: What stands there, up to the payload.
        start: Where the payload begins.
        end: Where it ends.
    """

    lead: bytes
    numbers_at: int
    fixed_at: int
    fixed: bytes
    start: int
    end: int

    def fits(self, data: bytes) -> bool:
        """Whether a message that begins with ``lead`` has this outline."""
        return data[self.fixed_at : self.start] == self.fixed and len(data) >= self.end


def outline_of(piece: ChunkPart, num_bytes: int) -> Outline | None:
    """The outline of a value that came in one piece; None if its fields have another order.

    Args:
        piece: The message.
        num_bytes: How many bytes of a header are numbers of its own.
    """
    prefix = pb.Chunk(plan=piece.plan, edge=piece.edge).SerializeToString()
    lead = first_prefix(prefix, len(piece.header))
    before = b"".join((lead, piece.header, _PAYLOAD_TAG, _varint(piece.size)))
    if piece.data[: piece.start] != before:
        return None
    fixed_at, end = len(lead) + num_bytes, piece.start + piece.size
    return Outline(lead, len(lead), fixed_at, before[fixed_at:], piece.start, end)


@lru_cache(maxsize=256)
def credits_in(data: bytes) -> tuple[tuple[int, int, int], ...] | None:
    """Plan, edge and messages of the credits after a value; None if anything else stands there."""
    try:
        found = read_chunk(data).credits
        if b"".join(_field(_CREDIT, credit) for credit in found) != data:
            return None
        return tuple(map(read_credit, found))
    except FrameError:
        return None


def copy_payload(data: bytes, start: int, size: int, address: int) -> None:
    """Copy a part of a message to where it belongs.

    A small copy keeps the interpreter's lock: with other threads waiting for it, getting it back
    takes longer than the copy.
    """
    if size <= _SMALL_BYTES:
        _octets(size).from_address(address).raw = memoryview(data)[start : start + size]
    else:
        begin = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
        ctypes.memmove(address, begin + start, size)
