"""Optimizers of a script's own loop: each worker steps what lives on it.

The script calls ``optimizer.step()``, or a scaler or a scheduler around it does. Hooks around the
steps of all optimizers narrow those that have parameters of a distributed network.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from graphsplit.distribute.entries import Entries
from graphsplit.distribute.functions import is_value, watch_functions
from graphsplit.distribute.parameters import in_loop
from graphsplit.distribute.states import (
    OptimizerState,
    forget_others,
    give_whole_state,
    hide_others,
    settings_of,
    show_here,
    state_of,
)
from graphsplit.distribute.workers.asking import exchange
from graphsplit.distribute.workers.loop import Loop
from graphsplit.errors import ConfigurationError
from graphsplit.optimizers.child_process import is_child
from graphsplit.optimizers.optimizer import OwnedOptimizer
from graphsplit.optimizers.own_step import OWN_HOOKS, is_said, let_step
from graphsplit.optimizers.ownership import Residence, is_elsewhere
from graphsplit.optimizers.per_parameter import is_listed
from graphsplit.optimizers.update import rules_problems
from graphsplit.settings import FAIL_FAST
from graphsplit.torch_ext.attributes import BEFORE_STATE
from graphsplit.torch_ext.data_attribute import watch_data
from graphsplit.torch_ext.eager_mode import fuse_layers_of
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

# With its parameters, and the contexts of the step, the inner one first.
_Contexts = tuple[AbstractContextManager[Any], ...]
_under_way: list[tuple[torch.optim.Optimizer, Loop, list[torch.Tensor], _Contexts]] = []
_networks: weakref.WeakKeyDictionary[nn.Module, Loop] = weakref.WeakKeyDictionary()
_with_values: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()


def install(network: nn.Module, loop: Loop) -> None:
    """Stand around the steps of all optimizers from now on, and where ``.data`` is set.

    Args:
        network: One that is distributed.
        loop: The workers.
    """
    _networks[network] = loop
    watch_data()
    watch_functions()
    fuse_layers_of(is_value)
    if before_step not in OWN_HOOKS:
        OWN_HOOKS.extend((before_step, after_step))
        register_optimizer_step_pre_hook(before_step)
        register_optimizer_step_post_hook(after_step)


def before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The hook before a step: leave out what others own.

    A closure runs here, with gradients, as PyTorch's own steps run it first of all.

    Returns:
        The arguments that the step gets instead, if any.

    Raises:
        ConfigurationError: It cannot be stepped worker by worker.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_stepping = any(one is optimizer for one, *_ in _under_way) or is_child()
    loop = _loop_of(parameters)
    closure = next((a for a in args[1:] if a is not None), kwargs.get("closure"))
    if loop is None and closure is not None and not is_stepping:  # it may make the first call
        loop = next((found for net, found in _networks.items() if _has_any(net, parameters)), None)
    if is_stepping or loop is None:
        return None
    if _computes_with_values(optimizer, loop, has_closure=closure is not None):
        _note_values(optimizer, loop)
        return None
    _check_rules(optimizer, has_closure=closure is not None)
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    if closure is not None:
        with torch.enable_grad():
            found = closure()
        given = (args[0], lambda: found), {}
    if not loop.is_in_backward:  # else a hook of one worker's parameter steps
        loop.taken.note_step(optimizer, settings_of(optimizer))
    loop.job.script.check_own_step(optimizer)
    state = settled(optimizer, loop)
    stepping = state.owned.stepping()
    stepping.__enter__()
    plain = DisableTorchFunctionSubclass()
    plain.__enter__()
    _under_way.append((optimizer, loop, parameters, (plain, stepping)))
    return given


def _computes_with_values(
    optimizer: torch.optim.Optimizer, loop: Loop, *, has_closure: bool
) -> bool:
    """Whether its step computes with values, as the script does: it looks at all parameters.

    Of a class that is not listed, workers try that out and agree, before its first step. One with a
    closure runs the network inside, and nobody knows when.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    if optimizer in _with_values:
        return _with_values[optimizer]
    is_known = is_listed(optimizer) or is_said(optimizer) or state_of(optimizer) is not None
    if is_known or loop.is_in_backward or rules_problems(optimizer, None, None):
        return False
    is_part = False
    if not has_closure and hasattr(optimizer, BEFORE_STATE):  # else around another one, as timm's
        owned = OwnedOptimizer(optimizer)
        owned.settle(_whole(loop))
        told = exchange(loop, f"{type(optimizer).__name__}.step()", str(owned.is_part))
        is_part = all(one == str(True) for one in told)
    if not is_part:
        let_step(optimizer)
    _with_values[optimizer] = not is_part
    return not is_part


