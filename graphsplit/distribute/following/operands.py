"""Operands of an operation of the script: taken apart, converted, and which are written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from graphsplit.torch_ext.private import pytree

_PLAIN = frozenset({type(None), bool, int, float})  # what no operation makes anything else of
_OPERATORS = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv"),
    *("mod", "pow", "and", "or", "xor"),
)
_FACTORS = ("alpha", "beta")
_IN_PLACE_OPERATORS = frozenset(f"__i{name}__" for name in _OPERATORS) | {"__setitem__"}
# Functions that write to operands if a flag is set: the flag, its place, those operands' places.
_STATISTICS = {"running_mean": 1, "running_var": 2}
_HIDDEN: dict[str, tuple[str, int, Mapping[str, int]]] = {
    "batch_norm": ("training", 5, _STATISTICS),
    "instance_norm": ("use_input_stats", 5, _STATISTICS),
    "embedding": ("max_norm", 3, {"weight": 1}),
    "embedding_bag": ("max_norm", 3, {"weight": 1}),
}
_SET_AT_FIRST = frozenset({"use_input_stats"})
# Torch's own functions of these names have other places, and no argument is left out.
_OF_TORCH = {"batch_norm": 9, "instance_norm": 9}
_STATISTICS_OF_TORCH = {"running_mean": 3, "running_var": 4}


def told_factors(kwargs: dict[str, Any]) -> dict[str, Any]:
    """With numbers where torch takes nothing else, and asks a tensor for its own."""
    asked = {k: kwargs[k].item() for k in _FACTORS if isinstance(kwargs.get(k), torch.Tensor)}
    return kwargs | asked if asked else kwargs


def taken_apart(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], Callable[[Sequence[Any]], Any], bool]:
    """The leaves of a call's arguments, what puts arguments together from others.

    And whether the arguments themselves are the leaves.
    """
    flat = [*args, *kwargs.values()]
    kinds = {*map(type, flat)} - _PLAIN
    if any(issubclass(kind, tuple) or kind in pytree.SUPPORTED_NODES for kind in kinds):
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return leaves, partial(pytree.tree_unflatten, treespec=spec), False
    size = len(args)
    if not kwargs:
        return flat, _by_position, True

    def together(found: Sequence[Any]) -> Any:
        return tuple(found[:size]), dict(zip(kwargs, found[size:], strict=True))

    return flat, together, True


def _by_position(found: Sequence[Any]) -> Any:
    return tuple(found), {}


def from_last(convert: Callable[[Any], Any], operands: Sequence[Any]) -> list[Any]:
    """Convert operands, the last one first: backward then comes to the first one's step first."""
    found = [one if type(one) in _PLAIN else convert(one) for one in reversed(operands)]
    found.reverse()
    return found


def written(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The operands that an operation writes to."""
    target = kwargs.get("out") if kwargs else None
    is_method = name.endswith("_") and not name.endswith("__")
    if target is None and (is_method or name in _IN_PLACE_OPERATORS or kwargs.get("inplace")):
        target = args[0] if args else next(iter(kwargs.values()))
    hidden = _HIDDEN.get(name)
    if hidden is not None:
        flag, place, operands = hidden
        if len(args) + len(kwargs) == _OF_TORCH.get(name):
            operands = _STATISTICS_OF_TORCH
        return _written_inside(flag, place, operands, args, kwargs)
    return [] if target is None else pytree.tree_leaves(target)


def _written_inside(
    flag: str, place: int, operands: Mapping[str, int], args: tuple[Any, ...], kwargs: Any
) -> list[Any]:
    """The buffers that a function writes to though its name does not say so."""
    if not (args[place] if len(args) > place else kwargs.get(flag, flag in _SET_AT_FIRST)):
        return []
    found = (args[p] if len(args) > p else kwargs.get(n) for n, p in operands.items())
    return [one for one in found if isinstance(one, torch.Tensor) and not _is_trained(one)]


def _is_trained(leaf: Any) -> bool:
    return hasattr(type(leaf), "as_loop_value") and leaf.requires_grad


def refuse_written_leaf(targets: Sequence[Any]) -> None:
    """Refuse a write to a parameter that autograd would not know of, as eager does."""
    if torch.is_grad_enabled() and any(map(_is_trained, targets)):
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
