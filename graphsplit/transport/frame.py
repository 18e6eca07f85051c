"""The header of a message: what it says, and everything that is checked before it is believed.

All numbers are little-endian. A header has two parts, so that a channel which always carries the
same layout writes, and compares, only the first::

    message part   sequence u64 | step i64 | microbatch i64
    layout part    magic | flags u16 | dtype u16 | generation i64 | plan i64 | edge i64
                   payload bytes u64 | dims u16 | offset u16 | shape i64... | strides i64...

The number of dimensions is known from the channel's spec, so every header of a channel has the
same size and there is no limit on dimensions. Every number comes from an untrusted peer: it is
compared with the spec before any memory is taken. Python's integers do not overflow, so the
bound on the span holds for any strides.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from graphsplit.errors import FrameError, TransportError
from graphsplit.tensor_meta import SPARSE_FIX, fits
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.bounded_cache import BoundedCache
from graphsplit.transport.dtypes import CODE_OF, carrier_of, name_of
from graphsplit.transport.layout import (
    ALIGNMENT,
    Layout,
    empty_value,
    layout_of,
    unpack,
    wire_view,
)
from graphsplit.transport.pool import POOLED_BYTES, MemoryPool

MAGIC = b"GSF1"
ABSENT = 1
_MAX_ELEMENTS = 1 << 48
_MAX_KNOWN = 8  # layouts for each end of a channel
_STRIDED = torch.strided
_PLAN_AGAIN = "the value differs from the one the plan was made with; plan again for it"

MESSAGE = struct.Struct("<Qqq")
_FIXED = struct.Struct("<4sHHqqqQHH4x")
Numbers = tuple[int, int, int]
"""A header's own numbers: sequence number, step and microbatch."""


def _bytes_taken(layout: Layout, spec: ChannelSpec) -> int:
    """The bytes that a bound applies to: of the span, or of the elements where they share memory.

    [Note: expanded] A value of shape (n,) and stride 0 spans one element whatever n is; where the
    plan does not fix n, n itself must be bounded.
    """
    elements = math.prod(layout.shape) if None in spec.shape else 0
    return max(layout.span, elements) * spec.dtype.itemsize


def header_bytes(spec: ChannelSpec) -> int:
    """Size of every header of a channel."""
    return MESSAGE.size + _FIXED.size + 16 * len(spec.shape)


def describe(spec: ChannelSpec) -> str:
    """A channel in words, for errors."""
    label = spec.label or f"worker {spec.source} -> worker {spec.destination}"
    return label if spec.plan < 0 else f"{label} (plan {spec.plan}, edge {spec.edge})"


@dataclass(frozen=True, eq=False)
class Frame:
    """The layout part of a header, checked, with what is needed to move values of that layout.

    Attributes:
        raw: The layout part as it travels.
        layout: Layout of the value; None if the value is None.
        dtype: dtype of the value.
        offset: Elements between a multiple of 64 bytes and the value's first element.
        payload_bytes: Size of the payload.
        misalignment: Bytes between a multiple of 64 and the sender's first element.
        shape: Shape of the value; None if the value is None.
        strides: Strides of the value; None if the value is None.
        is_whole: True if values are copied as they are, not through a view of their memory.
        is_dense: True if a payload is the value's memory byte by byte.
        device: Where values of this layout are.
    """

    raw: bytes
    layout: Layout | None
    dtype: torch.dtype
    offset: int
    payload_bytes: int
    misalignment: int = 0
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    is_whole: bool = True
    is_dense: bool = False
    device: str = "cpu"

    def wire(self, value: torch.Tensor) -> torch.Tensor:
        """The part of a value that is copied: all of it, or the memory that is really there."""
        if value.requires_grad:
            value = value.detach()
        if self.is_whole:
            return value
        assert self.layout is not None
        return wire_view(value, self.layout)

    def is_payload(self, value: torch.Tensor) -> bool:
        """Whether the bytes in a value's memory are its payload."""
        # Conjugation and negation may be pending in a value, and are not in its memory yet.
        return self.is_dense and not (value.is_conj() or value.is_neg())

    def empty(self) -> torch.Tensor:
        """Fresh memory for a value of this layout."""
        assert self.layout is not None
        return empty_value(self.layout, self.dtype, self.offset, device=self.device)

    def empty_payload(self, pool: MemoryPool | None = None) -> torch.Tensor | None:
        """Memory to receive a payload in: the value itself if its memory has no gaps.

        With a pool, that of a large value is what an earlier one may have left.
        """
        if self.layout is None:
            return None
        if self.is_dense:
            if pool is None or self.payload_bytes < POOLED_BYTES or self.device != "cpu":
                return self.empty()
            return self._empty_from(pool)
        return torch.empty(self.payload_bytes, dtype=torch.uint8, device=self.device)

    def _empty_from(self, pool: MemoryPool) -> torch.Tensor:
        assert self.layout is not None
        with torch.inference_mode(False):
            value = torch.empty(0, dtype=self.dtype, device="cpu")
            size_bytes = (self.layout.span + self.offset) * self.dtype.itemsize
            storage = pool.take(size_bytes).untyped_storage()
            return value.set_(storage, self.offset, self.layout.shape, self.layout.strides)

    def value_in(self, memory: torch.Tensor | None) -> torch.Tensor | None:
        """The value whose payload was received in what ``empty_payload`` gave."""
        if self.is_dense or self.layout is None or memory is None:
            return memory
        return unpack(memory, self.layout, self.dtype, self.offset)


