"""PyTorch's own functions that code calls by name: a script may put others there (F.relu = f)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import getclosurevars
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from graphsplit.errors import CaptureError
from graphsplit.frames import is_users, where_defined
from graphsplit.guards.code_facts import facts_of
from graphsplit.guards.places import Place, PlaceKind, entry


def names_used_by(kinds: Iterable[type]) -> set[str]:
    """The attribute names in the functions of modules' classes, PyTorch's own included."""
    functions = (
        value
        for kind in {base for one in kinds for base in one.__mro__}
        if issubclass(kind, nn.Module) and kind is not nn.Module
        for value in vars(kind).values()
    )
    codes = (value.__code__ for value in functions if isinstance(value, FunctionType))
    return {name for code in codes for name in facts_of(code).attributes}


def torch_places(names: Iterable[str]) -> Iterator[Place]:
    """The places of PyTorch's functions and methods with these names.

    Raises:
        CaptureError: A function that calls the one that it stands for was put there.
    """
    for name in sorted(names):
        for holder, label in ((torch, "torch"), (F, "torch.nn.functional")):
            if _is_function(vars(holder).get(name)):
                yield entry(vars(holder), name, f"{label}.{name}")
        if _is_function(getattr(torch.Tensor, name, None)):
            yield Place(PlaceKind.CLASS, torch.Tensor, name, f"torch.Tensor.{name}")
        _check_not_wrapped(vars(F).get(name), name, "torch.nn.functional")
        _check_not_wrapped(vars(torch.Tensor).get(name), name, "torch.Tensor")


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (type, ModuleType))


def _check_not_wrapped(value: Any, name: str, where: str) -> None:
    """While torch records, these look themselves up by name: a wrapper would run many times."""
    if not isinstance(value, FunctionType) or not is_users(value.__code__.co_filename):
        return
    used = (value.__globals__.get(name) for name in facts_of(value.__code__).globals_read)
    cells = getclosurevars(value).nonlocals.values()
    if any(getattr(one, "__name__", "") == name for one in (*used, *cells, *_given(value))):
        raise CaptureError(
            f"{where}.{name} was replaced by a function that calls the original, which cannot be "
            f"recorded\n"
            f"  {where_defined(value.__code__)}\n"
            f"  Fix: leave {where}.{name} as it is, and call the function of your own by its name."
        )


def _given(function: FunctionType) -> tuple[Any, ...]:
    """Values in a function's defaults and attributes."""
    by_name = function.__kwdefaults__ or {}
    return (*(function.__defaults__ or ()), *by_name.values(), *vars(function).values())
