"""The plans of one training step: one for each run of microbatches that look alike.

A batch of 10 in 4 microbatches is 3, 3, 2 and 2 rows. That takes two plans, run one after the
other; only the first sets gradients to None, only the last steps the optimizer::

    plan of 3 rows   ZERO_GRADIENTS  F0 F1  B0 B1
    plan of 2 rows                                 F0 F1  B0 B1  OPTIMIZER

Replicas share the microbatches of each plan among all of them, for a plan waits for the one before;
but where parts of gradients are kept for each microbatch, it runs where it would in any batch.

A microbatch that leaves Python values with which the next one may have another graph runs by
itself, too; and one whose code asks tensors for their values. The latter runs where it would in a
batch that asks nothing: while one replica runs what it has the answers for, the next one asks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import torch

from graphsplit.batches.microbatches import BatchDescription, Divider, Division, own_views
from graphsplit.batches.signature import Signature, leaves
from graphsplit.capture.failures import too_late
from graphsplit.capture.graph import CapturedGraph, Mode
from graphsplit.capture.reach.at_calls import NOTHING_LEFT, Left, moments
from graphsplit.errors import ConfigurationError, PlacementError, RaisedInEagerError
from graphsplit.optimizers.parameter_hooks import reached_by
from graphsplit.partition.checks.one_state import opaque_calls
from graphsplit.partition.plan import Exchange
from graphsplit.planning.compared.announced import Note
from graphsplit.planning.passes import may_take_turns
from graphsplit.planning.planner import Planner
from graphsplit.planning.ready_plan import ReadyPlan
from graphsplit.planning.recordings import Match
from graphsplit.planning.trainable import put_requires_grad
from graphsplit.program.lower import StepPart
from graphsplit.runtime.randomness import microbatch_rng_state
from graphsplit.runtime.step_state import Microbatches

_MOST_CHECKSUMS = 10_000
_written_inputs, _lanes = attrgetter("written_inputs"), attrgetter("plan.lanes")


@dataclass
class TrainingProgress:
    """How far a Model's training is: what the random numbers of its microbatches follow from.

    Attributes:
        num_steps: How many training steps are done.
        seed: ``torch.initial_seed()`` where training started; None before.
        accumulate: Over how many batches gradients are added up before the optimizer steps.
        adds_up: Whether gradients stay until the script resets them: ``forward_backward`` has
            added some.
        checksums: Of the batches that were trained on lately, by the number of the step: in a job
            that recovers, where steps are done again.
    """

    num_steps: int = 0
    seed: int | None = None
    accumulate: int = 1
    adds_up: bool = False
    checksums: dict[int, int] = field(default_factory=dict)

    def is_as_before(self, checksum: int) -> bool:
        """Whether the batch of the last step holds what it held when that was done first."""
        known = self.checksums.setdefault(self.num_steps, checksum)
        if len(self.checksums) > _MOST_CHECKSUMS:
            del self.checksums[next(iter(self.checksums))]
        return known == checksum

    @property
    def opens(self) -> bool:
        """Whether gradients are set to None before the next batch."""
        return self.num_steps % self.accumulate == 0

    @property
    def keeps_gradients(self) -> bool:
        """Whether the next batch adds to gradients that are there."""
        return self.adds_up or not self.opens

    @property
    def closes(self) -> bool:
        """Whether the optimizer steps after the next batch."""
        return (self.num_steps + 1) % self.accumulate == 0

    def begin(self) -> None:
        """Note the seed, if training starts here."""
        if self.seed is None:
            self.seed = torch.initial_seed()

    def rng_state(self, microbatch: int) -> torch.Tensor:
        """The state in which the generator starts for a microbatch of the current step."""
        assert self.seed is not None
        return microbatch_rng_state(self.seed, self.num_steps, microbatch)

    def agreement(self, divider: Divider) -> str:
        """The facts that workers must agree on, as a line of text."""
        ways = [
            f"{name}=fn" for name in ("split", "loss_weight") if getattr(divider, name) is not None
        ]
        text = " ".join([f"microbatches {divider.num_microbatches}", *ways])
        return text if divider.num_microbatches == 1 else f"{text}, seed {self.seed}"


class StepPhase(NamedTuple):
    """One plan of a step, with what it works on.

    Attributes:
        planned: The plan.
        start: Number of its first microbatch in the step.
        inputs: For each of its microbatches the graph's inputs, None where they are not here.
        weights: What the losses are multiplied by; empty where the batch is whole.
        mark: Brings back what its microbatches find; None where that is as it was.
        is_last: Whether no other plan of the step has microbatches behind them.
    """

    planned: ReadyPlan
    start: int
    inputs: Sequence[Sequence[Any]]
    weights: Sequence[float]
    mark: Callable[[], None] | None = None
    is_last: bool = True

    def microbatches(self, progress: TrainingProgress) -> Microbatches:
        """The microbatches' weights, and the random state in which each begins."""
        start = self.start
        state_of = progress.rng_state
        return Microbatches(self.weights, lambda m: state_of(start + m), start, self.is_last)

    @contextmanager
    def drawing(self, progress: TrainingProgress) -> Iterator[None]:
        """Run a microbatch as if it were a batch, from its own random state; that is put back."""
        with torch.random.fork_rng(devices=()):
            torch.default_generator.set_state(progress.rng_state(self.start))
            yield