def _frame(raw: bytes, layout: Layout | None, spec: ChannelSpec, misalignment: int) -> Frame:
    if layout is None:
        return Frame(raw, None, spec.dtype, 0, 0)
    itemsize = spec.dtype.itemsize
    return Frame(
        raw=raw,
        layout=layout,
        dtype=spec.dtype,
        offset=misalignment // itemsize if misalignment % itemsize == 0 else 0,
        payload_bytes=layout.payload_elements * itemsize,
        misalignment=misalignment,
        shape=layout.shape,
        strides=layout.strides,
        is_whole=layout.is_whole and carrier_of(spec.dtype) is spec.dtype,
        is_dense=layout.is_dense,
        device=spec.device,
    )


class FrameEncoder:
    """Makes the headers of one channel. Remembers the last layouts, of which one is next."""

    def __init__(self, spec: ChannelSpec, *, generation: int) -> None:
        if spec.dtype not in CODE_OF:
            raise TransportError(
                f"{describe(spec)}: values of {spec.dtype} cannot be sent\n  Fix: convert it to "
                f"a plain dtype before the value changes its worker"
            )
        self._spec = spec
        self._generation = generation
        self._dtype = spec.dtype
        self._is_on_device = spec.device != "cpu"
        self._known: BoundedCache[tuple[Any, ...], Frame] = BoundedCache(_MAX_KNOWN)
        self._absent = _frame(self._raw(None, 0), None, spec, 0)
        self._last = self._absent

    def frame_of(self, value: torch.Tensor | None) -> Frame:
        """The frame for a value, after checking that the value fits the channel.

        Raises:
            TransportError: It does not fit; says what was expected and what was given.
        """
        if value is None:
            return self._absent
        last = self._last
        if (
            value.layout is _STRIDED
            and value.stride() == last.strides
            and value.shape == last.shape
            and value.dtype is self._dtype
            and value.is_cpu is not self._is_on_device
            and value.data_ptr() & 63 == last.misalignment
        ):
            return last
        self._last = self._other_frame(value)
        return self._last

    def _other_frame(self, value: torch.Tensor) -> Frame:
        """The frame for a value that is not as the last one was."""
        if value.layout is not _STRIDED:
            return self._new_frame(value)
        misalignment = value.data_ptr() & 63
        key = value.dtype, value.device, value.shape, value.stride(), misalignment
        return self._known.get(key) or self._known.keep(key, self._new_frame(value))

    def _new_frame(self, value: torch.Tensor) -> Frame:
        spec = self._spec
        if value.layout is not torch.strided or str(value.device) != spec.device:
            where = "CPU" if spec.device == "cpu" else spec.device
            actual = f"{value.layout} on {value.device}"
            fix = SPARSE_FIX if value.layout is not torch.strided else _PLAN_AGAIN
            self._refuse("memory", f"a strided {where} tensor", actual, fix)
        if value.dtype is not spec.dtype:
            self._refuse("dtype", spec.dtype, value.dtype)
        shape = tuple(value.shape)
        if not fits(shape, spec.shape):
            self._refuse("shape", spec.shape, shape)
        layout = layout_of(shape, value.stride())
        taken = _bytes_taken(layout, spec)
        if taken > spec.max_bytes:
            actual = f"{taken} (shape {shape}, strides {layout.strides})"
            self._refuse("bytes with its strides", f"at most {spec.max_bytes}", actual)
        misalignment = value.data_ptr() % ALIGNMENT
        offset = _frame(b"", layout, spec, misalignment).offset
        return _frame(self._raw(layout, offset), layout, spec, misalignment)

    def _raw(self, layout: Layout | None, offset: int) -> bytes:
        spec, dims = self._spec, len(self._spec.shape)
        shape = layout.shape if layout else (0,) * dims
        strides = layout.strides if layout else (0,) * dims
        fixed = _FIXED.pack(
            MAGIC,
            0 if layout else ABSENT,
            CODE_OF[spec.dtype],
            self._generation,
            spec.plan,
            spec.edge,
            layout.payload_elements * spec.dtype.itemsize if layout else 0,
            dims,
            offset,
        )
        return fixed + struct.pack(f"<{2 * dims}q", *shape, *strides)

    def _refuse(
        self, what: str, expected: object, actual: object, fix: str = _PLAN_AGAIN
    ) -> NoReturn:
        raise TransportError(
            f"{describe(self._spec)}: the value to send does not fit the channel\n"
            f"  {what}: expected {expected}, got {actual}\n"
            f"  Fix: {fix}"
        )


