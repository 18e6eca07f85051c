"""Lines of the log about the seconds before a first step: worker 0 says them, for all."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Container, Mapping, Sequence, Set

import torch
from torch import nn

from graphsplit.batches.signature import Signature, leaves
from graphsplit.capture.graph import Mode
from graphsplit.frames import warn_users
from graphsplit.guards.check import Failure
from graphsplit.guards.places import PlaceKind
from graphsplit.guards.values import shown
from graphsplit.logs import say
from graphsplit.partition.plan import PartitionPlan
from graphsplit.planning.passes import is_placed
from graphsplit.planning.task import Task

_MANY = 5

# Networks of which was said that nothing of them is placed.
_known_unplaced: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class PlanningLines:
    """The lines about one task.

    Args:
        rank: This worker; the others say nothing.
        task: What is planned.
    """

    def __init__(self, rank: int, task: Task) -> None:
        self._rank, self._task = rank, task
        self._name = type(task.network).__name__
        self._is_again = False
        self._told: set[str] = set()  # of plans
        self._num_again: Counter[tuple[Mode, str]] = Counter()

    def begun(self, doing: str, mode: Mode, why_again: str = "") -> None:
        """Say what begins. ``graphsplit run`` shows it on a terminal while it lasts.

        Args:
            doing: ``"capturing"`` or ``"planning"``.
            mode: Whose step it is done for.
            why_again: What is other than before, where there was such a step; else empty.
        """
        self._is_again |= bool(why_again)
        if self._rank != 0 or bool(why_again) != self._is_again:
            return  # one line for each further plan
        again = f" again: {why_again}" if why_again else ""
        if why_again:
            self._num_again[mode, why_again] += 1
            if self._num_again[mode, why_again] == _MANY:
                again += "; this is not told any more"
            elif self._num_again[mode, why_again] > _MANY:
                return
        say(f"{doing} the {mode.step} of {self._name}{again}", event=doing)

    def planned(self, plan: PartitionPlan) -> None:
        """Say that a plan is ready to run; and, once, if nothing was placed in it.

        Of a further plan nothing is said where a former one had as many segments.
        """
        if self._rank != 0:
            return
        is_again, self._is_again = self._is_again, False
        segments, workers = len(plan.segments), {segment.worker for segment in plan.segments}
        text = (
            f"planned the {plan.placed.graph.mode.step} of {self._name}: "
            f"{_number(segments, 'segment')}, {_number(len(workers), 'worker')}"
        )
        if self._task.compiler is not None:
            text += "; compiling each segment as it first runs"
        if not (is_again and text in self._told):
            say(text, event="planned")
        self._told.add(text)
        if len(workers) == 1 < plan.num_workers and not is_placed(plan.placed.graph, self._task):
            self._say_unplaced(workers.pop())

    def _say_unplaced(self, worker: int) -> None:
        network = self._task.network
        if network in _known_unplaced:
            return
        _known_unplaced.add(network)
        say(
            f"nothing of {self._name} is placed: worker {worker} runs all of it, and the others "
            f"have nothing to do\n"
            f"  Fix: say before the first step where its parts live, as by "
            f"{_a_part(network)}.place(1).",
            event="unplaced",
            level="warning",
        )


def _a_part(network: nn.Module) -> str:
    """The last child of a network, as code."""
    names = [name for name, _ in network.named_children()]
    if not names:
        return "net"
    return f"net[{names[-1]}]" if names[-1].isdecimal() else f"net.{names[-1]}"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


class SizesSeen:
    """The sizes that plans were made for, of each kind of batch; tells once that they are many.

    Args:
        dynamic: The dimensions that were said to change.
    """

    def __init__(self, dynamic: Container[int]) -> None:
        self._dynamic = dynamic
        self._seen: dict[tuple[Mode, str], list[Signature]] = {}

    def note(self, mode: Mode, signature: Signature) -> None:
        """A plan is made for a signature."""
        seen = self._seen.setdefault((mode, signature.structure()), [])
        if signature in seen or len(seen) >= _MANY:
            return
        seen.append(signature)
        if len(seen) == _MANY:
            self._warn(mode, _changing_dimensions(seen))

    def _warn(self, mode: Mode, sizes_of: Mapping[int, Set[int]]) -> None:
        changing = {d: max(sizes) for d, sizes in sizes_of.items() if d not in self._dynamic}
        has_ones = any(1 in sizes for sizes in sizes_of.values())
        pad = "pad the batches to a few sizes."
        if changing:
            shown = ", ".join(f"{d}: {2 * largest}" for d, largest in changing.items())
            call = "gs.distribute(net" if mode.keeps_outputs_home else "gs.Model(..."
            fix = (
                f"{call}, dynamic_dims={{{shown}}}), with the largest sizes that come, makes one "
                f"plan for all{' but those with a size of 1' if has_ones else ''}; or {pad}"
            )
        elif has_ones:  # a size of 1 is broadcast, so that other operations run
            fix = f"dynamic_dims leaves out sizes of 1, in each tensor; {pad}"
        else:
            return
        sizes = ", ".join(f"dimension {d} up to {max(sizes)}" for d, sizes in sizes_of.items())
        warn_users(
            f"{_MANY} plans for {mode.value} were made for batches that differ in nothing but "
            f"sizes ({sizes}); each size takes a capture of its own, which takes seconds\n"
            f"  Fix: {fix}"
        )


def _changing_dimensions(seen: Sequence[Signature]) -> dict[int, set[int]]:
    """The dimensions of tensors that were not equal, each with the sizes that it had."""
    shapes = [
        [leaf.shape for leaf in leaves(signature.example("meta")) if torch.is_tensor(leaf)]
        for signature in seen
    ]
    found: dict[int, set[int]] = {}
    for same in zip(*shapes, strict=True):
        for dimension, sizes in enumerate(zip(*same, strict=True)):
            if len(set(sizes)) > 1:
                found.setdefault(dimension, set()).update(sizes)
    return dict(sorted(found.items()))


def warn_of_captures(failure: Failure, count: int, seconds: float, *, is_answer: bool) -> None:
    """Warn of a place for which a step is captured again and again."""
    place = failure.place
    fix = (
        "compute with the buffer itself, by indices that are tensors (index_copy_, torch.where), "
        "not with its number; or put the lines around this one into a module with nothing placed "
        "inside, and mark it: gs.opaque(module)."
        if place.kind is PlaceKind.NUMBER
        else "compute with the tensor itself; or put the lines around this one into a module with "
        "nothing placed inside, which is kept whole."
        if is_answer
        else f"keep it in a tensor (register_buffer) that is changed in place; or say that it "
        f"does not matter, with gs.ignore(holder, {str(place.key)!r})."
    )
    warn_users(
        f"network or loss reads {place.label}, which was {shown(failure.old)} and is "
        f"{shown(failure.new)}: capture {count} for it; each value takes one of its own, this one "
        f"took {seconds:.2f} s\n"
        f"  {place.source}\n"
        f"  Fix: {fix}"
    )
