"""Values as bytes: their tensors side by side in one piece of memory, and JSON.

As they travel, and as one who holds them for another keeps them without looking inside::

    length of the header (8 bytes, little-endian) | header (JSON, blanks) | the memory

The header lists dtype, shape, strides and offset of every tensor, and holds all values that are no
tensors, as ``values`` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from graphsplit.encoding.values import decode, encode, from_text, meta_from_json, to_text
from graphsplit.errors import CheckpointError, FrameError
from graphsplit.tensor_meta import ALIGNMENT, contiguous_strides, is_dense, span_elements
from graphsplit.torch_ext.private import foreach_copy_

_LENGTH_BYTES = 8
_VALUE = "value"
_P = TypeVar("_P", bound="Packed")


@dataclass(frozen=True)
class TensorSlot:
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


class Slots(dict[str, TensorSlot]):
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
            if plain:
                foreach_copy_(self._views, plain)

    def _lay_out(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.slots, size = Slots(), 0
        for name, tensor in tensors.items():
            shape, strides = tuple(tensor.shape), tensor.stride()
            strides = strides if is_dense(shape, strides) else contiguous_strides(shape)
            slot = TensorSlot(tensor.dtype, shape, strides, size)
            self.slots[name] = slot
            size = -(-(size + slot.size_bytes) // ALIGNMENT) * ALIGNMENT
        if size > self.memory.numel():
            self.memory = torch.empty(size, dtype=torch.uint8)
        self.memory = self.memory[:size]
        self._views = [slot.view(self.memory) for slot in self.slots.values()]


@dataclass(frozen=True, eq=False)
class Packed:
    """Values and the tensors in them.

    Attributes:
        values: All that is no tensor, encoded.
        memory: The memory of the tensors.
        slots: Where each tensor lies in it.
    """

    values: Mapping[str, Any]
    memory: torch.Tensor
    slots: Slots

    @classmethod
    def of(cls: type[_P], value: Any, *, what: str) -> _P:
        """One value, with copies of its tensors.

        Raises:
            StateError: Something in it cannot be written; names it.
        """
        tensors: dict[str, torch.Tensor] = {}
        values = {_VALUE: encode(value, tensors, path=what)}
        flat = FlatTensors()
        flat.copy(tensors)
        return cls(values, flat.memory, flat.slots)

    def value(self) -> Any:
        """The value that ``of`` was given; its tensors share their memory with nobody.

        Raises:
            CheckpointError: It is none.
        """
        return decode(self.values.get(_VALUE), lambda name: self.tensor(name).clone())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, in this memory.

        Raises:
            CheckpointError: There is none of this name.
        """
        slot = self.slots.get(name)
        if slot is None:
            raise CheckpointError(f"a saved value refers to {name!r}, which is not there")
        return slot.view(self.memory)

    def pieces(self, *, pad_bytes: int = 1) -> list[torch.Tensor]:
        """All as bytes: header, then memory.

        Args:
            pad_bytes: The header's size is a multiple of this: a counter that grows by a digit then
                seldom changes the size of the whole, and channels are fast with known sizes.
        """
        text = f'{{"values":{to_text(self.values)},"tensors":{self.slots.text}}}'.encode()
        text += b" " * (-(_LENGTH_BYTES + len(text)) % pad_bytes)
        header = bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        return [torch.frombuffer(header, dtype=torch.uint8), self.memory]

    @classmethod
    def read(cls: type[_P], pieces: Sequence[torch.Tensor], *, what: str) -> _P:
        """Read what ``pieces`` gave, cut anywhere, from another worker.

        Raises:
            FrameError: It is something else.
        """
        octets = torch.cat(list(pieces)) if pieces else torch.empty(0, dtype=torch.uint8)
        length = int.from_bytes(octets[:_LENGTH_BYTES].numpy().tobytes(), "little")
        if octets.numel() < _LENGTH_BYTES or length > octets.numel() - _LENGTH_BYTES:
            raise FrameError(f"{what} has {octets.numel()} bytes and a header of {length}")
        start = _LENGTH_BYTES + length
        # Memory of its own: views of wider dtypes must be aligned.
        memory = octets[start:].clone()
        try:
            text = octets[_LENGTH_BYTES:start].numpy().tobytes().decode()
            match from_text(text, what=what):
                case {"values": dict(values), "tensors": dict(tensors)}:
                    return cls(values, memory, Slots(_slots(tensors, memory.numel(), what)))
            raise CheckpointError("it lacks an entry")
        except (CheckpointError, UnicodeDecodeError) as error:
            raise FrameError(f"{what} cannot be read: {error}") from None


def _slots(node: Mapping[str, Any], size: int, what: str) -> Iterator[tuple[str, TensorSlot]]:
    for name, described in node.items():
        match described:
            case [str(dtype), list(shape), list(strides), int(offset)] if (
                len(strides) == len(shape)
                and all(type(s) is int and 0 <= s < 1 << 48 for s in strides)
                and 0 <= offset <= size
                and offset % ALIGNMENT == 0
            ):
                meta = meta_from_json([dtype, shape], what=name)
                slot = TensorSlot(meta.dtype, meta.shape, tuple(strides), offset)
                if slot.size_bytes == meta.size_bytes and offset + slot.size_bytes <= size:
                    yield name, slot
                    continue
        raise CheckpointError(f"a tensor in {what} is described as {str(described)[:100]}")
