"""Hooks on parameters: each runs on its parameter's worker, and must leave Python's state alone.

In one process a counter that hooks keep counts all of them. Here each worker would count its own.
Hooks may change gradients and step optimizers; what the script keeps of a gradient it takes from
``p.grad`` after backward, which is the same on every worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from graphsplit.capture.reach.holders import Holder, unchanged
from graphsplit.distribute.workers.loop import Loop
from graphsplit.errors import OwnershipError
from graphsplit.optimizers.parameter_hooks import HookState, draws, hooks_of, line_of, state_of
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

_known: dict[tuple[int, ...], tuple[list[object], tuple[HookState, ...]]] = {}
_MOST = 64


@contextmanager
def leaving_state(loop: Loop) -> Iterator[None]:
    """Run a backward, which may come to hooks of parameters.

    Raises:
        OwnershipError: One that ran here has changed Python's state.
    """
    with DisableTorchFunctionSubclass():
        parameters = chain.from_iterable(list(loop.here.values()))  # a network may go meanwhile
        hooks = [hook for parameter in parameters for hook in hooks_of(parameter)]
    if not hooks:
        yield
        return
    with unchanged(_state_of(hooks), _error):
        yield


def _state_of(hooks: list[object]) -> tuple[HookState, ...]:
    key = tuple(map(id, hooks))
    if key not in _known:
        if len(_known) >= _MOST:
            _known.clear()
        held = {
            holder.key: (holder, line_of(hook))
            for hook in hooks
            for holder in state_of(hook)
            if holder.decides and not holder.is_tensor
        }
        _known[key] = hooks, tuple(held.values())  # held, so that nothing else gets their numbers
    return _known[key][1]


def _error(holder: Holder, line: str) -> OwnershipError:
    if holder.is_generator:
        return draws(line)
    return OwnershipError(
        f"a hook on a parameter{line} changes {holder.name} on the worker of the parameter alone; "
        f"in one process the hooks of all parameters would\n"
        f"  Fix: look at p.grad after backward(), which is the same on every worker. A hook may "
        f"change its gradient, step an optimizer, or write to tensors."
    )
