"""Hooks on parameters whose Python state is shared with hooks of another worker's parameters.

Each worker runs the hooks of its own parameters, in a process of its own. A list that all of them
fill would be several lists, and a counter that scales gradients would count a part of them. A hook
that draws random numbers would draw them from a generator that only its worker has drawn from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from graphsplit.capture.reach.holders import ALL_OF_THE_PROCESS, Holder, at_place, unchanged
from graphsplit.capture.reach.state import Reached
from graphsplit.errors import OwnershipError
from graphsplit.frames import where_defined
from graphsplit.guards.changes import containers_in
from graphsplit.guards.places import Place
from graphsplit.guards.values import freeze, holder_of
from graphsplit.tensor_meta import has_same_bits
from graphsplit.torch_ext.attributes import TENSOR_HOOKS
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

HookState = tuple[Holder, str]  # and the hook's line


def state_of_hooks(
    tensors: Mapping[str, torch.Tensor],
    owners: Mapping[str, int],
    rank: int,
    called: Collection[Any] = (),
    read: Iterable[Place] = (),
) -> tuple[HookState, ...]:
    """Python state that hooks of this worker's parameters can reach, and others' code as well.

    With it are the generators of the process that they can reach, though no other hook does.

    Args:
        tensors: Parameters and buffers by name, all of them.
        owners: Who owns each.
        rank: This worker.
        called: The keys of what calls kept whole can reach elsewhere, or in other microbatches.
        read: Places that forward and loss read, and have read of later microbatches.
    """
    mine: dict[Any, HookState] = {}
    theirs: set[Any] = set(called)
    network = {id(tensor) for tensor in tensors.values()}
    for name, tensor in tensors.items():
        hooks = hooks_of(tensor)
        if not hooks:
            continue
        found = {holder.key: (holder, line_of(hook)) for hook in hooks for holder in state_of(hook)}
        if owners.get(name) == rank:
            mine |= found
        else:
            theirs |= found.keys()
    for place in read if mine else ():
        value = place.read()
        theirs |= {id(holder_of(one)) for one in (value, *containers_in(freeze(value)))}
        for key in (id(place.holder), ("global", id(place.holder), place.key)):
            if key in mine:
                own = Holder(("read", *place.identity), place.label, *at_place(place))
                theirs.add(own.key)
                mine[own.key] = own, mine[key][1]
    return tuple(
        (holder, line)
        for key, (holder, line) in mine.items()
        if (key in theirs or key in ALL_OF_THE_PROCESS) and key not in network and holder.decides
    )


def state_of(hook: Any) -> tuple[Holder, ...]:
    """Python state that a hook can reach; torch's generator, too, which all code can."""
    return Reached().look([hook, torch.default_generator])


def reached_by(hooks: Sequence[Any]) -> Reached:
    """Python state that some hooks can reach, as that of a call."""
    reached = Reached()
    with reached.leaving_no_trace(hooks):
        return reached


def with_hooks(tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """The names of the parameters that have hooks."""
    return frozenset(
        name
        for name, tensor in tensors.items()
        if any(getattr(tensor, table, None) for table in TENSOR_HOOKS)
    )


class KeptValues:
    """The values that hooks must leave: later microbatches have computed with them already.

    Args:
        tensors: This worker's parameters and buffers, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._reached: dict[tuple[int, ...], frozenset[int]] = {}  # by the hooks, held below
        self._hooks: list[Any] = []

    @contextmanager
    def left_by(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Run what runs the hooks of some parameters.

        Raises:
            OwnershipError: They have changed the value of a parameter or buffer.
        """
        hooks = [hook for parameter in parameters for hook in hooks_of(parameter)]
        if not hooks:
            yield
            return
        key = tuple(map(id, hooks))
        if key not in self._reached:
            self._hooks += hooks
            self._reached[key] = frozenset(holder.key for holder in Reached().look(hooks))
        watched = self._reached[key] | {id(p) for p in parameters if hooks_of(p)}
        before = {n: t.detach().clone() for n, t in self._tensors.items() if id(t) in watched}
        yield
        for name, value in before.items():
            if not has_same_bits(self._tensors[name], value):
                lines = "".join(dict.fromkeys(map(line_of, hooks)))
                raise OwnershipError(
                    f"a hook on a parameter{lines} writes to {name!r} after a microbatch; later "
                    f"microbatches have been computed with the value before\n"
                    f"  Fix: write between two steps, or use microbatches=1."
                )


def hook_tables(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """The hooks of a parameter by the numbers that torch gives them."""
    with DisableTorchFunctionSubclass():  # stand-ins would answer slowly
        return [getattr(tensor, table, None) or {} for table in TENSOR_HOOKS]


def hooks_of(tensor: torch.Tensor) -> list[Any]:
    """The hooks of a parameter."""
    return [hook for table in hook_tables(tensor) for hook in table.values()]


def line_of(hook: Any) -> str:
    """A hook's own line, in brackets, as errors show it."""
    code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    return "" if code is None else f" ({where_defined(code)})"


def hooks_leave(held: Sequence[HookState]) -> AbstractContextManager[None]:
    """Run what runs hooks of parameters, which must leave shared state as it is.

    Raises:
        OwnershipError: They have changed some of it.
    """
    return unchanged(held, _refusal)


def _refusal(holder: Holder, line: str) -> OwnershipError:
    if holder.key in ALL_OF_THE_PROCESS:
        return draws(line)
    return OwnershipError(
        f"a hook on a parameter{line} changes {holder.name}, which code on other workers, or of "
        f"microbatches that run beside it, uses too: that would find something else than in one "
        f"process\n"
        f"  Fix: look at p.grad after backward() in an own loop, in a callback's on_gradients "
        f"with a Model; or give each parameter's hook a state of its own."
    )


def draws(line: str) -> OwnershipError:
    """The error for a hook that draws random numbers.

    Args:
        line: The hook's line, as ``line_of`` gives it.
    """
    return OwnershipError(
        f"a hook on a parameter{line} draws random numbers, on the worker of the parameter alone; "
        f"in one process all hooks draw from one generator, one after the other\n"
        f"  Fix: draw after backward() in an own loop (gs.distribute), as in "
        f"p.grad.add_(torch.randn_like(p)); or before the step, on every worker."
    )
