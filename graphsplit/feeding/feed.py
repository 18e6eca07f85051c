"""Batches for workers: who reads them, and what the others learn of them.

Only workers whose program consumes an input read their loader; the others decode nothing. Before
each step the *leader*, the reader that stands earliest in the pipeline, tells all others by a
ticket what the batch looks like, and the states of PyTorch's, Python's and NumPy's generators if
drawing the batch changed them::

    leader     draw batch ── ticket ───────────────► run step
    reader     draw batch ── receive ticket ───────► run step
    others      receive ticket, take over generators ► run step

Checksums cost time, so the leader computes them while it waits for values, and readers when they
draw, while others still compute. A ticket carries that of the batch before: a difference ends the
job one step late, and names the right one.

Reading may change what a loader is made of, and only readers see that. So a consumer that has
missed an epoch of a loader is sent its batches by the leader, which has missed none.

Before the first plan nobody knows who reads. The worker of the first placed module leads then; if
it turns out to consume nothing, it has read one epoch for the others, and the next epoch's leader
is a consumer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from operator import is_
from typing import Any, NoReturn

import torch

from graphsplit.batches import records
from graphsplit.batches.microbatches import BatchDescription, Division
from graphsplit.batches.signature import Signature
from graphsplit.capture.graph import Mode
from graphsplit.checkpoint.generators import is_same
from graphsplit.checkpoint.position import FROM_THE_START, EpochStart
from graphsplit.errors import LoaderMismatchError
from graphsplit.feeding.data_watch import FIX, OTHER_BATCH
from graphsplit.feeding.groups import Groups, drawn, num_batches
from graphsplit.feeding.left_by_loaders import LeftByLoader, left_stays, read_before
from graphsplit.feeding.loader_memory import loader_memory, share_loader_memory, since
from graphsplit.feeding.own_rows import OwnRows, checksum_of, fit, is_all_read
from graphsplit.feeding.sent_batches import receive_batch, send_batch
from graphsplit.feeding.tickets import Ticket, Tickets, other_generator, position_of, torch_state
from graphsplit.job.job import Job
from graphsplit.job.process_generators import GeneratorWatch, ProcessStates
from graphsplit.job.readers import Reading
from graphsplit.planning.compared.announced import Note
from graphsplit.planning.planner import Planner
from graphsplit.planning.ready_plan import ReadyPlan
from graphsplit.planning.step_plan import Outlook, PlannedStep, TrainingProgress, outlook, plan_step
from graphsplit.settings import GO_ON, WAIT_REJOIN
from graphsplit.tensor_meta import TensorMeta

_FIX = (
    "give all workers the same data, order and seed; draw random numbers on every worker, after "
    "gs.init() or torch.manual_seed()."
)

FeedItem = tuple[PlannedStep, Division | None, Callable[[], None] | None]


class Feed:
    """The batches of one epoch, as one worker sees them.

    Yields, for each step, the plan to run, the batch, and what to do while the step waits for its
    first value. The batch is None where this worker does not consume it.

    Raises while iterating:
        LoaderMismatchError: This worker's loader disagrees with the leader's.

    Attributes:
        holders: The workers that have the batch: they read it, or need it and are sent it.
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
        reading: Reading,
        rows: OwnRows,
        note: Note = str,
        start: EpochStart = FROM_THE_START,
        progress: TrainingProgress | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        one_by_one: bool = False,
    ) -> None:
        self._job = job
        self._planner = planner
        self._tickets = tickets
        self._mode = mode
        self.leader, self._is_leading = leader, job.rank == leader
        self._readers = job.readers
        self._reading = reading
        self._have_read, self.holders = {leader}, frozenset((leader,))
        self._asked: tuple[tuple[ReadyPlan, ...], list[int]] = ((), [])  # by _not_reading
        self._has_written = False  # steps have modified batches
        records.trust_loader(loader)
        self._loader = loader
        self._rows = rows
        self._note = note
        self._progress = progress
        self._is_stopped = is_stopped
        self._again = progress if job.recovery_policy in (WAIT_REJOIN, GO_ON) else None
        self._start = start
        start.go_on(loader)
        self._known, own = torch_state(), torch.default_generator.get_state()
        self._epoch_state = own if start.generator is None else start.generator
        self._epoch_process = ProcessStates.now()
        self._cursor: Iterator[Division] | None = None
        self._is_grouped = mode is not Mode.TRAIN and job.num_workers > 1 and not one_by_one
        self._together: int | None = None  # batches of the step that is announced
        self._step, self._num_batches = start.step, 0
        self._checksum: int | None = None  # of the batch drawn last
        self._next: Division | None = None  # drawn, but not yet announced
        self._next_checksum: int | None = None
        self._first: Signature | None = None  # of the batch announced last
        self._left = LeftByLoader(planner, mode, loader)
        if self._left.is_for_all:
            rows.refuse("the loader leads to the loss, an optimizer or what hooks read")

    def __iter__(self) -> Iterator[FeedItem]:
        try:
            if self._job.num_workers == 1:
                yield from self._alone()
                return
            with self._readers.being_read(self._reading, self.leader):
                for fed in self._lead() if self._is_leading else self._follow():
                    yield fed
                    self._job.member.position.calls.pass_milestone()
        finally:
            # Now, whoever still holds the feed: a loader's processes do not hear of its end from
            # an iterator that lies in a cycle, and are then waited for, 5 s each.
            self._cursor = self._next = None

    def _alone(self) -> Iterator[FeedItem]:
        """There is nobody to tell, and nothing to compare."""
        cursor = self._open_cursor()
        while not self._is_stopped() and (division := next(cursor, None)) is not None:
            shape = division.shape()
            self._first = shape.first
            yield self._planned(shape), division, None
            self._step += 1

    def _outlook(self, signature: Signature) -> Outlook:
        found = outlook(self._planner, self._mode, signature)
        if self._together is None or self._together >= found.together:
            return found
        return replace(found, together=self._together)  # a plan that the leader did not have yet

    def _pass(self, shape: BatchDescription) -> None:
        """A step is over, and what the script does after it."""
        self._known = torch_state()
        self._step += 1
        self._num_batches += num_batches(shape) if self._mode is not Mode.TRAIN else 1
        self._together = None

    def _lead(self) -> Iterator[FeedItem]:
        watch, memory = GeneratorWatch(), loader_memory(self._loader)
        watch.look()
        self._open_cursor()
        planned: PlannedStep | None = None
        looked: tuple[Any, ...] = ()
        while True:
            if is_known := self._step > 0:
                watch.look()
            division = None if self._is_stopped() else self._draw()
            process, state = watch.look(), torch_state()
            news = b"" if is_known and state == self._known else state
            previous = self._checksum or 0
            if self._again is not None:
                self._compare_again(previous)
            if division is None:
                self._end_leading(news, process, previous, memory)
                return
            division = self._rows.decide(division)
            shape = division.shape()
            self._first = shape.first
            # Workers that wait for a value anyway are woken by it; waking them twice costs more
            # than a hop, when there are fewer cores than workers.
            python = self._planner.python_step(self._mode, shape.first)
            looks = shape.whole, shape.parts, python.recording
            if planned is None or looked != looks or self._planner.lowers_again:
                quiet: Container[int] = ()
            else:
                quiet = planned.first.woken_by_values
            ticket = Ticket(
                shape,
                previous_checksum=previous,
                generator=news,
                process=process,
                python=python,
                turns=self._rows.turns,
                drawn=position_of(self._known),
            )
            self._tickets.send(ticket, quiet=quiet)
            planned, looked = self._planned(shape), looks
            waiting = self._not_reading(planned)
            division = self._rows.enough(division, planned, shape, is_sent=bool(waiting))
            if waiting:
                self._rows.stop(f"worker {waiting[0]} has not read all that was read of the loader")
            for consumer in waiting:
                send_batch(self._job.control, division, destination=consumer)
            self._rows.note(division, shape, planned)
            yield planned, division, self._checking(division, planned)
            self._pass(shape)

    def _end_leading(
        self, generator: bytes, process: ProcessStates, checksum: int, before: Any
    ) -> None:
        """Tell that the epoch is over, and what the loader remembers of it."""
        now = loader_memory(self._loader)
        has_changed = not is_same(before, now)
        ticket = Ticket(
            None,
            previous_checksum=checksum,
            generator=generator,
            process=process,
            loader_changed=has_changed,
            python=self._left.told(None if self._is_stopped() else self._first),
            drawn=position_of(self._known),
        )
        self._tickets.send(ticket)
        if has_changed:
            self._share_memory(since(before, now))
        self._readers.note(self._reading, self._have_read, has_written=self._has_written)

    def _share_memory(self, memory: Any = None) -> None:
        control, takes = self._job.control, self._cursor is None
        share_loader_memory(control, self._loader, memory, source=self.leader, takes=takes)

    def _planned(self, shape: BatchDescription) -> PlannedStep:
        before, self._planner.catch_up = self._planner.catch_up, self._catch_up
        try:
            return plan_step(
                self._planner, self._mode, shape, note=self._note, progress=self._progress
            )
        finally:
            self._planner.catch_up = before

    def _catch_up(self, text: str | None) -> bool:
        """Compare a new graph with the leader's; if it is another, read what was not read here.

        Args:
            text: The graph that was recorded; None where that failed.

        Returns:
            Whether there was something to read, so that the step may be another one now.
        """
        digest = hashlib.sha256((text or "").encode(errors="replace")).digest()
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        meta = TensorMeta.of(mine)
        leaders = self._job.control.broadcast(mine, meta, source=self.leader)
        return not (self._is_leading or torch.equal(mine, leaders)) and self._draw_missed()

    def _draw_missed(self) -> bool:
        """Read up to the batch of the coming step, if this worker has not; says whether it has."""
        if self._cursor is not None:
            return False
        self._next = self._draw()
        if self._next is not None:
            self._next_checksum = checksum_of(self._next)
        return True

    def _new_cursor(self) -> Iterator[Division]:
        is_alone = not self._left.is_for_all or self._job.script.gives_again
        is_alone &= self._job.num_workers > 1
        calls = self._job.member.position.calls
        with (
            read_before(self._planner, self._start),
            calls.reading(is_alone=is_alone or self._start.step > 0),
        ):
            divisions = self._rows.divisions(self._start, leads=self._is_leading)
        divisions = drawn(divisions, self._job, is_alone=is_alone)
        groups = Groups(divisions, self._outlook)
        with self._planner.writes.read_again(), left_stays(self._planner, self._mode):
            for _ in range(self._num_batches):
                groups.skip()
        return groups if self._is_grouped else divisions

    def _checking(self, division: Division, planned: PlannedStep) -> Callable[[], None] | None:
        """Computes the checksum while the step waits; done now if the step writes."""

        def check() -> None:
            self._checksum = checksum_of(division)

        if not planned.writes_inputs:
            return check
        check()
        return None

    @property
    def look(self) -> Signature:
        """The signature of each batch that the step under way evaluates."""
        assert self._first is not None
        return self._first

    def target_senders(self, planned: PlannedStep) -> tuple[int | None, ...]:
        """See ``OwnRows``; none where the worker of the metrics is sent batches."""
        if planned.first.plan.home not in self._reading.ranks:
            return ()
        return self._rows.target_senders(planned, self._num_batches)

    def _follow(self) -> Iterator[FeedItem]:
        if self._left.is_for_all and not self._is_stopped():
            self._draw_missed()
        while True:
            # Here it delays nobody: all wait for the worker that is last, or for the leader.
            ahead = self._planner.ahead(self._mode, self._first)
            ticket = self._tickets.receive(self.leader)
            self._compare_previous(ticket)
            if ticket.shape is None:
                self._end(ticket)
                return
            self._rows.turns, first = ticket.turns, ticket.shape.first
            if self._is_grouped and self._next is None:
                self._together = self._outlook(first).together
            self._planner.check_python_step(
                *(self._mode, first),
                leaders=(ticket.python, self.leader),
                ahead=ahead,
                catch_up=self._draw_missed,  # the leader's data set may have changed a value
            )
            self._first = first
            planned = self._planned(ticket.shape)
            waiting = self._not_reading(planned)
            if self._job.rank in waiting:
                self._take_over_generators(ticket)
                sent = receive_batch(self._job.control, ticket.shape, source=self.leader)
                yield planned, sent, None
            elif self._job.rank in self.holders:
                division = self._drawn_for(ticket, ticket.shape)
                division = self._rows.enough(division, planned, ticket.shape, is_sent=False)
                self._rows.note(division, ticket.shape, planned)
                self._checksum, self._next_checksum = self._next_checksum, None
                is_checked = self._checksum is not None
                check = None if is_checked else self._checking(division, planned)
                yield planned, division, check
            else:
                self._next = self._next_checksum = None
                self._take_over_generators(ticket)
                yield planned, None, None
            self._pass(ticket.shape)
            if self._cursor is not None and not self._is_stopped():
                # In program order the next batch is drawn now, after the step and the callbacks:
                # while others still compute, and before its ticket.
                self._next = self._draw()
                if self._next is not None:
                    self._next_checksum = checksum_of(self._next)
            planned.first.runner.expect_first_value()

    def _not_reading(self, planned: PlannedStep) -> list[int]:
        """Those that need a part of a batch, and are sent it: they have missed what was read."""
        (known, waiting), before = self._asked, self._reading
        self._reading = self._readers.again(before)
        if self._reading is not before:
            self._stop_reading_where_some_was_missed()
        elif len(planned.plans) == len(known) and all(map(is_, planned.plans, known)):
            return waiting  # of the same readers
        self._has_written |= planned.writes_inputs
        consumers = planned.consumers
        self._have_read |= self._reading.ranks.intersection(consumers)
        targets = {planned.first.plan.home} if self._mode is Mode.EVAL else ()
        having = self._reading.ranks.union(planned.needed_by, targets).intersection(consumers)
        self.holders = having.union((self.leader,))
        self._asked = planned.plans, sorted(self.holders - self._reading.ranks)
        return self._asked[1]

    def _stop_reading_where_some_was_missed(self) -> None:
        """A callback has read a part of this loader; the leader of both has missed nothing."""
        self._have_read &= self._reading.ranks
        if self._job.rank not in self._reading.ranks:
            self._cursor = self._next = self._next_checksum = None

    def _compare_previous(self, ticket: Ticket) -> None:
        """Compare the batch before with the leader's, if drawn here, and where the generator is."""
        if self._again is not None:
            self._compare_again(ticket.previous_checksum)
        mine, self._checksum = self._checksum, None
        if mine is not None and mine != ticket.previous_checksum:
            self._step -= 1
            self._raise_other_values()
        if ticket.drawn != position_of(self._known):
            when = f"{self._mode.step} {self._step + 1} of the epoch"
            raise other_generator((self.leader, self._job.rank), when)

    def _compare_again(self, previous: int) -> None:
        """Compare the batch before with what it was, where its step is done again."""
        again = self._again
        if not previous or again is None or self._rows.turns or again.is_as_before(previous):
            return
        raise LoaderMismatchError(OTHER_BATCH.format(again.num_steps))

    def _raise_other_values(self) -> NoReturn:
        number = self._step if self._mode is Mode.TRAIN else self._num_batches - 1
        if not self._rows.is_by_rows(number):
            raise self._mismatch("its batch has other values", "shapes and dtypes are equal")
        raise self._mismatch(
            "its batch has other samples, or the row that all read has other values",
            "each replica reads its own rows of a batch, and one to compare",
            fix=f"{_FIX[:-1]}; if a sample depends on what was read before it, {FIX}",
        )

    def _take_over_generators(self, ticket: Ticket) -> None:
        ticket.process.put()
        if ticket.generator:
            state = torch.frombuffer(bytearray(ticket.generator), dtype=torch.uint8)
            torch.default_generator.set_state(state)

    def _draw(self) -> Division | None:
        cursor = self._cursor or self._open_cursor()
        if self._job.recovery_policy not in (WAIT_REJOIN, GO_ON):
            return next(cursor, None)
        with self._planner.writes.hooks.left_by_loader():
            return next(cursor, None)

    def _drawn_for(self, ticket: Ticket, announced: BatchDescription) -> Division:
        """This reader's batch, compared with the ticket."""
        division, self._next = self._next, None
        if self._cursor is None:
            with left_stays(self._planner, self._mode):
                division = self._draw()
            self._planner.writes.pass_over()
        if division is None:
            raise self._mismatch("its loader has ended", "the leader's has a batch")
        if isinstance(self._cursor, Groups):
            whole = self._cursor.first_of(division, num_batches(announced))
            if whole is not division:  # the leader has found that the others look otherwise
                division, self._next_checksum = whole, None
        if type(division) is not Division and not is_all_read(division):
            if not fit(division, announced):
                raise self._mismatch("its rows look otherwise", "all rows look alike", fix=FIX)
            self._compare_generators(ticket)
            return division
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
        self._compare_generators(ticket)
        return division

    def _compare_generators(self, ticket: Ticket) -> None:
        """This reader has drawn the batch: its generator must be where the leader's is.

        Python's and NumPy's need not: nobody seeds them for a script that does not, and modules
        that are imported on the way draw from them. If that changed a batch, its values tell.
        """
        if ticket.generator and torch_state() != ticket.generator:
            raise self._mismatch(
                "its random generator is in another state", "the batches are equal"
            )
        ticket.process.put()

    def _open_cursor(self) -> Iterator[Division]:
        """Start reading; where earlier batches of this epoch were not read here, skip them."""
        now, process = torch.default_generator.get_state(), ProcessStates.now()
        torch.default_generator.set_state(self._epoch_state)
        self._epoch_process.put()
        self._cursor = self._new_cursor()
        if self._step > 0:
            torch.default_generator.set_state(now)
            process.put()
        return self._cursor

    def _end(self, ticket: Ticket) -> None:
        ranks = self._job.rank, self.leader
        is_reading = self._cursor is not None or self._is_stopped()
        if not is_reading and self._left.was_missed(ticket.python, self._first, ranks):
            self._draw_missed()
            self._left.note_read(ticket.python)
        if self._next is not None and self._job.rank in self._reading.ranks:
            raise self._mismatch("its loader has a further batch", "the leader's has ended")
        self._take_over_generators(ticket)
        if ticket.loader_changed:
            self._share_memory()
        self._readers.note(self._reading, self._have_read, has_written=self._has_written)

    def _mismatch(self, mine: str, leaders: str, *, fix: str = _FIX) -> LoaderMismatchError:
        return LoaderMismatchError(
            f"the loaders of workers {self.leader} and {self._job.rank} disagree at "
            f"{self._mode.step} {self._step + 1} of the epoch\n"
            f"  worker {self._job.rank}: {mine}\n  worker {self.leader}: {leaders}\n"
            f"  Fix: {fix}"
        )