class FrameDecoder:
    """Checks the headers of one channel against its spec, before any memory is taken."""

    def __init__(self, spec: ChannelSpec, *, generation: int) -> None:
        self._spec = spec
        self._generation = generation
        self._size = header_bytes(spec)
        self._dims = struct.Struct(f"<{2 * len(spec.shape)}q")
        self._known: BoundedCache[bytes, Frame] = BoundedCache(_MAX_KNOWN)
        self._last: Frame | None = None

    def frame_of(self, header: bytes) -> Frame:
        """The checked frame of a whole header, both parts.

        Raises:
            FrameError: Some field is not what the channel's spec says.
        """
        if len(header) != self._size:
            self._refuse("header bytes", self._size, len(header))
        raw = header[MESSAGE.size :]
        if self._last is None or raw != self._last.raw:
            self._last = self._known.get(raw) or self._known.keep(raw, self._checked(raw))
        return self._last

    def frame_of_message(
        self, header: bytes, *, sequence: int, step: int, microbatch: int
    ) -> Frame:
        """The checked frame of a whole header, which must be that of exactly this message.

        Raises:
            FrameError: As ``frame_of`` and ``check_numbers``.
        """
        last = self._last
        if last is not None and header == MESSAGE.pack(sequence, step, microbatch) + last.raw:
            return last
        frame = self.frame_of(header)
        self.check_numbers(MESSAGE.unpack_from(header), (sequence, step, microbatch))
        return frame

    def check_sequence(self, header: bytes, sequence: int) -> None:
        """Raise ``FrameError`` unless the header is that of message number ``sequence``."""
        self._expect("sequence number", sequence, MESSAGE.unpack_from(header)[0])

    def check_numbers(self, actual: Numbers, expected: Numbers) -> None:
        """Raise ``FrameError`` unless a header's own numbers are these.

        Args:
            actual: Sequence number, step and microbatch in the header.
            expected: Those of the message that is due.
        """
        if actual == expected:
            return
        self._expect("sequence number", expected[0], actual[0])
        told, due = (f"step {step}, microbatch {batch}" for _, step, batch in (actual, expected))
        self._refuse("message", due, told)

    def _checked(self, raw: bytes) -> Frame:
        spec = self._spec
        fields = _FIXED.unpack_from(raw)
        magic, flags, code, generation, plan, edge, payload_bytes, dims, offset = fields
        self._expect("magic", MAGIC, magic)
        self._expect("generation", self._generation, generation)
        self._expect("(plan, edge)", (spec.plan, spec.edge), (plan, edge))
        if code != CODE_OF.get(spec.dtype):
            self._refuse("dtype", spec.dtype, name_of(code))
        self._expect("dimensions", len(spec.shape), dims)
        if flags & ~ABSENT:
            self._refuse("flags", "0 or 1", flags)
        numbers = self._dims.unpack_from(raw, _FIXED.size)
        if flags & ABSENT:
            self._expect("fields of an absent value", {0}, {payload_bytes, offset, 0, *numbers})
            return _frame(raw, None, spec, 0)
        layout = self._checked_layout(numbers[:dims], numbers[dims:])
        itemsize = spec.dtype.itemsize
        self._expect("payload bytes", layout.payload_elements * itemsize, payload_bytes)
        if offset * itemsize >= ALIGNMENT:
            self._refuse("offset", f"below {ALIGNMENT} bytes", f"{offset * itemsize} bytes")
        return _frame(raw, layout, spec, offset * itemsize)

    def _checked_layout(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
        spec = self._spec
        if not fits(shape, spec.shape):
            self._refuse("shape", spec.shape, shape)
        if any(number < 0 for number in (*shape, *strides)):
            self._refuse("shape and strides", "no negative number", (shape, strides))
        # An empty value takes no memory, but torch multiplies its other sizes all the same.
        if math.prod(max(1, size) for size in shape) > _MAX_ELEMENTS:
            self._refuse("elements beside empty dimensions", f"at most {_MAX_ELEMENTS}", shape)
        layout = layout_of(shape, strides)
        taken = _bytes_taken(layout, spec)
        if taken > spec.max_bytes:
            actual = f"{taken} (shape {shape}, strides {strides})"
            self._refuse("bytes with its strides", f"at most {spec.max_bytes}", actual)
        return layout

    def _expect(self, what: str, expected: Any, actual: Any) -> None:
        if expected != actual:
            self._refuse(what, expected, actual)

    def _refuse(self, what: str, expected: object, actual: object) -> NoReturn:
        raise FrameError(
            f"{describe(self._spec)}: a frame that the plan does not expect\n"
            f"  {what}: expected {expected}, got {actual}\n"
            f"  Fix: all workers must run the same script, version and plan; restart the job"
        )