def _note_values(optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """Take note of a step that computes with values.

    Raises:
        ConfigurationError: The job recovers, and what it keeps would not be brought back.
    """
    if loop.job.recovery_policy != FAIL_FAST:
        raise ConfigurationError(
            f"optimizer.step(): {type(optimizer).__name__} looks at all parameters at once, and "
            f"keeps values of several workers, which are not brought back in a job that recovers\n"
            f"  Fix: leave GS_RECOVERY unset, or use an optimizer that treats each parameter by "
            f"itself."
        )
    loop.taken.note_step(optimizer, settings_of(optimizer))


def _check_rules(optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
    """Refuse what cannot be stepped worker by worker.

    Raises:
        ConfigurationError: It cannot.
    """
    problems = rules_problems(optimizer, None, None)
    if has_closure and not (problems or is_listed(optimizer)):
        problems.append(
            f"{type(optimizer).__name__}.step(closure) runs the network inside the step, and only "
            f"of PyTorch's own optimizers, without step hooks, is it known to do so once and "
            f"before all else; call backward before step()"
        )
    if problems:
        raise ConfigurationError(
            "optimizer.step(): "
            + "\n  ".join(problems)
            + "\n  Fix: use an optimizer that steps each parameter by itself, without a closure."
        )


def settled(optimizer: torch.optim.Optimizer, loop: Loop) -> OptimizerState:
    """The state of an optimizer over all workers, which knows where parameters live by now."""
    state, is_given = state_of(optimizer), not isinstance(optimizer.state, Entries)
    is_new = state is None or state.settled_at != loop.num_settled
    show_here(optimizer)
    if state is None or is_new:
        owned = OwnedOptimizer(optimizer)
        owned.settle(_whole(loop))
        state = state or give_whole_state(optimizer, partial(_owners, loop), loop.job)
        state.owned, state.settled_at = owned, loop.num_settled
    if is_given and not loop.is_in_backward:  # else a hook of one worker's parameter steps
        state.take_given(optimizer)
    elif is_new and any(
        map(is_elsewhere, optimizer.state)
    ):  # of another network, whose plan is new
        forget_others(optimizer)
    state.loaded = optimizer.state
    return state


def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """The hook after it."""
    if _under_way and _under_way[-1][0] is optimizer:
        _, loop, parameters, contexts = _under_way.pop()
        for context in contexts:
            context.__exit__(None, None, None)
        loop.num_changes += 1
        loop.steps.note(None if loop.is_in_backward else map(id, (optimizer, *parameters)))
        hide_others(optimizer, loop)


def _has_any(network: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    own = {id(parameter) for parameter in network.parameters()}
    return any(id(parameter) in own for parameter in parameters)


def _loop_of(parameters: Iterable[torch.Tensor]) -> Loop | None:
    found = (in_loop(parameter) for parameter in parameters)
    return next((known.loop for known in found if known is not None), None)


def _owners(loop: Loop) -> Mapping[int, int]:
    return _whole(loop).owner_by_id()


def _whole(loop: Loop) -> Residence:
    """Where the tensors of all distributed networks live."""
    parts = list(loop.residences.values())
    named = [("" if len(parts) == 1 else f"network {n}: ", part) for n, part in enumerate(parts, 1)]
    return Residence(
        {f"{name}{key}": tensor for name, part in named for key, tensor in part.tensors.items()},
        {f"{name}{key}": owner for name, part in named for key, owner in part.owners.items()},
        loop.rank,
        loop.job.num_workers,
    )
