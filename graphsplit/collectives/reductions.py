"""Reductions of tensors and numbers, from the first to the last: their bits depend on the order."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphsplit.errors import ConfigurationError

_OF_TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
_OF_TWO_WHOLE: dict[str, Callable[[Any, Any], Any]] = {"sum": operator.add, "prod": operator.mul}
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def tensor_of(value: Any) -> torch.Tensor:
    """A tensor without its history, or a number as one, as precise as Python's.

    Raises:
        ConfigurationError: A whole number takes more than 64 bits.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        return torch.tensor(value, dtype=_DTYPES[type(value)])
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ConfigurationError(f"{value} takes more than 64 bits: {error}") from None


def is_number(value: Any) -> bool:
    """Whether it is one of Python's numbers."""
    return type(value) in _DTYPES


def described(value: Any) -> str:
    """A value in words: ``float32 of [3, 4]``, ``a float``."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of {list(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def check_reduction(name: str, op: str, value: Any) -> None:
    """Refuse an operation that there is not for a value.

    Raises:
        ConfigurationError: There is none.
    """
    if not isinstance(op, str) or op not in _OF_TWO:
        raise ConfigurationError(f"{name}: op={op!r}; expected one of {', '.join(_OF_TWO)}")
    dtype = tensor_of(value).dtype
    if dtype is torch.bool and op not in ("min", "max"):
        raise ConfigurationError(
            f"{name}: booleans have no {op}\n  Fix: op='max' is any, op='min' is all; or pass "
            f"numbers, as of .int()."
        )
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(
            f"{name}: whole numbers have no mean of their dtype\n  Fix: pass .float(), or "
            f"divide the sum."
        )
    try:  # on two elements: torch says what a dtype cannot
        reduced(op, [torch.zeros(1, dtype=dtype)] * 2)
    except RuntimeError as error:
        raise ConfigurationError(f"{name}: {dtype} has no {op}: {error}") from None


def reduced(op: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of an operation over the values of several workers, taken in their order."""
    if len(values) == 1:
        return values[0].clone()
    total = functools.reduce(_OF_TWO[op], (one.to(values[0].device) for one in values))
    return total / len(values) if op == "mean" else total


def check_whole(op: str, values: Sequence[torch.Tensor]) -> None:
    """Refuse a result over Python's whole numbers, which have no end, of more than 64 bits.

    Raises:
        ConfigurationError: It is one.
    """
    if values[0].dtype is torch.int64 and op in _OF_TWO_WHOLE:
        tensor_of(functools.reduce(_OF_TWO_WHOLE[op], (one.item() for one in values)))
