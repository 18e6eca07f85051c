"""Which worker leads a step: it reads the batch first, and tells the others what it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from graphsplit.batches.microbatches import BatchDescription, Divider, Division
from graphsplit.batches.signature import fingerprint
from graphsplit.capture.graph import Mode
from graphsplit.checkpoint.position import EpochStart
from graphsplit.errors import LoaderMismatchError
from graphsplit.feeding.feed import Feed
from graphsplit.feeding.own_rows import OwnRows
from graphsplit.feeding.tickets import Ticket, Tickets, other_generator, position_of, torch_state
from graphsplit.job.job import Job
from graphsplit.marks.annotations import module_annotation
from graphsplit.placement.resolve import UnplacedRule
from graphsplit.planning.modes import begin_training
from graphsplit.planning.planner import Planner
from graphsplit.planning.ready_plan import ReadyPlan
from graphsplit.planning.step_plan import PlannedStep, TrainingProgress, plan_step
from graphsplit.planning.task import Task


class Leading:
    """Has every step's batch agreed on: one that a loader gives, or one that all were given.

    Args:
        task: What is trained.
        job: The job.
        planner: Makes the plans.
        progress: How far training is.
    """

    def __init__(self, task: Task, job: Job, planner: Planner, progress: TrainingProgress) -> None:
        self._task = task
        self._job = job
        self._planner = planner
        self._progress = progress
        self._has_trained = False
        self.start_over()

    def start_over(self) -> None:
        """The job has new channels: tell signatures again."""
        self._tickets = Tickets(self._job)
        self._last: tuple[tuple[Any, ...], ReadyPlan | None] = (), None
        self._recording = 0
        self._rows: dict[Mode, OwnRows] = {}

    @property
    def reading(self) -> str:
        """The rows that each worker reads in training, in words; empty: undecided."""
        return self._rows[Mode.TRAIN].line if Mode.TRAIN in self._rows else ""

    def _rows_of(self, mode: Mode, loader: Any) -> OwnRows:
        """The reading of a loader: decided once for all its epochs."""
        if mode not in self._rows or self._rows[mode].loader is not loader:
            is_training = mode is Mode.TRAIN
            self._rows[mode] = OwnRows(
                loader,
                self._task.divider if is_training else Divider(has_targets=mode is Mode.EVAL),
                self._job.rank,
                has_loss_fn=self._task.loss_fn is not None,
                why="" if self._task.reading == "rows" else 'the Model has reading="batches"',
                is_grouped=not is_training,
            )
        return self._rows[mode]

    def feed(
        self,
        mode: Mode,
        loader: Iterable[Any],
        start: EpochStart,
        is_stopped: Callable[[], bool] = lambda: False,
        *,
        one_by_one: bool = False,
    ) -> Feed:
        """The steps of an epoch, each with its batch where that is needed.

        Args:
            mode: Train, eval or predict.
            loader: The loader.
            start: Where the epoch goes on.
            is_stopped: Whether it ends after the step that is done; the same on all workers.
            one_by_one: Whether each step takes one batch, whatever replicas there are.
        """
        is_training = mode is Mode.TRAIN
        if is_training:
            self._begin_training()
            self._progress.begin()
        if not self._planner.owners:  # the data set may write before there is a plan
            self._planner.writes.look(compares_hooks=False)
        rows = self._rows_of(mode, loader)
        reading = self._job.readers.reading(loader, self._job.num_workers)
        return Feed(
            self._job,
            self._planner,
            self._tickets,
            mode=mode,
            leader=self._leader(mode, reading.ranks),
            loader=loader,
            reading=reading,
            start=start,
            is_stopped=is_stopped,
            rows=rows,
            note=self._note if is_training else str,
            progress=self._progress if is_training else None,
            one_by_one=one_by_one,
        )

    def given(
        self, mode: Mode, division: Division, step: int, *, scale: float | None = None
    ) -> PlannedStep:
        """The step for a batch that all workers were given.

        Args:
            mode: Train or predict.
            division: The batch.
            step: Number of the step.
            scale: What the loss is multiplied by, where the step only adds to gradients.

        Raises:
            LoaderMismatchError: They were given different ones.
        """
        batch, is_training = division.shape(), mode is Mode.TRAIN
        like = mode, batch, scale is None
        if is_training and not self._has_trained:
            self._begin_training()
        if self._job.num_workers > 1:
            checksum = fingerprint(division.arguments)
            if scale is not None:
                checksum = fingerprint(((checksum, scale), {}))
            self._compare_with_leader(mode, checksum, batch, step, self._like_last(like))
        if is_training and self._progress.seed is None:
            self._progress.begin()
        planned = plan_step(
            self._planner,
            mode,
            batch,
            note=self._note if is_training else str,
            progress=self._progress if is_training else None,
            only_adds=scale is not None,
        )
        self._last = like, planned.plans[0]
        return planned

    def _begin_training(self) -> None:
        """As an epoch of a plain loop begins, before anybody looks at the Python around it."""
        self._has_trained = True
        begin_training(self._task.network)

    def _like_last(self, like: tuple[Any, ...]) -> ReadyPlan | None:
        """The plan that the next step runs, if it is like the last one and no value has changed."""
        looked, planned = self._last
        return planned if looked == like and not self._planner.lowers_again else None

    def _note(self) -> str:
        """The text that workers must agree on besides plans, once training has begun."""
        return self._progress.agreement(self._task.divider)

    def _leader(self, mode: Mode, readers: frozenset[int]) -> int:
        """The earliest consumer, if it has read all that was read from the loader so far."""
        return next((r for r in self._consumers(mode) if r in readers), min(readers))

    def _consumers(self, mode: Mode) -> tuple[int, ...]:
        """Workers that probably consume the next batch, the earliest in the pipeline first."""
        latest = self._planner.latest(mode) or self._planner.latest(Mode.TRAIN)
        if latest is not None:
            return latest.consumers
        task = self._task
        return (likely_first_reader(task.network, task.unplaced, self._job.num_workers),)

    def _compare_with_leader(
        self,
        mode: Mode,
        checksum: int,
        batch: BatchDescription,
        step: int,
        expected: ReadyPlan | None,
    ) -> None:
        leader = self._consumers(mode)[0]
        if self._job.rank == leader:
            python = self._planner.python_step(mode, batch.first)
            is_same = expected is not None and python.recording == self._recording
            self._recording = python.recording
            # As in an epoch: who waits for a value anyway is woken by it.
            quiet = expected.woken_by_values if expected is not None and is_same else ()
            drawn = position_of(torch_state())
            self._tickets.send(Ticket(batch, checksum, python=python, drawn=drawn), quiet=quiet)
            return
        if expected is not None:
            expected.runner.expect_first_value()
        ahead = self._planner.ahead(mode, batch.first)
        ticket = self._tickets.receive(leader)
        has_drawn = ticket.drawn != position_of(torch_state())
        if (ticket.shape, ticket.checksum) != (batch, checksum):
            why = ", and one of them has drawn random numbers alone" if has_drawn else ""
            raise LoaderMismatchError(
                f"workers {leader} and {self._job.rank} were given different batches at "
                f"{mode.step} {step + 1}{why}\n"
                f"  Fix: pass the same tensors (and scale) on every worker, make no call on one "
                f"worker alone, and let split and loss_weight depend on nothing else."
            )
        if has_drawn:
            raise other_generator((leader, self._job.rank), f"{mode.step} {step + 1}")
        self._planner.check_python_step(mode, batch.first, (ticket.python, leader), ahead)


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
