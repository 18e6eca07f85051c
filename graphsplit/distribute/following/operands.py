"""Operands of an operation of the script: taken apart, converted, and which are written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from graphsplit.torch_ext.private import pytree

_PLAIN = frozenset({type(None), bool, int, float})  # what no operation makes anything else of
_OPERATORS = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv"),
    *("mod", "pow", "and", "or", "xor"),
)
_IN_PLACE_OPERATORS = frozenset(f"__i{name}__" for name in _OPERATORS) | {"__setitem__"}


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
    if target is None and (is_method or name in _IN_PLACE_OPERATORS):
        target = args[0] if args else next(iter(kwargs.values()))
    return [] if target is None else pytree.tree_leaves(target)
