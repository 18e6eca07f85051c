"""Methods of values that are no operations: questions, iteration, hooks."""

from __future__ import annotations

from typing import Any

import torch

from graphsplit.distribute.values import SPECIAL, Function, LoopValue, as_value
from graphsplit.torch_ext.private import pytree

_ASKING = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__float__",
        "__int__",
        "__complex__",
        "__index__",
        "__repr__",
        "__str__",
        "__format__",
        "__array__",
        "__contains__",
        "__deepcopy__",
        "__reduce_ex__",
        "equal",
        "allclose",
        "is_nonzero",
        "untyped_storage",
        "data_ptr",
    ]
)


def _asked(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tell all workers the values, and go on with ordinary tensors."""

    def plain(value: Any) -> Any:
        if not isinstance(value, LoopValue):
            return value
        found = value.everywhere(getattr(func, "__name__", "value")).detach()
        return found.requires_grad_() if value.held.requires_grad else found

    args, kwargs = pytree.tree_map(plain, pytree.tree_map(as_value, (args, kwargs)))
    return func(*args, **kwargs)


def _iterated(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return iter(torch.Tensor.unbind(args[0], 0))


def _cpu(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _length(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args[0].shape:
        raise TypeError("len() of a 0-d tensor")
    return args[0].shape[0]


def _hooked(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hooks are given what the script holds of a gradient."""
    value, hook = args

    def run(gradient: torch.Tensor) -> torch.Tensor | None:
        given = LoopValue.of(gradient, value.home, value.loop, ("gradient of", value.number))
        found = hook(given)
        return found.at(value.home) if isinstance(found, LoopValue) else found

    return value.held.register_hook(run)


SPECIAL.update({name: _asked for name in _ASKING})
SPECIAL.update(__iter__=_iterated, cpu=_cpu, __len__=_length, register_hook=_hooked)
