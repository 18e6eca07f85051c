"""Hooks on parameters whose Python state is shared with hooks of another worker's parameters.

Each worker runs the hooks of its own parameters, in a process of its own. A list that all of them
fill would be several lists, and a counter that scales gradients would count a part of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphsplit.capture.reach.holders import Holder
from graphsplit.capture.reach.state import Reached
from graphsplit.errors import OwnershipError
from graphsplit.frames import short_path
from graphsplit.torch_ext.attributes import TENSOR_HOOKS

HookState = tuple[Holder, str]  # and the hook's line


def state_of_hooks(
    tensors: Mapping[str, torch.Tensor], owners: Mapping[str, int], rank: int
) -> tuple[HookState, ...]:
    """Python state that hooks of this worker's parameters can reach, and others' hooks as well.

    Args:
        tensors: Parameters and buffers by name, all of them.
        owners: Who owns each.
        rank: This worker.
    """
    mine: dict[Any, HookState] = {}
    theirs: set[Any] = set()
    network = {id(tensor) for tensor in tensors.values()}
    for name, tensor in tensors.items():
        hooks = [
            hook for table in TENSOR_HOOKS for hook in (getattr(tensor, table, None) or {}).values()
        ]
        if not hooks:
            continue
        found = {
            holder.key: (holder, _line_of(hook))
            for hook in hooks
            for holder in Reached().look([hook])
        }
        if owners.get(name) == rank:
            mine |= found
        else:
            theirs |= found.keys()
    return tuple(
        (holder, line)
        for key, (holder, line) in mine.items()
        if key in theirs and key not in network and holder.decides
    )


def with_hooks(tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """The names of the parameters that have hooks."""
    return frozenset(
        name
        for name, tensor in tensors.items()
        if any(getattr(tensor, table, None) for table in TENSOR_HOOKS)
    )


def _line_of(hook: Any) -> str:
    code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    return f" ({short_path(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""


@contextmanager
def hooks_leave(held: Sequence[HookState]) -> Iterator[None]:
    """Run what runs hooks of parameters, which must leave shared state as it is.

    Raises:
        OwnershipError: They have changed some of it.
    """
    for holder, _ in held:
        holder.note()
    yield
    for holder, line in held:
        if holder.has_changed():
            raise OwnershipError(
                f"a hook on a parameter{line} changes {holder.name}, which hooks on parameters of "
                f"other workers use too; each worker has its own, unlike in one process\n"
                f"  Fix: give each parameter's hook a state of its own, or look at gradients in "
                f"a callback's on_gradients."
            )
