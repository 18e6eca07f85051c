"""The norm of one worker's gradients is not taken for that of all.

``torch.nn.utils.clip_grad_norm_`` over the parameters that live here would clip by a part of the
norm. A gradient does not know where it is looked at from, so PyTorch's own function asks here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils import clip_grad

from graphsplit.errors import OwnershipError
from graphsplit.optimizers.ownership import Residence, is_elsewhere
from graphsplit.torch_ext.attributes import GROUPING, NORM
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

# Of a class of tensors: operations on them run wherever the values are, and answer for all workers.
IS_GLOBAL = "graphsplit_is_global"


class Share:
    """One worker's part of a network's parameters.

    Args:
        residence: Where they live.
    """

    def __init__(self, residence: Residence) -> None:
        self._parameters = {
            name: tensor
            for name, tensor in residence.tensors.items()
            if isinstance(tensor, torch.nn.Parameter)
        }
        if any(map(is_elsewhere, self._parameters.values())):
            _install()
            _shares.add(self)

    def check(self, gradients: list[torch.Tensor]) -> None:
        """Refuse gradients that are all those here, or several that are no whole module's.

        Raises:
            OwnershipError: They are.
        """
        ids = {id(gradient) for gradient in gradients}
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        here = {name: p for name, p in trained.items() if not is_elsewhere(p)}
        with_gradient = {name: p for name, p in here.items() if p.grad is not None}
        given = {name for name, p in with_gradient.items() if id(p.grad) in ids}
        if not given or len(here) == len(trained):
            return
        is_all = given == set(with_gradient)
        is_one = len({id(trained[name]) for name in given}) == 1  # a tied one has several names
        if is_all or not (is_one or _is_module(given, trained)):
            raise OwnershipError(
                f"a norm over {len(given)} gradient(s) that live on this worker, the first of "
                f"{min(given)!r}; expected all of them: other workers have the rest\n"
                f"  Fix: to clip by the norm of all gradients, use Model(..., "
                f"clip=gs.clip.GlobalNorm(max_norm)), and read it from model.last_gradient_norm."
            )


def _is_module(given: set[str], trained: Iterable[str]) -> bool:
    """Whether they are just the trained parameters of one module."""
    first, *others = [name.split(".")[:-1] for name in given]
    depth = len(first)
    for other in others:
        same = (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b)
        depth = min(depth, len(other), next(same, depth))
    prefix = ".".join(first[:depth]) + "."
    return depth > 0 and given == {name for name in trained if name.startswith(prefix)}


_shares: weakref.WeakSet[Share] = weakref.WeakSet()
_num_allowed = 0


@contextmanager
def allowed() -> Iterator[None]:
    """No check inside: what runs there is known to be right."""
    global _num_allowed
    _num_allowed += 1
    try:
        yield
    finally:
        _num_allowed -= 1


def forget() -> None:
    """Everything is here, as a forked child pretends."""
    _shares.clear()


def _install() -> None:
    original = getattr(clip_grad, GROUPING)
    if hasattr(original, "checks_shares"):
        return

    def grouped(tensors: Any, *args: Any, **kwargs: Any) -> Mapping[Any, Any]:
        is_whole = any(hasattr(type(one), IS_GLOBAL) for one in tensors[0])
        if not (_num_allowed or is_whole) and sys._getframe(1).f_code.co_name == NORM:
            with DisableTorchFunctionSubclass():  # a look of this worker alone
                for share in list(_shares):
                    share.check(tensors[0])
        found: Mapping[Any, Any] = original(tensors, *args, **kwargs)
        return found

    grouped.checks_shares = True  # type: ignore[attr-defined]
    setattr(clip_grad, GROUPING, grouped)
