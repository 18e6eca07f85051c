"""The slots of a channel in shared memory: where a value is written, and how it is taken out.

A channel has ``depth`` slots, as many as messages may be under way. One that ``lends``, and whose
values are large, has some more, so that a value need not be copied out::

    small value    the receiver copies it out; its slot is free at once
    large value    the receiver hands out the slot itself; it is free when the tensor has gone

[Note: lent slots] A lent slot does not count as a message under way: ``depth`` is proven to be
enough only if taking a message makes room for another. So a slot is lent only while fewer than
``num_spare`` are; else the value is copied out like a small one. Whoever holds a value for long
(an output, an activation until its backward) thus costs a copy, and never blocks a sender.
Each lent slot has a word of its own: the receiver sets it before it counts the message as taken,
and clears it after its last look at the value. The sender takes the lowest slot that is neither
under way nor lent, so memory that is not needed is not touched.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.bounded_cache import BoundedCache
from graphsplit.transport.frame import Frame, header_bytes
from graphsplit.transport.layout import (
    ALIGNMENT,
    UNLOCKED_BYTES,
    aligned,
    copy_bytes,
    copy_unlocked,
    payload_view,
)
from graphsplit.transport.shm.region import SharedRegion, can_populate

LEND_BYTES = 128 << 10
"""Values from this size on are lent: copying one out costs more than keeping track of it."""

_SPARE_BYTES, _MAX_SPARE = 256 << 20, 32
_MAX_VIEWS = 4  # layouts that a slot is ready for


def num_spare(spec: ChannelSpec) -> int:
    """The number of values of a channel that may be lent at a time."""
    if not spec.lends or spec.max_bytes < LEND_BYTES or not can_populate():
        return 0
    return max(1, min(_MAX_SPARE, _SPARE_BYTES // spec.max_bytes))


def slot_bytes(spec: ChannelSpec) -> int:
    """Size of one slot."""
    return aligned(header_bytes(spec)) + max(aligned(spec.max_bytes), ALIGNMENT)


def _is_dense(frame: Frame) -> bool:
    """Whether a payload equals its value's memory byte by byte, whatever the value is.

    A complex value may be conjugated only where it is read; its memory says nothing of that.
    """
    layout = frame.layout
    if layout is None or frame.dtype.is_complex or frame.device != "cpu":
        return False
    return layout.is_dense and layout.span > 0


class _Lease:
    """Clears a slot's word when the last tensor that sees the slot has gone."""

    words: memoryview
    word: int
    fence: Callable[[], None]
    region: SharedRegion  # keeps the memory mapped
    process = -1

    def __del__(self) -> None:
        # A child made by fork has no say in memory that it shares with its parent.
        if self.process == os.getpid():
            self.fence()
            self.words[self.word] = 0


@dataclass(frozen=True, eq=False)
class _PayloadView:
    """A slot's payload as one layout sees it.

    Attributes:
        frame: The layout.
        view: The payload; None if there is none.
        is_dense: Whether it is copied byte by byte.
        is_cloned: Whether a value is a clone of the view.
        lease: The class of leases of this size; None if such values are not lent.
    """

    frame: Frame
    view: torch.Tensor | None = None
    is_dense: bool = False
    is_cloned: bool = False
    lease: Any = None


class RingSlot:
    """Room for one message: its header, and its payload seen as the last layout sees it.

    Args:
        region: The channel's memory.
        offset: Where the slot begins in it.
        spec: The channel.
        words: The channel's words.
        lent_word: Which of them says that this slot is lent.
        fence: Orders what comes before it with what comes after.

    Attributes:
        header: The header's bytes.
        frame: The last layout.
    """

    def __init__(
        self,
        region: SharedRegion,
        offset: int,
        spec: ChannelSpec,
        *,
        words: memoryview,
        lent_word: int,
        fence: Callable[[], None],
    ) -> None:
        self._region = region
        self._offset = offset
        self._payload_at = aligned(header_bytes(spec))
        self._address = region.address + offset + self._payload_at
        self._reserved = -1
        self._words = words
        self._lent_word = lent_word
        self._fence = fence
        self.header = memoryview(region.buffer).cast("B")[offset : offset + header_bytes(spec)]
        self._memory = torch.frombuffer(
            region.buffer,
            dtype=torch.uint8,
            offset=offset + self._payload_at,
            count=slot_bytes(spec) - self._payload_at,
        )
        self._known: BoundedCache[int, _PayloadView] = BoundedCache(_MAX_VIEWS)
        self.frame: Frame | None = None
        self._payload: _PayloadView

    def adopt(self, frame: Frame) -> None:
        """Turn to another layout."""
        known = self._known
        self._payload = known.get(id(frame)) or known.keep(id(frame), self._view_as(frame))
        self.frame = frame

    def _view_as(self, frame: Frame) -> _PayloadView:
        if frame.payload_bytes > self._reserved:
            self._region.reserve(self._offset, self._payload_at + frame.payload_bytes)
            self._reserved = frame.payload_bytes
        if frame.layout is None:
            return _PayloadView(frame)
        is_dense, is_cloned, lease = _is_dense(frame), False, None
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            view = payload_view(self._memory, frame.layout, frame.dtype)
            if is_dense and frame.is_whole and frame.offset == 0:
                strided = view.as_strided(frame.layout.shape, frame.layout.strides)
                if torch.empty_like(strided).stride() == frame.strides:
                    view, is_cloned = strided, True
        if is_cloned and frame.payload_bytes >= LEND_BYTES:
            lease = type("Lease", (_Lease, ctypes.c_ubyte * frame.payload_bytes), {})
        return _PayloadView(frame, view, is_dense, is_cloned, lease)

    def write(self, value: torch.Tensor) -> None:
        """Copy in a value of the layout that was adopted last."""
        payload = self._payload
        if payload.is_dense and not value.is_neg():
            source = value.data_ptr()
            if source:
                size = payload.frame.payload_bytes
                copy = copy_bytes if size < UNLOCKED_BYTES else copy_unlocked
                copy(self._address, source, size)
                return
        if payload.view is not None:
            payload.view.copy_(payload.frame.wire(value))

    def copy_out(self) -> torch.Tensor | None:
        """The value in fresh memory of its own."""
        payload = self._payload
        if payload.view is None:
            return None
        if payload.is_cloned:
            return payload.view.clone()
        value = payload.frame.empty()
        payload.frame.wire(value).copy_(payload.view)
        return value

    def lend(self) -> torch.Tensor | None:
        """The value where it is, until its memory is freed; None if it has to be copied out.

        The tensor is no view of another one: operations in place treat it as any other.
        """
        frame = self._payload.frame
        if self._payload.lease is None or frame.layout is None:
            return None
        lease = self._payload.lease.from_address(self._address)
        self._words[self._lent_word] = 1
        lease.words, lease.word, lease.fence = self._words, self._lent_word, self._fence
        lease.region, lease.process = self._region, os.getpid()
        storage = torch.frombuffer(lease, dtype=torch.uint8).untyped_storage()
        value = torch.empty(0, dtype=frame.dtype, device="cpu")
        return value.set_(storage, 0, frame.layout.shape, frame.layout.strides)

    @property
    def is_lent(self) -> bool:
        """Whether a value is still seen by somebody."""
        return bool(self._words[self._lent_word])
