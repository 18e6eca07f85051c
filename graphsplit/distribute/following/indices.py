"""Indices on workers that do not have what is indexed: a tensor without memory is indexed there."""

from __future__ import annotations

from typing import Any

import torch

_MASKS = (torch.bool, torch.uint8)
_LONGEST = 32  # from here on torch takes a list for one tensor, whatever it holds


def as_positions(indices: Any, *, by_brackets: bool) -> Any:
    """Indices without masks and numbers, which all workers have: the positions of what they take.

    Args:
        indices: One, or a tuple or list of them.
        by_brackets: Whether they stand in brackets, where a number gives a view.
    """
    if isinstance(indices, list) and not _is_several(indices):
        (found,) = _of_one(indices, by_brackets=by_brackets)
        return found
    several = indices if isinstance(indices, (tuple, list)) else (indices,)
    parts = tuple(one for index in several for one in _of_one(index, by_brackets=by_brackets))
    return parts if len(parts) > 1 or several is indices else parts[0]


def _of_one(index: Any, *, by_brackets: bool) -> tuple[Any, ...]:
    """One index; of a mask, one for each of its dimensions."""
    if isinstance(index, list) and index and all(isinstance(one, bool) for one in index):
        index = torch.tensor(index)
    if type(index) is not torch.Tensor:
        return (index,)
    if index.dtype in _MASKS:
        return index.nonzero(as_tuple=True) if index.dim() else (bool(index),)
    if by_brackets and not index.dim():
        return (int(index),)
    return (index,)


def _is_several(indices: list[Any]) -> bool:
    """Whether torch takes a list for indices of several dimensions; else it is one of numbers."""
    return len(indices) < _LONGEST and any(
        one is None or one is ... or isinstance(one, slice) or hasattr(one, "__getitem__")
        for one in indices
    )
