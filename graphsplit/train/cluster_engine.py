"""One worker's share of a Model's steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphsplit.batches import records
from graphsplit.batches.batch import Arguments, fingerprint, leaves
from graphsplit.batches.microbatches import BatchDescription, Divider, Division
from graphsplit.capture.graph import Mode
from graphsplit.checkpoint.gather import StateGatherer
from graphsplit.checkpoint.group import ControlGroup, Group
from graphsplit.checkpoint.position import FROM_THE_START, EpochStart
from graphsplit.errors import ConfigurationError, LoaderMismatchError
from graphsplit.feeding.feed import Feed, likely_first_reader
from graphsplit.feeding.shared_inputs import share_written
from graphsplit.feeding.tickets import Tickets
from graphsplit.job.job import Job
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.partition.plan import PartitionPlan
from graphsplit.planning.modes import ensure_training, evaluating
from graphsplit.planning.planner import Planner, ReadyPlan
from graphsplit.planning.step_plan import Phase, PlannedStep, Progress, plan_step
from graphsplit.planning.task import Task
from graphsplit.profiling.profile import Profiler
from graphsplit.profiling.trace import Trace
from graphsplit.tensor_meta import TensorMeta
from graphsplit.train.engine import Engine, update_metrics
from graphsplit.train.metrics import Metric
from graphsplit.train.outputs import unflatten_outputs
from graphsplit.transport.hub import Router


class ClusterEngine(Engine):
    """Runs this worker's programs; every method is called by all workers in the same order."""

    def __init__(self, task: Task, job: Job) -> None:
        self._task = task
        self._job = job
        records.trust_network(task.network, task.loss_fn)
        self.planner = Planner(task, job)
        self._tickets = Tickets(job)
        self._step = 0
        self.progress = Progress(accumulate=task.accumulate)
        self._waiting: dict[str, Callable[[], None]] = {}
        self.planner.on_settled = self._settle
        self.on_first_settled: Callable[[], None] | None = None
        self.profiler = Profiler(job, self.group)
        self._trace = Trace(job, self.profiler)

    def train_epoch(
        self, loader: Iterable[Any], start: EpochStart = FROM_THE_START
    ) -> Iterator[torch.Tensor]:
        """Train on every batch; yields each true loss, on every worker."""
        ensure_training(self._task.network)
        feed = self._feed(Mode.TRAIN, loader, start)
        for planned, division, meanwhile in feed:
            yield self._train(planned, division, feed.holders(planned), meanwhile)

    def train_step(self, division: Division) -> torch.Tensor:
        """Train on one batch that all workers hold."""
        ensure_training(self._task.network)
        return self._train(self._announce(Mode.TRAIN, division), division, self._everybody)

    @property
    def _everybody(self) -> range:
        return range(self._job.num_workers)

    def _train(
        self,
        planned: PlannedStep,
        division: Division | None,
        holders: Collection[int],
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for phase, values in self._run(planned, division, holders, meanwhile):
            loss = phase.planned.plan.placed.graph.loss_node
            assert loss is not None
            losses += [of_microbatch[loss] for of_microbatch in values]
        self.progress.num_steps += 1
        self._use_measurements(planned)
        return planned.loss(losses)

    def _use_measurements(self, planned: PlannedStep) -> None:
        """Once a plan that waits for its costs has been timed often enough, use them."""
        for plan in planned.plans:
            if plan.wants_costs and self.profiler.has_enough(plan):
                costs = self.profiler.collect(plan).costs
                self.profiler.forget(plan)
                self.planner.use_costs(plan, costs)
        self._trace.after_step(planned)

    def eval_epoch(self, loader: Iterable[Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Evaluate; metrics are computed where the outputs are, their values known everywhere."""
        for metric in metrics.values():
            metric.reset()
        home = 0
        feed = self._feed(Mode.EVAL, loader)
        with evaluating(self._task.network):
            for planned, division, meanwhile in feed:
                home = planned.first.plan.home
                values = self._run_whole(planned, division, feed.holders(planned), meanwhile)
                if self._job.rank == home:
                    assert division is not None
                    self._update_metrics(planned.first, division.arguments, values, metrics)
        return self._share_metrics(metrics, home)

    def predict(self, arguments: Arguments) -> Any:
        """The network's outputs, in its own structure, on every worker."""
        division = Division(arguments, (arguments,))
        with evaluating(self._task.network):
            step = self._announce(Mode.PREDICT, division)
            values = self._run_whole(step, division, self._everybody)
        planned = step.first
        return unflatten_outputs(
            planned.plan.placed.graph, values, leaves(arguments), planned.numbers
        )

    def group(self) -> Group:
        """All workers of the job."""
        return ControlGroup(self._job.control, self._show_progress)

    def _show_progress(self) -> None:
        self._job.member.position.progress += 1

    def owners(self) -> Mapping[str, int]:
        """The owners that are fixed: those of all tensors once this Model has a plan."""
        return self.planner.known_owners()

    def when_settled(self, what: str, action: Callable[[], None]) -> None:
        """Do it as soon as there is a plan."""
        if self.planner.owners:
            action()
        else:
            self._waiting[what] = action

    def settle_now(self) -> None:
        """Do what waits for a plan without one."""
        waiting, self._waiting = self._waiting, {}
        for action in waiting.values():
            action()

    def _settle(self) -> None:
        """Owners are fixed: forget the optimizer state of others, and load what waits."""
        for optimizer in self._task.optimizers:
            for key in list(optimizer.state):
                if isinstance(key, torch.Tensor) and is_elsewhere(key):
                    del optimizer.state[key]
        self.settle_now()
        first, self.on_first_settled = self.on_first_settled, None
        if first is not None:
            first()

    def start_over(self) -> None:
        """The job has new channels: make plans anew, and tell signatures again."""
        self.profiler.forget()  # what was measured of plans that are gone
        self._trace.start_over()
        self.planner.start_over()
        self._job.readers.forget()
        self._tickets = Tickets(self._job)

    def counters(self) -> dict[str, Any]:
        """What steps go on from, besides the Model's state."""
        return {"step": self._step, "norm": self.planner.updater.last_norm}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Go on from what ``counters`` gave."""
        self._step = int(counters["step"])
        self.planner.updater.last_norm = counters["norm"]

    def state_dict(self) -> dict[str, Any]:
        """Collective: gather the network's full state on every worker."""
        return self._gatherer().gather_network()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what this worker owns out of a full state."""
        self._gatherer().load_network(state)

    def optimizer_state_dicts(self) -> list[dict[str, Any]]:
        """Collective: gather the optimizers' full states on every worker."""
        gatherer = self._gatherer()
        return [gatherer.gather_optimizer(optimizer) for optimizer in self._task.optimizers]

    def load_optimizer_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load what this worker owns out of the optimizers' full states."""
        gatherer = self._gatherer()
        for optimizer, state in zip(self._task.optimizers, states, strict=True):
            gatherer.load_optimizer(optimizer, state)

    @property
    def last_gradient_norm(self) -> torch.Tensor | None:
        """The norm of all workers' gradients at the last clipping."""
        return self.planner.updater.last_norm

    def renew(self) -> None:
        """The task has another loss, or other optimizers."""
        records.trust_network(self._task.network, self._task.loss_fn)
        self.planner.renew()

    def call_on_gradients(self, function: Callable[[], None] | None) -> None:
        """Note what to call when the owned gradients of a step are complete."""
        self.planner.updater.on_gradients = function

    @property
    def stops_here(self) -> bool:
        """Whether the step that is done was the last one: the job was asked to end."""
        return self._job.is_stopping

    @property
    def is_inside_call(self) -> bool:
        """Whether a call of a Model is under way."""
        return self._job.depth > 0

    def guard(self) -> AbstractContextManager[None]:
        """Report errors raised inside, so that all workers end."""
        _refuse_autocast_around()
        return self._job.reporting()

    def routes(self, plan: PartitionPlan) -> dict[tuple[int, int], tuple[str, str]]:
        """The transport between each pair of workers that a plan connects, and why."""
        transport = self._job.transport
        if not isinstance(transport, Router):
            return {}
        pairs = {(min(e.source, e.destination), max(e.source, e.destination)) for e in plan.edges}
        return {pair: transport.route(*pair) for pair in pairs}

    def step_times(self) -> list[str]:
        """What is known of the time of a step, in words; nothing before it was measured."""
        latest = self.profiler.latest
        return latest.step_times() if latest is not None else []

    def _gatherer(self) -> StateGatherer:
        self.settle_now()
        return StateGatherer(self._task, self._job, self.owners())

    def _feed(self, mode: Mode, loader: Iterable[Any], start: EpochStart = FROM_THE_START) -> Feed:
        is_training = mode is Mode.TRAIN
        leader = self._leader(mode, loader)
        if is_training:
            self.loader_rank = leader
        return Feed(
            self._job,
            self.planner,
            self._tickets,
            mode=mode,
            leader=leader,
            loader=loader,
            start=start,
            divider=self._task.divider if is_training else Divider(),
            has_loss_fn=self._has_loss_fn,
            note=self._note() if is_training else "",
            progress=self.progress if is_training else None,
            readers=self._job.readers,
        )

    @property
    def _has_loss_fn(self) -> bool:
        return self._task.loss_fn is not None

    def _note(self) -> str:
        """What workers must agree on besides plans, once training has begun."""
        self.progress.begin()
        return self.progress.agreement(self._task.divider)

    def _leader(self, mode: Mode, loader: Iterable[Any]) -> int:
        """The earliest consumer, if it has read all that was read from the loader so far."""
        readers = self._job.readers.reading(loader, self._job.num_workers).ranks
        return next((r for r in self._consumers(mode) if r in readers), min(readers))

    def _consumers(self, mode: Mode) -> tuple[int, ...]:
        """Workers that probably consume the next batch, the earliest in the pipeline first."""
        latest = self.planner.latest(mode) or self.planner.latest(Mode.TRAIN)
        if latest is not None:
            return latest.consumers
        task = self._task
        return (likely_first_reader(task.network, task.unplaced, self._job.num_workers),)

    def _announce(self, mode: Mode, division: Division) -> PlannedStep:
        """Check that all workers were given the same batch."""
        shape = division.shape()
        note = self._note() if mode is Mode.TRAIN else ""
        progress = self.progress if mode is Mode.TRAIN else None
        if self._job.num_workers > 1:
            self._compare_with_leader(mode, division, shape)
        return plan_step(self.planner, mode, shape, note=note, progress=progress)

    def _compare_with_leader(self, mode: Mode, division: Division, shape: BatchDescription) -> None:
        leader = self._consumers(mode)[0]
        checksum = fingerprint(division.arguments)
        if self._job.rank == leader:
            python = self.planner.python_step(mode, shape.first)
            self._tickets.send(shape, generator=None, checksum=checksum, python=python)
            return
        ticket = self._tickets.receive(leader)
        if (ticket.shape, ticket.checksum) != (shape, checksum):
            raise LoaderMismatchError(
                f"workers {leader} and {self._job.rank} were given different batches at "
                f"{mode.value} step {self._step}\n"
                f"  Fix: pass the same tensors on every worker, and let split and loss_weight "
                f"depend on nothing else."
            )
        self.planner.check_python_step(mode, shape.first, ticket.python, leader)

    def _run(
        self,
        planned: PlannedStep,
        division: Division | None,
        holders: Collection[int],
        meanwhile: Callable[[], None] | None,
    ) -> Iterator[tuple[Phase, list[dict[int, torch.Tensor]]]]:
        """Run a step; gives each of its phases and, for each microbatch, the values it left.

        Args:
            planned: The step.
            division: The batch; None where it is not here.
            holders: The workers that have it.
            meanwhile: What to do while the step waits for its first value.
        """
        meter = self._job.meter
        if meter is None:
            return self._run_phases(planned, division, holders, meanwhile)
        return meter.timed(
            planned.first.plan.placed.graph.mode.value,
            self._run_phases(planned, division, holders, meanwhile),
        )

    def _run_phases(
        self,
        planned: PlannedStep,
        division: Division | None,
        holders: Collection[int],
        meanwhile: Callable[[], None] | None,
    ) -> Iterator[tuple[Phase, list[dict[int, torch.Tensor]]]]:
        step, self._step = self._step, self._step + 1
        self._job.has_stepped = True
        if self._job.num_workers == 1:
            self._job.is_stopping |= self._job.asked_to_stop  # where there are no tickets
        for phase in planned.phases(division):
            runner, numbers = phase.planned.runner, phase.planned.numbers
            microbatches = phase.microbatches(self.progress)
            is_watched = self.profiler.watches(phase.planned)
            if is_watched:
                self.profiler.begin(phase.planned, step)
            with self.witness.watch(runner):
                state = runner.run(
                    step,
                    phase.inputs,
                    numbers=numbers,
                    microbatches=microbatches,
                    meanwhile=meanwhile,
                )
            if is_watched:
                self.profiler.end(phase.planned)
            meanwhile = None
            if phase.planned.written_inputs and division is not None:
                for inputs in phase.inputs:
                    share_written(self._job.control, phase.planned, inputs, holders)
            yield phase, state.values

    def _run_whole(
        self,
        planned: PlannedStep,
        division: Division | None,
        holders: Collection[int],
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, torch.Tensor]:
        ((_, (values,)),) = self._run(planned, division, holders, meanwhile)
        return values

    def _update_metrics(
        self,
        planned: ReadyPlan,
        arguments: Arguments,
        values: dict[int, torch.Tensor],
        metrics: Mapping[str, Metric],
    ) -> None:
        found = unflatten_outputs(
            planned.plan.placed.graph, values, leaves(arguments), planned.numbers
        )
        loss, outputs = found if self._task.with_loss else (None, found)
        with torch.no_grad():
            update_metrics(metrics, arguments, outputs, loss, has_loss_fn=self._has_loss_fn)

    def _share_metrics(self, metrics: Mapping[str, Metric], home: int) -> dict[str, float]:
        computed = None
        if self._job.rank == home:
            found = [float(metric.compute()) for metric in metrics.values()]
            computed = torch.tensor(found, dtype=torch.float64)
        meta = TensorMeta(torch.float64, (len(metrics),), (1,))
        values = self._job.control.broadcast(computed, meta, source=home)
        return dict(zip(metrics, values.tolist(), strict=True))


def _refuse_autocast_around() -> None:
    """Around a whole step it would reach backward and the optimizer, on some operations only."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise ConfigurationError(
                "torch.autocast is on around a call of the Model; it would reach beyond network "
                "and loss\n"
                "  Fix: Model(..., autocast=torch.bfloat16), or use torch.autocast inside forward."
            )
