"""Writes the memory of a value into a payload, and rebuilds it with the same strides.

A sum over a transposed tensor and over its contiguous copy differ in bits, so strides are part
of a value. Its payload holds each element that is really there once, in storage order::

    value                      shape   strides   payload            rebuilt
    contiguous                 (2, 3)  (3, 1)    its 6 elements     (3, 1)
    transposed                 (3, 2)  (1, 3)    its 6 elements     (1, 3)
    expanded                   (4, 3)  (0, 1)    3 elements         (0, 1)
    every second column        (2, 3)  (6, 2)    6, gaps left out   (6, 2), gaps undefined
    windows that overlap       (5, 3)  (1, 1)    the span of 7      (1, 1)

[Note: overlap] Values whose elements share memory in another way than by stride 0 (sliding
windows made by ``unfold`` or ``as_strided``) are sent as their whole span, gaps included: it is
one plain copy, it is bounded by the span that the receiver has to allocate anyway, and what
shares memory on one side shares it on the other. A layout counts as free of overlap when its
dimensions nest, each stride stepping over the whole extent of the smaller ones; the rare layouts
that interleave without touching are sent as a span too, which is right for any layout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphsplit.tensor_meta import span_elements
from graphsplit.transport.dtypes import carrier_of

ALIGNMENT = 64

# To an address, from an address, so many bytes. Copying a large value must let other threads run;
# for a small one that costs more than it does.
UNLOCKED_BYTES = 1 << 20
copy_bytes = ctypes.PyDLL(None).memmove
copy_unlocked = ctypes.CDLL(None).memmove
for _function in (copy_bytes, copy_unlocked):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _function.restype = None


def aligned(size_bytes: int) -> int:
    """The next multiple of a cache line."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """The positions of a value's elements, in its own memory and in a payload.

    Attributes:
        shape: Shape of the value.
        strides: Strides of the value, in elements.
        span: Elements from the first to one past the last, gaps included.
        wire_shape: Shape of what is copied: expanded dimensions once, or ``(span,)``.
        wire_strides: Strides of that in the value's memory.
        payload_strides: Strides of that in the payload.
        payload_elements: Elements in the payload.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    span: int
    wire_shape: tuple[int, ...]
    wire_strides: tuple[int, ...]
    payload_strides: tuple[int, ...]
    payload_elements: int

    @property
    def is_whole(self) -> bool:
        """True if the value itself, not a view of its memory, is what is copied."""
        return self.wire_shape == self.shape and self.wire_strides == self.strides

    @property
    def is_dense(self) -> bool:
        """True if the payload equals the value's memory byte by byte."""
        return self.payload_elements == self.span


def layout_of(shape: Sequence[int], strides: Sequence[int]) -> Layout:
    """The layout of a value, from numbers alone. Strides must not be negative."""
    span = span_elements(shape, strides)
    if span == 0:
        return _span_layout(shape, strides, 0)
    real = [d for d in range(len(shape)) if shape[d] > 1 and strides[d] > 0]
    real.sort(key=lambda d: (strides[d], shape[d]))
    payload_strides = [1] * len(shape)
    extent = elements = 1
    for dimension in real:
        if strides[dimension] < extent:
            return _span_layout(shape, strides, span)
        extent += (shape[dimension] - 1) * strides[dimension]
        payload_strides[dimension] = elements
        elements *= shape[dimension]
    wire_shape = tuple(shape[d] if strides[d] > 0 else 1 for d in range(len(shape)))
    # Dimensions of size 1 are copied under stride 1: theirs may be any number, however large.
    wire_strides = tuple(strides[d] if wire_shape[d] > 1 else 1 for d in range(len(shape)))
    if wire_shape == tuple(shape) and span == elements:
        wire_strides = tuple(strides)
    return Layout(
        shape=tuple(shape),
        strides=tuple(strides),
        span=span,
        wire_shape=wire_shape,
        wire_strides=wire_strides,
        payload_strides=tuple(payload_strides),
        payload_elements=elements,
    )


def _span_layout(shape: Sequence[int], strides: Sequence[int], span: int) -> Layout:
    """The layout that moves every element of the span, whatever the value looks like."""
    return Layout(tuple(shape), tuple(strides), span, (span,), (1,), (1,), span)


def wire_view(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The part of a value's memory that is copied; the value itself in the usual case."""
    carrier = carrier_of(value.dtype)
    if carrier is not value.dtype:
        value = value.view(carrier)
    if layout.is_whole:
        return value
    return value.as_strided(layout.wire_shape, layout.wire_strides)


def payload_view(memory: torch.Tensor, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """The payload in ``memory`` (contiguous bytes), shaped to be copied from or to a value."""
    size_bytes = layout.payload_elements * dtype.itemsize
    elements = memory[:size_bytes].view(carrier_of(dtype))
    return elements.as_strided(layout.wire_shape, layout.payload_strides)


def empty_value(
    layout: Layout, dtype: torch.dtype, offset: int, *, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Fresh memory for a value, ``offset`` elements past a multiple of 64 bytes.

    Libraries choose their kernels by alignment, so a value that was not aligned is not aligned
    where it arrives either.
    """
    if offset == 0:
        return torch.empty_strided(layout.shape, layout.strides, dtype=dtype, device=device)
    storage = torch.empty(layout.span + offset, dtype=dtype, device=device).untyped_storage()
    value = torch.empty(0, dtype=dtype, device=device)
    return value.set_(storage, offset, layout.shape, layout.strides)


def pack(value: torch.Tensor) -> tuple[torch.Tensor, Layout]:
    """Copy a value into a payload of its own: contiguous bytes, and the layout to rebuild it."""
    layout = layout_of(value.shape, value.stride())
    size_bytes = layout.payload_elements * value.dtype.itemsize
    payload = torch.empty(size_bytes, dtype=torch.uint8, device=value.device)
    payload_view(payload, layout, value.dtype).copy_(wire_view(value, layout))
    return payload, layout


def unpack(payload: torch.Tensor, layout: Layout, dtype: torch.dtype, offset: int) -> torch.Tensor:
    """Rebuild a value, in fresh memory, from the payload that ``pack`` made."""
    value = empty_value(layout, dtype, offset, device=payload.device)
    wire_view(value, layout).copy_(payload_view(payload, layout, dtype))
    return value
