"""Calls of a script's old loop on a loss and an optimizer, which its Model does now.

A second step would count twice, and the state of one worker is a part of it all. And what decides
what a step does, apart from settings: its code, what the user says of it, and the hooks around it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from itertools import chain
from operator import methodcaller
from typing import Any

import torch

from graphsplit.errors import OwnershipError
from graphsplit.optimizers.ownership import IN_STATE, Elsewhere, is_elsewhere
from graphsplit.torch_ext.attributes import (
    AFTER_STEP,
    BEFORE_STATE,
    BEFORE_STEP,
    GLOBAL_STEP_HOOKS,
    writes_of,
)

_here = threading.local()
# The gradients that a Model made last, in one process: an own loop makes others.
_USED = "_graphsplit_used"
_DONE = (
    "train_step and train have done backward and the optimizer's step already, forward_backward "
    "has done backward, and each worker has its own parameters only\n  Fix: leave "
    "optimizer.step(), loss.backward() and optimizer.zero_grad() out; after forward_backward call "
    "model.step(). If the script calls none of them, put model.train_step(*batch) in the place of "
    "these lines, or keep them and give the loop gs.distribute(net)."
)
# Hooks around every optimizer's step that are graphsplit's own.
OWN_HOOKS: list[Any] = []
_SAID = "_graphsplit_per_parameter"
_VALUES = methodcaller("values")


def guard_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse steps of an optimizer that its Model does not make."""
    hooks = getattr(optimizer, BEFORE_STEP, None)
    if hooks is not None and refuse_own_step not in hooks.values():
        optimizer.register_step_pre_hook(refuse_own_step)


def let_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse none any more: its steps are the script's own."""
    hooks = getattr(optimizer, BEFORE_STEP, {})
    for key in [key for key, hook in hooks.items() if hook is refuse_own_step]:
        del hooks[key]


class by_the_model:
    """Let graphsplit itself call an optimizer."""

    def __enter__(self) -> None:
        self._before = getattr(_here, "is_models", False)
        _here.is_models = True

    def __exit__(self, *_: object) -> None:
        _here.is_models = self._before


class OwnEntries(defaultdict[Any, Any]):
    """The state of an optimizer on one worker: a script that needs another's entry is told so."""

    def __missing__(self, key: Any) -> Any:
        if not isinstance(key, Elsewhere):
            return super().__missing__(key)
        self[key] = made = _ElsewhereEntry()
        made.parameter = key
        return made

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


class _ElsewhereEntry(dict[Any, Any]):
    """The entry of a parameter that lives elsewhere: what is put there is let go, as all is."""

    parameter: Any

    def __missing__(self, key: Any) -> Any:
        if isinstance(self.parameter, Elsewhere):
            self.parameter.need_value(f"{IN_STATE}[...][{key!r}]")
        raise KeyError(key)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def guard_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to give one worker's part of an optimizer's state for all of it."""
    if type(optimizer.state) is defaultdict:
        optimizer.state = OwnEntries(dict, optimizer.state)
    hooks = getattr(optimizer, BEFORE_STATE, None)
    if hooks is not None and refuse_partial_state not in hooks.values():
        optimizer.register_state_dict_pre_hook(refuse_partial_state)
        optimizer.register_load_state_dict_post_hook(guard_state)


def refuse_partial_state(optimizer: torch.optim.Optimizer) -> None:
    """The hook.

    Raises:
        OwnershipError: Other workers have some of the parameters, and their state.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not getattr(_here, "is_models", False) and any(map(is_elsewhere, parameters)):
        raise OwnershipError(
            f"{type(optimizer).__name__}.state_dict() on this worker would have the state of its "
            f"own parameters only\n  Fix: call model.optimizer_state_dict() on every worker, and "
            f"save what it returns on one."
        )


STATE_HOOKS = (refuse_partial_state, guard_state)  # graphsplit's own


def note_used(optimizer: torch.optim.Optimizer) -> None:
    """Note gradients that are the Model's in one process, where other loops may step as well."""
    guard_step(optimizer)
    setattr(optimizer, _USED, _first_gradient(optimizer))


def refuse_own_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """The hook.

    Raises:
        OwnershipError: The script has called ``step`` after ``train_step`` or ``forward_backward``.
    """
    if getattr(_here, "is_models", False):
        return
    if hasattr(optimizer, _USED):
        used, now = getattr(optimizer, _USED), _first_gradient(optimizer)
        if used is None or now is None or used[0] is not now[0] or used[1] != now[1]:
            return
    raise OwnershipError(f"{type(optimizer).__name__}.step() was called by the script; {_DONE}")


def guard_backward(loss: torch.Tensor) -> torch.Tensor:
    """Refuse ``loss.backward()`` where a step has returned the loss; says what to do.

    It stays an ordinary tensor: it is saved, copied to disk and computed with as ever.
    """
    loss.backward = _refuse_backward  # type: ignore[method-assign]
    # Pickling takes a tensor's attributes along; torch.load refuses functions among them.
    loss.__getstate__ = _no_state  # type: ignore[attr-defined]
    return loss


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise OwnershipError(f"backward() was called on a loss that a Model returned; {_DONE}")


def _no_state() -> None:
    return None


def _first_gradient(optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, int] | None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return parameter.grad, writes_of(parameter.grad)
    return None


def say_per_parameter(optimizer: torch.optim.Optimizer) -> None:
    """The user says that it treats every parameter by itself."""
    setattr(optimizer, _SAID, True)


def is_said(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user has said that it treats every parameter by itself."""
    return getattr(optimizer, _SAID, False) is True


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The hooks that run around its step, those of all optimizers included."""
    before, after = getattr(optimizer, BEFORE_STEP, {}), getattr(optimizer, AFTER_STEP, {})
    found = chain.from_iterable(map(_VALUES, (*GLOBAL_STEP_HOOKS, before, after)))
    return [hook for hook in found if hook is not refuse_own_step and hook not in OWN_HOOKS]


def code_of_step(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """All that decides what its step does, apart from settings: compared by identity."""
    kind, own = type(optimizer), vars(optimizer)
    code = kind, kind.step, own.get("step"), own.get(_SAID)
    before = own.get(BEFORE_STEP, {})
    is_usual = len(before) == 1 and refuse_own_step in before.values()
    if is_usual and not (own.get(AFTER_STEP) or any(GLOBAL_STEP_HOOKS)):  # as at most steps
        return code
    return (*code, *step_hooks(optimizer))
