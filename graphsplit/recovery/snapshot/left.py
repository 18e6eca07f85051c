"""Python state that code kept whole can change, in snapshots: wherever it is kept.

All workers have it after each step, but a worker that comes back has it as the script built it. So
a snapshot holds what is other than that, by the ways that lead there (see ``capture.reach.ways``):
numbers, texts, tensors, containers of them, generators. Two places that hold one container do so
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from graphsplit.capture.graph import Mode
from graphsplit.capture.operations.opaque_call import OpaqueCall
from graphsplit.capture.reach.holders import OF_THE_PROCESS, Holder
from graphsplit.capture.reach.ways import Ways, reachable
from graphsplit.errors import StateError
from graphsplit.partition.checks.one_state import opaque_calls
from graphsplit.partition.plan import PartitionPlan
from graphsplit.planning.planner import Planner
from graphsplit.planning.task import Task
from graphsplit.recovery.snapshot.trees import TreeReader, TreeWriter, UnwritableError, Written

LEFT = "left "  # and a rank: the section of what is left there


class LeftInPython:
    """The state of one task that code kept whole can change.

    Args:
        task: The network and the loss.
        losses: All losses that the script has given, by number; it grows.

    Attributes:
        has_run: Whether code may have changed something.
    """

    def __init__(self, task: Task, losses: Mapping[int, Any] = MappingProxyType({})) -> None:
        self._task, self._losses = task, losses
        self._plans: dict[int, PartitionPlan] = {}  # held, so that no other gets its number
        self._reached: dict[str, OpaqueCall | None] = {}  # what can reach it, by the way to it
        self._here: set[str] = set()  # ways to what code on this worker can reach
        self._changing: set[str] = set()  # to what was ever other than it was built, or may be
        self._beyond: dict[Any, tuple[OpaqueCall, Holder]] = {}  # to which no way leads
        self.has_run = False
        self._ways = task.ways = Ways()
        self._named: set[str] = set()
        self.look()

    def _roots(self) -> dict[str, Any]:
        losses = {f"loss_fn {n}": one for n, one in self._losses.items() if one is not None}
        return {"net": self._task.network, **losses}

    def look(self) -> None:
        """Until code has run, all is as the script has built it; of a new loss also later."""
        roots = self._roots()
        if not self.has_run:
            self._ways.look(roots)
            self._ways.note()
        elif new := {name: root for name, root in roots.items() if name not in self._named}:
            self._ways.look(new)
        self._named = {*roots}

    def kept(self, planners: Iterable[Planner], rank: int) -> dict[str, Any]:
        """All that is not as the script has built it, and which of it code here can reach.

        Raises:
            StateError: Some of it cannot be kept; names it, and the line of what changes it.
        """
        self.follow(planners, rank)
        writer = TreeWriter(self._ways.to, self._task.network)
        found: dict[str, Written] = {}
        for way, call in self._reached.items():
            holder = self._ways.holders[way]
            if way in self._changing or holder.has_changed() or _has_tensors(holder.items()):
                self._changing.add(way)
                try:
                    found[way] = writer.written(holder)
                except UnwritableError as error:
                    raise _error(call, holder, f" ({error})") from None
        self._refuse_beyond(writer)
        return {"values": found, "here": [way for way in found if way in self._here]}

    def put_back(self, kept: Iterable[Mapping[str, Any]]) -> None:
        """Let all be as when ``kept`` was called: here, or on all workers.

        Raises:
            StateError: The script has not built what was kept.
        """
        chosen: dict[str, tuple[int, Written]] = {}
        for at, one in enumerate(kept):
            for way, written in one["values"].items():
                if way not in chosen or way in one["here"]:
                    chosen[way] = at, written
        if chosen:
            self.look()
            self.has_run = True
        for way in self._reached.keys() - chosen.keys():
            holder = self._ways.holders[way]
            if holder.has_changed():
                holder.put_back()
        readers: dict[int, TreeReader] = {}
        for way, (at, written) in chosen.items():
            if way not in self._ways.holders:
                raise StateError(f"{way} is in a snapshot, and was not found here")
            self._reached.setdefault(way)
            self._changing.add(way)
            reader = readers.setdefault(at, TreeReader(self._ways, self._task.network))
            reader.put(self._ways.holders[way], written)

    def leave(self, planner: Planner, rank: int) -> None:
        """The generation is over, and with it the plans: note what they may have changed."""
        self.follow((planner,), rank)
        self._plans.clear()
        self._here.clear()

    def follow(self, planners: Iterable[Planner], rank: int) -> None:
        """Note what the code of the plans that were used last can change."""
        for latest in (one.latest(mode) for one in planners for mode in Mode):
            if latest is not None and id(latest.plan) not in self._plans:
                self.has_run, self._plans[id(latest.plan)] = True, latest.plan
                self._note(latest.plan, rank)

    def _note(self, plan: PartitionPlan, rank: int) -> None:
        calls, workers = opaque_calls(plan), plan.placed.workers
        found = [(workers[at], call, one) for at, call in calls for one in _of(call)]
        for worker, call, holder in found:
            way = self._ways.way_to(holder)
            is_changing = holder.key in call.reached.changed
            if way is not None:
                self._reached[way] = self._reached.get(way) or call
                self._here |= {way} if worker == rank else set()
                self._changing |= {way} if is_changing else set()
            elif holder.is_generator or is_changing:
                self._beyond[holder.key] = call, holder

    def _refuse_beyond(self, writer: TreeWriter) -> None:
        left = self._beyond.keys() - writer.numbers
        if left:
            left &= reachable(self._roots().values())
        for key in left:
            raise _error(*self._beyond[key])


def sections_of(sections: Mapping[str, Any]) -> list[Any]:
    """The sections of what ``kept`` gave, on each worker whose sections these are."""
    return [value for name, value in sections.items() if name.startswith(LEFT)]


def _of(call: OpaqueCall) -> Iterator[Holder]:
    """The state that a call may change, and generators that it can draw from."""
    for key, holder in call.reached.holders.items():
        if key not in OF_THE_PROCESS and (holder.is_value or holder.is_generator):
            yield holder


def _has_tensors(items: Iterable[Any]) -> bool:
    """Whether there are tensors: they are written to in place, which no holder tells."""
    return any(
        isinstance(one, torch.Tensor) or (isinstance(one, tuple) and _has_tensors(one))
        for one in items
    )


def _error(call: OpaqueCall | None, holder: Holder, reason: str = "") -> StateError:
    does = "can draw from" if holder.is_generator else "changes"
    fix = (
        "draw from a generator that network or loss lead to"
        if holder.is_generator
        else "keep numbers, texts, tensors, and containers of them, where network or loss lead to"
    )
    who, where = ("code kept whole", "") if call is None else (call.label, f"\n  {call.source}")
    return StateError(
        f"{who} {does} {holder.name}, which no snapshot can hold{reason}: a worker that comes back "
        f"would have it as the script made it{where}\n"
        f"  Fix: {fix}; or start the job with fail_fast."
    )
