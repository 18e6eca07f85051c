"""Operations on many values at once, such as the gradients of all parameters: each where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphsplit.distribute.values import SPECIAL, LoopValue, operate
from graphsplit.distribute.workers.loop import Loop, shape_of
from graphsplit.errors import ConfigurationError
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

_PREFIX = "_foreach_"


def _foreach(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One after the other: such functions treat every element by itself."""
    size = len(args[0])

    def of(argument: Any, index: int) -> Any:
        is_list = isinstance(argument, (list, tuple)) and len(argument) == size
        return [argument[index]] if is_list else argument

    found = [
        operate(func, [of(a, i) for a in args], {k: of(v, i) for k, v in kwargs.items()})
        for i in range(size)
    ]
    return None if any(one is None for one in found) else [one[0] for one in found]


def _unscale(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients; whether one is infinite or NaN is found out over all workers."""
    gradients, found_inf, inverse = args
    if not all(isinstance(g, LoopValue) for g in gradients):
        raise ConfigurationError(
            "a GradScaler was given an optimizer with parameters of a distributed network and "
            "others\n  Fix: make an optimizer for each."
        )
    loop: Loop = gradients[0].loop
    for home in sorted({g.home for g in gradients}):
        flag = torch.zeros_like(found_inf)
        if loop.rank == home:
            with DisableTorchFunctionSubclass():
                func([g.held for g in gradients if g.home == home], flag, inverse)
        flag = loop.share(flag if loop.rank == home else shape_of(flag), home)
        found_inf.copy_(torch.maximum(found_inf, flag))
    loop.num_changes += 1


SPECIAL["_amp_foreach_non_finite_check_and_unscale_"] = _unscale
SPECIAL.update({name: _foreach for name in dir(torch) if name.startswith(_PREFIX)})
