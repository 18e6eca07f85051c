"""One worker's part of a snapshot: tensors side by side in one piece of memory, and JSON.

As it travels, and as the holder keeps it without looking inside::

    length of the header (8 bytes, little-endian) | header (JSON), blanks to 1024 | the memory

The header lists name, dtype, shape, strides and offset of every tensor, and holds all values that
are no tensors, as ``checkpoint.values`` writes them. A counter that grows by a digit seldom changes
the size of the whole: channels are fast with sizes that they have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from graphsplit.checkpoint.layout import meta_from_json
from graphsplit.checkpoint.values import from_text, to_text
from graphsplit.errors import CheckpointError, FrameError
from graphsplit.tensor_meta import contiguous_strides, span_elements
from graphsplit.torch_ext.private import foreach_copy_

_ALIGNMENT = 64
_HEADER_ALIGNMENT = 1024
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        strides: Its strides, in elements; without gaps or overlap.
        offset: Where it begins, in bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes."""
        return span_elements(self.shape, self.strides) * self.dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, in a memory of bytes."""
        octets = memory[self.offset : self.offset + self.size_bytes]
        return octets.view(self.dtype).as_strided(self.shape, self.strides)


class Slots(dict[str, Slot]):
    """Where each of several tensors lies, by name. Nobody changes it once it is complete."""

    @cached_property
    def text(self) -> str:
        """As JSON: name, dtype, shape, strides and offset."""
        return to_text(
            {
                name: [
                    str(s.dtype).removeprefix("torch."),
                    list(s.shape),
                    list(s.strides),
                    s.offset,
                ]
                for name, s in self.items()
            }
        )


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a copy: the tensor's own where those leave no gaps and do not overlap."""
    strides = tuple(tensor.stride())
    is_dense = span_elements(tensor.shape, strides) == tensor.numel()
    overlaps = any(s == 0 for n, s in zip(tensor.shape, strides, strict=True) if n > 1)
    return strides if is_dense and not overlaps else contiguous_strides(tensor.shape)


class FlatTensors:
    """Copies of named tensors, side by side in memory that is used again and again."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.slots = Slots()
        self._key: tuple[Any, ...] = ()
        self._views: list[torch.Tensor] = []

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the values that the tensors have now."""
        with torch.no_grad():
            plain = list(tensors.values())
            key = tuple((t.dtype, t.shape, t.stride()) for t in plain)
            if (key, list(tensors)) != (self._key, list(self.slots)):
                self._lay_out(dict(zip(tensors, plain, strict=True)))
                self._key = key
            foreach_copy_(self._views, plain)

    def _lay_out(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.slots, size = Slots(), 0
        for name, tensor in tensors.items():
            strides = _dense_strides(tensor)
            slot = Slot(tensor.dtype, tuple(tensor.shape), strides, size)
            self.slots[name] = slot
            size = -(-(size + slot.size_bytes) // _ALIGNMENT) * _ALIGNMENT
        if size > self.memory.numel():
            self.memory = torch.empty(size, dtype=torch.uint8)
        self.memory = self.memory[:size]
        self._views = [slot.view(self.memory) for slot in self.slots.values()]


@dataclass(frozen=True, eq=False)
class SnapshotShard:
    """One worker's part of a snapshot.

    Attributes:
        number: Number of the snapshot.
        values: All that is no tensor, encoded.
        memory: The memory of the tensors.
        slots: Where each tensor lies in it.
    """

    number: int
    values: Mapping[str, Any]
    memory: torch.Tensor
    slots: Slots

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, in the part's own memory.

        Raises:
            CheckpointError: There is none of this name.
        """
        slot = self.slots.get(name)
        if slot is None:
            raise CheckpointError(f"snapshot {self.number} refers to {name!r}, which it lacks")
        return slot.view(self.memory)

    def pieces(self) -> list[torch.Tensor]:
        """The part as bytes: header, then memory."""
        values = to_text(self.values)
        text = f'{{"number":{self.number},"values":{values},"tensors":{self.slots.text}}}'.encode()
        length = len(text).to_bytes(_LENGTH_BYTES, "little")
        header = bytearray(length + text)
        header += b" " * (-len(header) % _HEADER_ALIGNMENT)
        return [torch.frombuffer(header, dtype=torch.uint8), self.memory]

    @classmethod
    def read(cls, pieces: Sequence[torch.Tensor], *, what: str) -> SnapshotShard:
        """Read what ``pieces`` gave, cut anywhere, from another worker.

        Raises:
            FrameError: It is something else.
        """
        octets = torch.cat(list(pieces)) if pieces else torch.empty(0, dtype=torch.uint8)
        length = int.from_bytes(octets[:_LENGTH_BYTES].numpy().tobytes(), "little")
        if octets.numel() < _LENGTH_BYTES or length > octets.numel() - _LENGTH_BYTES:
            raise FrameError(f"{what} has {octets.numel()} bytes and a header of {length}")
        start = -(-(_LENGTH_BYTES + length) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT
        # Memory of its own: views of wider dtypes must be aligned.
        memory = octets[start:].clone()
        try:
            text = octets[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy().tobytes().decode()
            node = from_text(text, what=what)
            return cls(
                _number(node.get("number"), what),
                _mapping(node.get("values"), what),
                memory,
                Slots(_slots(_mapping(node.get("tensors"), what), memory.numel(), what)),
            )
        except (CheckpointError, UnicodeDecodeError) as error:
            raise FrameError(f"{what} cannot be read: {error}") from None


def _slots(node: Mapping[str, Any], size: int, what: str) -> Iterator[tuple[str, Slot]]:
    for name, described in node.items():
        match described:
            case [str(dtype), list(shape), list(strides), int(offset)] if (
                len(strides) == len(shape)
                and all(type(s) is int and 0 <= s < 1 << 48 for s in strides)
                and 0 <= offset <= size
                and offset % _ALIGNMENT == 0
            ):
                meta = meta_from_json([dtype, shape], what=name)
                slot = Slot(meta.dtype, meta.shape, tuple(strides), offset)
                if slot.size_bytes == meta.size_bytes and offset + slot.size_bytes <= size:
                    yield name, slot
                    continue
        raise CheckpointError(f"a tensor in {what} is described as {str(described)[:100]}")


def _number(node: Any, what: str) -> int:
    if type(node) is not int or node < 0:
        raise CheckpointError(f"{what} has no number")
    return node


def _mapping(node: Any, what: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise CheckpointError(f"{what} lacks an entry")
    return node
