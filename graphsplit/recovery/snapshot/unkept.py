"""Python state that code kept whole leaves, and no snapshot holds: refused, or it would be lost.

All workers have it after each step, but a worker that comes back has it as the script built it. A
snapshot holds numbers and texts in attributes of modules and of the loss, and all attributes of
modules that ``gs.opaque`` has marked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from graphsplit.capture.graph import Mode
from graphsplit.capture.opaque.marks import marked_ones
from graphsplit.capture.operations.opaque_call import OpaqueCall
from graphsplit.capture.reach.holders import OF_THE_PROCESS, Holder
from graphsplit.errors import StateError
from graphsplit.guards.classes import own_dictionary
from graphsplit.guards.values import MISSING
from graphsplit.partition.checks.one_state import opaque_calls
from graphsplit.partition.plan import PartitionPlan
from graphsplit.planning.plain_attributes import scalars_in
from graphsplit.planning.planner import Planner
from graphsplit.planning.task import Task

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


class UnkeptState:
    """Knows which plans have been looked at.

    Args:
        task: The network and the loss that snapshots are of.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._known: dict[int, PartitionPlan] = {}  # held, so that no other gets its number

    def refuse(self, planner: Planner) -> None:
        """Look at the plans that were used last.

        Raises:
            StateError: Code kept whole leaves what no snapshot holds; names it, and its line.
        """
        for mode in Mode:
            latest = planner.latest(mode)
            if latest is not None and id(latest.plan) not in self._known:
                self._refuse(latest.plan)
                self._known[id(latest.plan)] = latest.plan

    def _refuse(self, plan: PartitionPlan) -> None:
        calls = [call for _, call in opaque_calls(plan)]
        if not calls:
            return
        tops = [one for one in (self._task.network, self._task.loss_fn) if one is not None]
        modules = [m for top in tops if isinstance(top, nn.Module) for m in top.modules()]
        held = (own_dictionary(one) for one in (*modules, *tops))
        attributes = {id(one) for one in held if one is not None}
        marked = _inside_marked(top for top in tops if isinstance(top, nn.Module))
        for call in calls:
            for holder in _changing(call):
                is_kept = holder.key in marked or (
                    holder.key in attributes and _only_scalars(call, holder)
                )
                if not is_kept:
                    raise _error(call, holder)


def _changing(call: OpaqueCall) -> Iterator[Holder]:
    """The state that a call was seen to change, and generators that it can draw from."""
    reached = call.reached
    yield from reached.own_generators().values()
    for key in reached.changed - OF_THE_PROCESS:
        if reached.holders[key].is_value:
            yield reached.holders[key]


def _inside_marked(tops: Iterable[nn.Module]) -> set[int]:
    """The ids of the attributes of marked modules, and of all containers in there."""
    inside = {m for top in tops for marked in marked_ones(top) for m in marked.modules()}
    waiting: list[Any] = [vars(module) for module in inside]
    found: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) not in found and isinstance(one, _CONTAINERS):
            found.add(id(one))
            waiting += one.values() if isinstance(one, dict) else one
    return found


def _only_scalars(call: OpaqueCall, holder: Holder) -> bool:
    """Whether attributes that a call was seen to set are numbers and texts."""
    now, reached = holder.entries(), call.reached
    left = {**reached.left.get(holder.key, {}), **reached.left_late.get(holder.key, {})}
    own = (name for name in left if name not in vars(nn.Module))  # capture puts code there
    new = {name: left[name] for name in own if left[name] is not now.get(name, MISSING)}
    return bool(left) and scalars_in(new).keys() == new.keys()


def _error(call: OpaqueCall, holder: Holder) -> StateError:
    does = "can draw from" if holder.is_generator else "changes"
    fix = (
        "draw from PyTorch's default generator"
        if holder.is_generator
        else "count in a number in an attribute of the module, or mark the module with gs.opaque "
        "and keep it in attributes of that"
    )
    return StateError(
        f"{call.label} {does} {holder.name}, which no snapshot can hold: a worker that comes back "
        f"would have it as the script made it\n  {call.source}\n"
        f"  Fix: {fix}; or start the job with fail_fast."
    )
