"""The bytes of a link: records that share messages, and values too large to share one.

A *message* is what one Gloo send carries, at most ``MESSAGE_BYTES``. It holds one or several
records, each at a multiple of 64 bytes::

    number of records u32 | record, header, payload | record, header, payload | ...

A record's payload stands inside the message if it is small. A larger one follows under a tag of
its own, straight out of the sender's memory and into the receiver's; on a device it goes from
device to device instead. Large payloads arrive in the order of their records.
"""

from __future__ import annotations

import struct
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from graphsplit.errors import FrameError
from graphsplit.transport.layout import ALIGNMENT, aligned

PIECE_BYTES = 512 << 10
"""Larger payloads travel in pieces of this size, the next one copied while the last one is sent."""
INLINE_BYTES = 256 << 10
"""Payloads up to this size travel inside a message."""
MESSAGE_BYTES = INLINE_BYTES + (4 << 10)
MAX_HEADER_BYTES = 2 << 10

FOREVER = timedelta(days=365)
"""Gloo breaks a link when a wait ends by time; so waits end by the job's abort, or the peer's."""
MESSAGE_TAG, PAYLOAD_TAG, ABORT_TAG = 0, 1, 2

_COUNT = struct.Struct("<I")
_RECORD = struct.Struct("<BxHIqqQ")


class RecordKind(IntEnum):
    """The meaning of a record."""

    PROOF = 1  # the first one: header = who I am
    CREDIT = 2  # number = messages that may be sent in (plan, edge)
    SMALL = 3  # a value, payload behind the header
    LARGE = 4  # a value, payload in a message of its own
    DEVICE = 5  # a value, payload from device to device
    BYE = 6  # nothing more will come
    READ = 7  # answer to BYE: all of it was read
    WANT = 8  # the sender of (plan, edge) waits for credit
    PING = 9  # say something
    PONG = 10  # answer to PING


_KINDS = {int(kind): kind for kind in RecordKind}


class WireRecord(NamedTuple):
    """One record.

    Attributes:
        kind: What it says.
        plan: The channel's plan.
        edge: The channel's edge.
        number: Number of credits.
        header: Header of a value, or the proof.
        payload_bytes: Size of the payload, wherever it is.
    """

    kind: RecordKind
    plan: int = 0
    edge: int = 0
    number: int = 0
    header: bytes = b""
    payload_bytes: int = 0


class MessageBuffer:
    """Memory for one message, to write it or to receive it.

    Attributes:
        memory: All of it.
        used: Bytes written.
        count: Records written.
        work: The send that last read from it, or the receive that writes to it.
    """

    def __init__(self) -> None:
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.memory = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        self._written: dict[int, torch.Tensor] = {}  # by size, which is a multiple of 64
        self._view = memoryview(self.memory.numpy().data).cast("B")
        self.used = ALIGNMENT
        self.count = 0
        self.work: Any = None

    def clear(self) -> None:
        """Begin a new message."""
        self.used, self.count = ALIGNMENT, 0

    def write(self, record: WireRecord) -> int | None:
        """Add a record; the address for its payload. None if it does not fit behind the others."""
        kind, plan, edge, number, header, payload_bytes = record
        start = self.used
        payload = start + aligned(_RECORD.size + len(header))
        end = payload + aligned(payload_bytes) if kind is RecordKind.SMALL else payload
        if end > MESSAGE_BYTES:
            return None
        _RECORD.pack_into(self._view, start, kind, len(header), number, plan, edge, payload_bytes)
        body = start + _RECORD.size
        self._view[body : body + len(header)] = header
        self.used = end
        self.count += 1
        return self.address + payload

    def written(self) -> torch.Tensor:
        """The message."""
        _COUNT.pack_into(self._view, 0, self.count)
        used = self._written.get(self.used)
        if used is None:  # a view costs as much as a record
            used = self._written[self.used] = self.memory[: self.used]
        return used

    def read(self) -> list[tuple[WireRecord, int]]:
        """The records, and the address of each one's payload.

        Raises:
            FrameError: A record does not lie inside the message.
        """
        (count,) = _COUNT.unpack_from(self._view)
        records = []
        at = ALIGNMENT
        for _ in range(count):
            if at + _RECORD.size > MESSAGE_BYTES:
                raise FrameError(f"a message of {count} records, which is more than fit in it")
            number_of_kind, size, number, plan, edge, payload_bytes = _RECORD.unpack_from(
                self._view, at
            )
            body, kind = at + _RECORD.size, _KINDS.get(number_of_kind)
            at += aligned(_RECORD.size + size)
            if kind is None or size > MAX_HEADER_BYTES or at > MESSAGE_BYTES:
                raise FrameError(f"a record of kind {number_of_kind} with a header of {size} bytes")
            header = self._view[body : body + size].tobytes() if size else b""
            record = WireRecord(kind, plan, edge, number, header, payload_bytes)
            records.append((record, self.address + at))
            if kind is RecordKind.SMALL:
                at += aligned(payload_bytes)
                if at > MESSAGE_BYTES:
                    raise FrameError(
                        f"a record with {payload_bytes} bytes of payload, more than fit in it"
                    )
        return records


def octets(value: torch.Tensor, size_bytes: int) -> torch.Tensor:
    """The memory of a dense value as bytes, not copied."""
    with torch.inference_mode(False), torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=value.device)
        start = value.storage_offset() * value.dtype.itemsize
        return flat.set_(value.untyped_storage(), start, (size_bytes,), (1,))