class PlannedStep(NamedTuple):
    """The plans of a step.

    Attributes:
        plans: One for each run of microbatches with one signature, in order.
        sizes: How many microbatches each runs.
        weights: What the loss of each microbatch is multiplied by; empty where the batch is whole.
        marks: Where forward freezes or unfreezes parameters between them, or changes what code kept
            whole reads: for each plan, what brings that back before it runs.
        exchange: What adds up the parts of gradients that the step's batches have kept, and ends
            the step; None where each batch adds up its own, or the step goes on.
    """

    plans: tuple[ReadyPlan, ...]
    sizes: tuple[int, ...] = (1,)
    weights: tuple[float, ...] = ()
    marks: tuple[Callable[[], None], ...] = ()
    exchange: ReadyPlan | None = None

    @property
    def first(self) -> ReadyPlan:
        """The plan that runs first."""
        return self.plans[0]

    @property
    def consumers(self) -> tuple[int, ...]:
        """Workers that read the loader's batches, the earliest in the pipeline first."""
        if len(self.plans) == 1:
            return self.plans[0].consumers
        return tuple(dict.fromkeys(itertools.chain(*(plan.consumers for plan in self.plans))))

    @property
    def writes_inputs(self) -> bool:
        """Whether the step modifies the batch."""
        return any(map(_written_inputs, self.plans))

    @property
    def has_lanes(self) -> bool:
        """Whether workers share its microbatches."""
        return any(map(_lanes, self.plans))

    @property
    def needed_by(self) -> frozenset[int]:
        """The workers that consume an input of a microbatch."""
        if len(self.plans) == 1:
            return self.plans[0].needed_by
        return frozenset(itertools.chain(*(plan.needed_by for plan in self.plans)))

    def microbatches_read(self) -> tuple[tuple[int, ...], ...]:
        """For each worker, the microbatches of which it consumes an input."""
        if len(self.plans) == 1:
            return self.plans[0].microbatches_read
        found: list[tuple[int, ...]] = [()] * self.first.plan.num_workers
        start = 0
        for plan, size in zip(self.plans, self.sizes, strict=True):
            for worker, parts in enumerate(plan.microbatches_read):
                found[worker] += tuple(start + part for part in parts)
            start += size
        return tuple(found)

    def phases(self, division: Division | None) -> list[StepPhase]:
        """The plans with what each works on.

        Args:
            division: The batch; None on workers that do not have it.
        """
        if len(self.plans) == 1 and not (self.weights or self.marks):  # as at most steps
            plan, count = self.plans[0], self.sizes[0]
            inputs = _inputs(plan, count, division, slice(0, count))
            return [StepPhase(plan, 0, inputs, ())]
        start, found = 0, list[StepPhase]()
        marks = self.marks or (None,) * len(self.plans)
        for plan, size, mark in zip(self.plans, self.sizes, marks, strict=True):
            part = slice(start, start + size)
            inputs = _inputs(plan, size, division, part)
            is_last = len(found) == len(self.plans) - 1
            found.append(StepPhase(plan, start, inputs, self.weights[part], mark, is_last))
            start += size
        return found

    def loss(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of the step, from those of its microbatches in order."""
        return total_loss(losses, self.weights) if self.weights else losses[0]


def total_loss(losses: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """``sum(loss * weight)`` in the order of the microbatches, as Python's ``sum`` adds."""
    total = sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
    assert isinstance(total, torch.Tensor)
    return total


def _inputs(
    plan: ReadyPlan, size: int, division: Division | None, part: slice
) -> Sequence[Sequence[Any]]:
    if division is None:
        return [plan.no_inputs] * size
    # A microbatch whose rows were not read has no arguments.
    if plan.plan.placed.graph.mode not in (Mode.TRAIN, Mode.CALL) or not division.weights:
        return [leaves(batch) or plan.no_inputs for batch in division.microbatches]
    return [own_views(microbatch) or plan.no_inputs for microbatch in division.microbatches[part]]


def plan_step(
    planner: Planner,
    mode: Mode,
    shape: BatchDescription,
    *,
    note: Note = str,
    progress: TrainingProgress | None = None,
    only_adds: bool = False,
) -> PlannedStep:
    """The plans for a batch of a shape; made now where they are new.

    Args:
        planner: Makes and keeps plans.
        mode: Train, eval or predict.
        shape: The batch and its microbatches.
        note: Gives what workers must agree on besides the plans, where one is new.
        progress: How far training is, for a training step.
        only_adds: Whether the step adds to gradients, and does not reset or use them.

    Raises:
        CaptureError, PlacementError, PlanMismatchError: As ``Planner.plan_for``.
    """
    opens, closes = (True, True) if progress is None else (progress.opens, progress.closes)
    if only_adds:
        opens = closes = False
    planner.begin_step(mode)
    if mode is not Mode.TRAIN or not shape.parts:
        signature, count = shape.parts[0] if shape.parts else (shape.whole, 1)
        part = StepPart(count, first=opens, last=closes)
        found = planner.recording_for(mode, signature, note=note)
        planned = PlannedStep((planner.plan_for(found, part, note=note),), (count,))
    else:
        planned = _plan_microbatches(planner, shape, note, opens=opens, closes=closes)
    planner.left = NOTHING_LEFT  # it holds what the script may have let go of
    return planned


def _plan_microbatches(
    planner: Planner, shape: BatchDescription, note: Note, *, opens: bool, closes: bool
) -> PlannedStep:
    """The plans for a training batch that is split.

    Args:
        planner: Makes and keeps plans.
        shape: The batch and its microbatches.
        note: As for ``plan_step``.
        opens: Whether gradients are reset before it.
        closes: Whether the optimizer steps after it.
    """
    num_kept = planner.num_kept
    planner.keep_at_least(2 * len(shape.parts))
    plans: list[ReadyPlan] = []
    sizes: list[int] = []
    trained: list[tuple[Sequence[torch.Tensor], tuple[bool, ...]]] = []
    lefts, asks = list[Left](), False
    waiting, num_parts = [*shape.parts], sum(count for _, count in shape.parts)
    num_parts = _all_parts(num_parts, num_kept) if num_kept else num_parts
    while waiting:
        (signature, count), *later = waiting
        if not asks:  # what a microbatch leaves is known once it has its answers
            found = _recording_for(planner, signature, note, is_first=not plans)
        graph = found.recording.graph
        asks |= graph.num_answered is not None
        if asks and num_kept:
            _refuse_asking(graph)
        takes_turns = found.recording.plans in planner.taking_turns
        if count > 1 and (graph.is_other_after or asks or takes_turns):
            later, count = [(signature, count - 1), *later], 1
        has_replicas = planner.has_replicas or graph.has_replicas
        when = _when_exchanged(num_kept, ends=closes and count == num_parts)
        is_last = not later and when is not Exchange.LATER
        part = StepPart(
            count,
            first=opens and not plans,
            last=closes and is_last,
            is_microbatched=not takes_turns,
            adds_up=planner.sums is not None and is_last,
            start=sum(sizes) if has_replicas else 0,
            num_parts=num_parts if has_replicas and (num_kept or asks) else 0,
            exchange=when,
        )
        plan = _plan_for(planner, found, part, note, has_replicas=has_replicas)
        if plan is None:
            continue
        plans.append(plan)
        sizes.append(count)
        trained.append((planner.trainable, planner.requires_grad()))
        lefts.append(planner.left)
        waiting = later
    exchange = None
    if closes and when is Exchange.LATER:
        part = StepPart(
            num_parts, first=False, is_microbatched=True, adds_up=True, exchange=Exchange.ALONE
        )
        exchange = planner.plan_for(found, part, note=note)
    marks = _marks(trained, lefts, plans, planner.writes.hooks.all)
    return PlannedStep(tuple(plans), tuple(sizes), shape.weights, marks, exchange)


def _marks(
    trained: Sequence[tuple[Sequence[torch.Tensor], tuple[bool, ...]]],
    lefts: Sequence[Left],
    plans: Sequence[ReadyPlan],
    hooks: Callable[[], Sequence[Any]],
) -> tuple[Callable[[], None], ...]:
    """Functions that bring back, before each plan runs, what its microbatches find."""
    is_one = len({flags for _, flags in trained}) == 1
    flags = [] if is_one else [partial(put_requires_grad, *part) for part in trained]
    # One that asks leaves what it leaves once it has run.
    known = [plan for plan in plans if not plan.asks] if len(plans) > 1 else []
    found: list[Callable[[], None]] = []
    lefts[-1].let_find()  # what adds parts of gradients up has left all once more
    if known and any(left.before for left in lefts):
        on_parameters = hooks()
        late = [reached_by(on_parameters)] if on_parameters else []
        of_plans = (opaque_calls(plan.plan) for plan in known)
        calls = [[*late, *(call.reached for _, call in of_plan)] for of_plan in of_plans]
        found += moments(lefts[: len(known)], calls) if any(calls) else ()
    found += [_nothing] * (len(plans) - len(found)) if found else []
    if flags and found:
        return tuple([partial(_all_of, both) for both in zip(found, flags, strict=True)])
    return tuple(flags or found)


def _nothing() -> None:
    """Bring nothing back."""


def _all_of(marks: Iterable[Callable[[], None]]) -> None:
    for mark in marks:
        mark()


def _recording_for(planner: Planner, signature: Signature, note: Note, *, is_first: bool) -> Match:
    """The recording of a microbatch; an error of eager mode's own is told if it is the first."""
    try:
        return planner.recording_for(Mode.TRAIN, signature, note=note)
    except RaisedInEagerError as error:
        error.is_first &= is_first
        raise


def _plan_for(
    planner: Planner, found: Match, part: StepPart, note: Note, *, has_replicas: bool
) -> ReadyPlan | None:
    """The plan of microbatches; None if they have to take turns, which the planner then knows."""
    try:
        return planner.plan_for(found, part, note=note)
    except PlacementError as error:
        if not may_take_turns(error, planner.task, has_replicas=has_replicas):
            raise
        planner.taking_turns.add(found.recording.plans)
        return None


def _refuse_asking(graph: CapturedGraph) -> NoReturn:
    """Refuse code that asks tensors for their values, where gradients are kept by microbatch.

    Raises:
        PlacementError: Names the line that asks, if that is known.
        CaptureError: It ends in an error.
    """
    if graph.ending is not None:
        raise too_late(str(graph.ending.error))
    node = graph.outputs[0].node
    line = f"  {graph.nodes[node].source}\n" if graph.asks and node is not None else ""
    raise PlacementError(
        f"forward asks a tensor for its value, and gradients are kept by microbatch "
        f"(accumulate_by)\n{line}"
        f"  Fix: leave accumulate_by out; put the lines around it into a module with nothing "
        f"placed inside, which is kept whole; or compute with the tensor itself (torch.where)."
    )


def _when_exchanged(num_kept: int, *, ends: bool) -> Exchange:
    """When replicas exchange gradients of microbatches that run together.

    Args:
        num_kept: How many parts the batches of a step keep apart; 0: none.
        ends: Whether these are all microbatches of a batch that has one of each number, and ends
            the step.
    """
    if not num_kept:
        return Exchange.BESIDE
    return Exchange.WITH_KEPT if ends else Exchange.LATER


def _all_parts(num_parts: int, most: int) -> int:
    """How many parts the batches of a step have, which keep each apart: always the same number."""
    if num_parts > most:
        raise ConfigurationError(
            f"split made {num_parts} microbatches of a batch, and the Model has "
            f'microbatches={most}\n  Fix: with accumulate_by="microbatch", make at most that many.'
        )
    return most


@dataclass(frozen=True)
class Outlook:
    """All that a step depends on beside its batch, as it is now.

    Attributes:
        together: How many such batches replicas evaluate at once; 1 where there is no plan yet.
        recording: The number of the recording that holds; None where none does.
        lifted: The numbers that it computes with.
        written: How often each parameter and buffer was written to.
    """

    together: int = 1
    recording: int | None = None
    lifted: tuple[Any, ...] = ()
    written: tuple[int, ...] = ()


def outlook(planner: Planner, mode: Mode, signature: Signature) -> Outlook:
    """The outlook for a batch, with the network in the modes that its step finds."""
    found = planner.recordings.find(mode, signature)
    if found is None:
        return Outlook()
    known = planner.known_plan(found)
    together = 1 if known is None else known.plan.together
    lifted, written = tuple(found.lifted), planner.writes.counts()
    return Outlook(together, found.recording.number, lifted, written)
