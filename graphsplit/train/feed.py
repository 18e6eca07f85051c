"""Batches for workers: who reads them, and what the others learn of them.

Only workers whose program consumes an input read their loader; the others decode nothing. Before
each step the *leader*, the reader that stands earliest in the pipeline, tells all others by a
ticket what the batch looks like, and the generator's state if drawing the batch changed it::

    leader     draw batch ── ticket ───────────────► run step
    reader     draw batch ── receive ticket ───────► run step
    others      receive ticket, take over generator ─► run step

Checksums cost time, so the leader computes them while it waits for values, and readers when they
draw, while others still compute. A ticket carries that of the batch before: a difference ends the
job one step late, and names the right one.

Before the first plan nobody knows who reads. The worker of the first placed module leads then; if
it turns out to consume nothing, it has read one epoch for the others, and the next epoch's leader
is a consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from graphsplit.capture.graph import Mode
from graphsplit.errors import LoaderMismatchError
from graphsplit.partition.edges import ALL_GENERATORS_BYTES
from graphsplit.placement.annotations import module_annotation
from graphsplit.placement.resolve import UnplacedRule
from graphsplit.runtime.job import Job
from graphsplit.runtime.randomness import all_generators, can_be_packed, set_all_generators
from graphsplit.train import records
from graphsplit.train.batch import fingerprint
from graphsplit.train.checkpoint.position import FROM_THE_START, EpochStart
from graphsplit.train.microbatches import Divider, Division, Shape
from graphsplit.train.planner import Planner
from graphsplit.train.step_plan import PlannedStep, Progress, plan_step
from graphsplit.train.tickets import Ticket, Tickets

_FIX = (
    "give all workers the same data, order and seed; a script that draws random numbers must draw "
    "them on every worker."
)


def likely_first_reader(network: nn.Module, unplaced: UnplacedRule, num_workers: int) -> int:
    """The worker that probably consumes the first input: a guess for the very first batch."""
    for module in network.modules():
        annotation = module_annotation(module)
        if annotation is not None:
            return annotation.rank if annotation.rank < num_workers else 0
        is_leaf = next(module.children(), None) is None
        if unplaced == "worker0" and is_leaf and next(module.parameters(), None) is not None:
            return 0
    return 0


Fed = tuple[PlannedStep, Division | None, Callable[[], None] | None]


def _draws_from_process(planned: PlannedStep) -> bool:
    """Whether a step may draw from Python's or NumPy's generator, as a loader may."""
    return planned.first.plan.placed.graph.draws_from_process


class _Cursor:
    """A loader's batches, one by one."""

    def __init__(self, loader: Iterable[Any], *, divider: Divider, has_loss_fn: bool) -> None:
        self._iterator = iter(loader)
        self._divider = divider
        self._has_loss_fn = has_loss_fn

    def draw(self) -> Division | None:
        """The next batch; None at the end."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            return None
        return self._divider.divide(batch, has_loss_fn=self._has_loss_fn)


class Feed:
    """The batches of one epoch, as one worker sees them.

    Yields, for each step, the plan to run, the batch, and what to do while the step waits for its
    first value. The batch is None where this worker does not consume it.

    Raises while iterating:
        LoaderMismatchError: This worker's loader disagrees with the leader's.
    """

    def __init__(
        self,
        job: Job,
        planner: Planner,
        tickets: Tickets,
        *,
        mode: Mode,
        leader: int,
        loader: Iterable[Any],
        divider: Divider,
        has_loss_fn: bool,
        note: str = "",
        start: EpochStart = FROM_THE_START,
        progress: Progress | None = None,
    ) -> None:
        self._job = job
        self._planner = planner
        self._tickets = tickets
        self._mode = mode
        self._leader = leader
        records.trust_loader(loader)
        self._loader = loader
        self._divider = divider
        self._has_loss_fn = has_loss_fn
        self._note = note
        self._progress = progress
        self._start = start
        start.go_on(loader)
        self._epoch_state = torch.default_generator.get_state()
        if start.generator is not None:
            self._epoch_state = start.generator
        self._cursor: _Cursor | None = None
        self._step = start.step
        self._checksum: int | None = None  # of the batch drawn last
        self._next: Division | None = None  # drawn, but not yet announced
        self._next_checksum: int | None = None

    def __iter__(self) -> Iterator[Fed]:
        if self._job.num_workers == 1:
            yield from self._alone()
        elif self._job.rank == self._leader:
            yield from self._lead()
        else:
            yield from self._follow()

    def _alone(self) -> Iterator[Fed]:
        """There is nobody to tell, and nothing to compare."""
        cursor = self._open_cursor()
        while (division := cursor.draw()) is not None:
            yield self._planned(division.shape()), division, None
            self._step += 1

    def _lead(self) -> Iterator[Fed]:
        cursor = self._open_cursor()
        known: torch.Tensor | None = None
        planned: PlannedStep | None = None
        looked: tuple[Any, ...] = ()
        while True:
            if self._step > 0:
                known = torch.default_generator.get_state()
            division = cursor.draw()
            state = torch.default_generator.get_state()
            news = None if known is not None and torch.equal(state, known) else state
            if planned is None or division is None or _draws_from_process(planned):
                news = all_generators() if can_be_packed() else news
            previous = self._checksum or 0
            if division is None:
                self._tickets.send(None, generator=news, previous_checksum=previous)
                return
            shape = division.shape()
            # Workers that wait for a value anyway are woken by it; waking them twice costs more
            # than a hop, when there are fewer cores than workers.
            is_same = planned is not None and looked == (shape.whole, shape.parts)
            if planned is None or not is_same or self._planner.lowers_again:
                quiet: Container[int] = ()
            else:
                quiet = planned.first.woken_by_values
            self._tickets.send(shape, generator=news, quiet=quiet, previous_checksum=previous)
            planned, looked = self._planned(shape), (shape.whole, shape.parts)
            yield planned, division, self._checking(division)
            self._step += 1

    def _planned(self, shape: Shape) -> PlannedStep:
        return plan_step(self._planner, self._mode, shape, note=self._note, progress=self._progress)

    def _new_cursor(self) -> _Cursor:
        batches = self._start.open(self._loader)
        return _Cursor(batches, divider=self._divider, has_loss_fn=self._has_loss_fn)

    def _checking(self, division: Division) -> Callable[[], None]:
        def check() -> None:
            self._checksum = fingerprint(division.arguments)

        return check

    def _follow(self) -> Iterator[Fed]:
        while True:
            ticket = self._tickets.receive(self._leader)
            self._compare_previous(ticket)
            if ticket.shape is None:
                self._end(ticket)
                return
            planned = self._planned(ticket.shape)
            if self._job.rank in planned.consumers:
                division = self._drawn_for(ticket, ticket.shape)
                self._checksum, self._next_checksum = self._next_checksum, None
                is_checked = self._checksum is not None
                yield planned, division, None if is_checked else self._checking(division)
            else:
                self._next = self._next_checksum = None
                self._take_over_generator(ticket)
                yield planned, None, None
            if self._cursor is not None:
                # In program order the next batch is drawn now, after the step and the callbacks:
                # while others still compute, and before its ticket.
                self._next = self._draw()
                if self._next is not None:
                    self._next_checksum = fingerprint(self._next.arguments)
            planned.first.runner.expect_first_value()
            self._step += 1

    def _compare_previous(self, ticket: Ticket) -> None:
        """Compare the batch before with the leader's, if this worker drew it."""
        mine, self._checksum = self._checksum, None
        if mine is not None and mine != ticket.previous_checksum:
            self._step -= 1
            raise self._mismatch("its batch has other values", "shapes and dtypes are equal")

    def _take_over_generator(self, ticket: Ticket) -> None:
        if ticket.generator:
            state = torch.frombuffer(bytearray(ticket.generator), dtype=torch.uint8)
            if len(ticket.generator) == ALL_GENERATORS_BYTES:
                set_all_generators(state)
            else:
                torch.default_generator.set_state(state)

    def _draw(self) -> Division | None:
        cursor = self._cursor or self._open_cursor()
        return cursor.draw()

    def _drawn_for(self, ticket: Ticket, announced: Shape) -> Division:
        """This reader's batch, compared with the ticket."""
        division = self._draw() if self._cursor is None else self._next
        self._next = None
        if division is None:
            raise self._mismatch("its loader has ended", "the leader's has a batch")
        shape = division.shape()
        if shape.whole != announced.whole:
            raise self._mismatch(
                f"its batch is {shape.whole.text}", f"the leader's is {announced.whole.text}"
            )
        if shape != announced:
            raise self._mismatch(
                f"its batch gives {shape.describe()}",
                f"the leader's gives {announced.describe()}",
                fix="split and loss_weight must give the same on every worker: let them look at "
                "nothing but the batch.",
            )
        mine = torch.default_generator.get_state().numpy().tobytes()
        if ticket.generator and mine != ticket.generator[: len(mine)]:
            raise self._mismatch(
                "its random generator is in another state", "the batches are equal"
            )
        return division

    def _open_cursor(self) -> _Cursor:
        """Start reading; where earlier batches of this epoch were not read here, skip them."""
        now = torch.default_generator.get_state()
        torch.default_generator.set_state(self._epoch_state)
        self._cursor = self._new_cursor()
        for _ in range(self._step - self._start.step):
            self._cursor.draw()
        if self._step > 0:
            torch.default_generator.set_state(now)
        return self._cursor

    def _end(self, ticket: Ticket) -> None:
        if self._next is not None:
            raise self._mismatch("its loader has a further batch", "the leader's has ended")
        self._take_over_generator(ticket)

    def _mismatch(self, mine: str, leaders: str, *, fix: str = _FIX) -> LoaderMismatchError:
        return LoaderMismatchError(
            f"the loaders of workers {self._leader} and {self._job.rank} disagree at "
            f"{self._mode.value} step {self._step} of the epoch\n"
            f"  worker {self._job.rank}: {mine}\n  worker {self._leader}: {leaders}\n"
            f"  Fix: {fix}"
        )
