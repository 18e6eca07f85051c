"""Outputs in the memory of an input, or of one another, as in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphsplit.capture.graph import MemoryPart
from graphsplit.tensor_meta import span_elements


def in_shared_memory(
    values: Sequence[Any], parts: Sequence[MemoryPart | None], inputs: Sequence[Any]
) -> list[Any]:
    """Outputs that look at one memory, put together from values that came apart.

    Those with a history stay apart: their gradients take the ways of the step.

    Args:
        values: The outputs.
        parts: Which part of a memory each of them looks at.
        inputs: The step's inputs, those that are not here as None.
    """
    found = list(values)
    memories: dict[int, dict[int, MemoryPart]] = {}
    for index, part in enumerate(parts):
        if part is not None and values[index].numel():
            memories.setdefault(part.memory, {})[index] = part
    for looking in memories.values():
        first = next(iter(looking.values()))
        base = None if first.input is None else inputs[first.input]
        if first.input is None and len(looking) > 1:
            base, looking = _together({i: values[i] for i in looking}, looking)
        if base is not None and not base.requires_grad:
            found = [
                _view(base, looking[index].begin, value) if index in looking else value
                for index, value in enumerate(found)
            ]
    return found


def _together(
    values: dict[int, torch.Tensor], parts: dict[int, MemoryPart]
) -> tuple[torch.Tensor | None, dict[int, MemoryPart]]:
    """A memory that holds some values, and where each of them is in it.

    It is the memory of one that reaches over all others, if there is such a one.
    """
    begins = {index: part.begin for index, part in parts.items()}
    ends = {i: begins[i] + _num_bytes(value) for i, value in values.items()}
    begin, end = min(begins.values()), max(ends.values())
    whole = next((i for i in values if begins[i] == begin and ends[i] == end), None)
    moved = {i: MemoryPart(p.memory, p.begin - begin, None) for i, p in parts.items()}
    some = next(iter(values.values()))
    if any(value.requires_grad for value in values.values()):
        return None, moved
    if whole is not None:
        return values[whole], moved
    memory = some.new_empty((end - begin) // some.element_size())
    for index, value in values.items():
        _view(memory, moved[index].begin, value).copy_(value)
    return memory, moved


def _num_bytes(value: torch.Tensor) -> int:
    return span_elements(value.shape, value.stride()) * value.element_size()


def _view(memory: torch.Tensor, begin: int, value: torch.Tensor) -> torch.Tensor:
    """What lies so many bytes behind the beginning of a tensor, in the form of a value."""
    flat = memory.as_strided((span_elements(memory.shape, memory.stride()),), (1,))
    if flat.dtype != value.dtype:
        flat = flat.view(value.dtype)
    first = begin // value.element_size()
    return flat[first : first + 1].as_strided(value.shape, value.stride())
