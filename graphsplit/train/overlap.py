"""Trained parameters whose memory other parameters or buffers share: they must live together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch

from graphsplit.errors import PlacementError
from graphsplit.runtime.ownership import is_elsewhere


def overlapping(state: Mapping[str, torch.Tensor]) -> tuple[tuple[str, str], ...]:
    """Pairs of different tensors that share at least one number, one of them trained, by name.

    Args:
        state: Parameters and buffers by name; those whose values are not here are left out.
    """
    by_memory: dict[int, dict[int, str]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if is_elsewhere(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            continue
        if tensor.numel() > 0:
            tensors[name] = tensor
            memory = tensor.untyped_storage().data_ptr()
            by_memory.setdefault(memory, {}).setdefault(id(tensor), name)
    return tuple(
        (first, second)
        for names in by_memory.values()
        for first, second in itertools.combinations(names.values(), 2)
        if tensors[first].requires_grad or tensors[second].requires_grad
        if _overlap(tensors[first], tensors[second])
    )


def check_overlapping(pairs: Iterable[tuple[str, str]], owners: Mapping[str, int]) -> None:
    """Refuse tensors over one memory that live on different workers.

    Raises:
        PlacementError: A change of one would not be seen in the other, as it is in one process.
    """
    for first, second in pairs:
        if first in owners and second in owners and owners[first] != owners[second]:
            raise PlacementError(
                f"{first} and {second} are different tensors over the same memory, and live on "
                f"workers {owners[first]} and {owners[second]}: a change of one would not reach "
                f"the other\n"
                f"  Fix: place both on one worker, or make them one tensor, as in "
                f"second.weight = first.weight, and take views of it in forward."
            )


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one memory have bytes in common."""
    (begin, end), (other_begin, other_end) = _span(first), _span(second)
    if end <= other_begin or other_end <= begin:
        return False
    if first.dtype != second.dtype:
        return True
    size = first.element_size()
    taken = torch.zeros(max(end, other_end) // size, dtype=torch.bool)
    _marks(taken, first).fill_(True)
    return bool(_marks(taken, second).any())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in its memory, in bytes."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    return begin * size, (begin + int(last) + 1) * size


def _marks(taken: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
