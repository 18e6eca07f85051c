"""The steps of a Model in a cluster: plan once, then each step's batch, program and loss.

A call of the Model leads here. A step's batch is agreed on, by a ticket where a loader gives it
(``feeding``). It has a plan, or a few (``planning``), made when its signature is new. This worker's
programs run (``runtime``), and leave the loss, which every worker gets.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch

from graphsplit.batches.microbatches import Division
from graphsplit.batches.signature import Arguments, Signature, leaves
from graphsplit.capture.graph import Mode
from graphsplit.checkpoint.position import FROM_THE_START, EpochStart
from graphsplit.errors import ConfigurationError, PlacementError, RaisedInEagerError
from graphsplit.feeding.feed import Feed
from graphsplit.feeding.groups import refuse_change
from graphsplit.feeding.leading import Leading
from graphsplit.feeding.left_by_steps import (
    note_left,
    share_gradients_of_inputs,
    share_left,
    share_sizes,
    share_written,
)
from graphsplit.feeding.sent_batches import targets_home
from graphsplit.guards.changes import leave_all
from graphsplit.job.job import Job
from graphsplit.planning.compared.announced import topic_of_graph
from graphsplit.planning.modes import as_in, evaluating
from graphsplit.planning.planner import Planner
from graphsplit.planning.ready_plan import ReadyPlan
from graphsplit.planning.step_plan import (
    Outlook,
    PlannedStep,
    StepPhase,
    TrainingProgress,
    outlook,
)
from graphsplit.planning.task import Task, named_state
from graphsplit.profiling.profile import Profiler
from graphsplit.profiling.trace import Trace
from graphsplit.runtime.step_state import StepState
from graphsplit.settings import GO_ON, WAIT_REJOIN
from graphsplit.train.asking import answered
from graphsplit.train.cluster_state import ClusterState
from graphsplit.train.metrics import Metric, need_batches
from graphsplit.train.outputs import NOTHING, Beside, unflatten_outputs

Values = dict[int, torch.Tensor]  # by node of the graph: what a microbatch leaves on this worker


class ClusterEngine(ClusterState):
    """Runs this worker's programs; every method is called by all workers in the same order.

    Args:
        task: What is trained.
        job: The job.
        planner: Makes the plans; by default one that makes each by itself.
    """

    def __init__(self, task: Task, job: Job, planner: Planner | None = None) -> None:
        super().__init__(task, job, planner)
        self._step = 0
        self.progress = TrainingProgress(accumulate=task.accumulate)
        self._leading = Leading(task, job, self.planner, self.progress)
        self.profiler = Profiler(job, self.group)
        self._trace = Trace(job, self.profiler)

    @property
    def stops_here(self) -> bool:
        """Whether the step that is done was the last one: the job was asked to end."""
        return self._job.is_stopping

    @property
    def reading(self) -> str:
        """The rows that each worker reads in training, in words; empty: undecided."""
        return self._leading.reading

    @property
    def is_inside_call(self) -> bool:
        """Whether a call of a Model is under way."""
        return self._job.depth > 0

    def guard(self) -> AbstractContextManager[None]:
        """Report errors raised inside, so that all workers end."""
        return self._job.reporting()

    def pass_milestone(self) -> None:
        """See ``CallHistory``."""
        self._job.member.position.calls.pass_milestone()

    def call_on_gradients(self, function: Callable[[], None] | None) -> None:
        """Note what to call when the owned gradients of a step are complete."""
        self.planner.updater.on_gradients = function

    def train_epoch(
        self,
        loader: Iterable[Any],
        start: EpochStart = FROM_THE_START,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[torch.Tensor]:
        """Train on every batch; yields each true loss, on every worker."""
        feed = self._leading.feed(Mode.TRAIN, loader, start, is_stopped)
        self.loader_rank = feed.leader
        self.progress.adds_up = False
        for planned, division, meanwhile in feed:
            if division is not None and any(plan.asking_inputs for plan in planned.plans):
                _check_history(division)
            yield self._train(planned, division, feed.holders, meanwhile)

    def train_step(self, division: Division) -> torch.Tensor:
        """Train on one batch that all workers hold."""
        planned = self._given(division)
        self.progress.adds_up = False
        try:
            return self._train(planned, division, self._job.ranks)
        except RaisedInEagerError as error:
            self._let_go_on(error, Mode.TRAIN)
            raise

    def forward_backward(self, division: Division, scale: float) -> torch.Tensor:
        """Add the gradients of a batch that all workers hold."""
        updater = self.planner.updater
        planned = self._given(division, scale=scale)
        updater.loss_scale = scale
        try:
            loss = self._train(planned, division, self._job.ranks)
        except RaisedInEagerError as error:
            self._let_go_on(error, Mode.TRAIN)
            raise
        finally:
            updater.loss_scale = 1.0
        self.progress.adds_up = True
        return loss

    def _given(self, division: Division, **options: Any) -> PlannedStep:
        try:
            planned = self._leading.given(Mode.TRAIN, division, self._step, **options)
        except RaisedInEagerError as error:
            self._let_go_on(error, Mode.TRAIN)
            if not options and self.progress.opens:
                self.zero_gradients()
            if division.weights:  # as the plain loop, which had set it for its first microbatch
                torch.default_generator.set_state(self.progress.rng_state(0))
            raise
        asks = any(plan.asking_inputs for plan in planned.plans)
        if asks and self._job.recovery_policy in (WAIT_REJOIN, GO_ON):  # a step may run twice
            raise ConfigurationError(
                f"the batch asks for a gradient (requires_grad), and with GS_RECOVERY="
                f"{self._job.recovery_policy} a step may run twice, which would add it twice\n"
                f"  Fix: detach the batch, or use a loop of your own: gs.distribute and gs.loop."
            )
        return planned

    def _let_go_on(self, error: RaisedInEagerError, mode: Mode) -> None:
        """Find out that all workers have an error: then the script may catch it, and go on."""
        if error.is_first and not self._job.abort.recovers and self.witness is None:
            text = "".join(traceback.format_exception_only(error.error))
            self._job.member.agree(topic_of_graph(self._job.num_plans, mode), f"raises {text}")
            self._job.next_plan_number()  # no topic comes twice
            error.is_settled = True

    def _end_in_error(self, phase: StepPhase, step: int) -> NoReturn:
        """Run what comes before an error, which no gradients follow, and raise that."""
        plan, control = phase.planned, self._job.control
        ending = plan.ending
        assert ending is not None
        if phase.weights:
            torch.default_generator.set_state(self.progress.rng_state(phase.start))
        if plan.mode is Mode.TRAIN and not phase.start and not self.progress.keeps_gradients:
            self.zero_gradients()
        before = note_left(plan, self._job.rank) if plan.left_by_calls else {}
        plan.runner.run_forward(step, phase.inputs, plan.numbers)
        if plan.left_by_calls:
            share_left(control, plan, before)
        if plan.written_inputs:
            share_written(control, plan, phase.inputs[0], self._job.ranks)
        if not plan.runner.has_run:
            self._note_first_run(plan)
        leave_all(ending.changes, ())
        self.planner.writes.after_step()
        ending.error.error.__traceback__ = ending.trace
        raise ending.error.with_traceback(None)

    def zero_gradients(self) -> None:
        """Reset the gradients that are here."""
        self.planner.updater.zero_gradients()
        if self.planner.sums is not None:
            self.planner.sums.begin_step()
        self.progress.adds_up = False

    def step(self) -> None:
        """Clip and step what is here, by the gradients of all."""
        updater = self.planner.updater
        if updater.needs_reduction:
            group, own = self.group(), updater.partial()
            updater.clip(
                {
                    rank: group.share_value(own, source=rank, what="part of the gradients' norm")
                    for rank in range(group.num_workers)
                }
            )
        updater.step()

    def _train(
        self,
        planned: PlannedStep,
        division: Division | None,
        holders: Collection[int],
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        beside: list[Any] = []
        if self.planner.updater.on_gradients is not None:
            for plan in planned.plans:
                self.planner.updater.note_gradients(plan.plan.trained)
        for phase, values in self._timed(planned, division, holders, meanwhile):
            graph = phase.planned.plan.placed.graph
            loss = graph.loss_node
            assert loss is not None
            losses += [of_microbatch[loss] for of_microbatch in values]
            if len(graph.outputs) > 1:
                numbers = phase.planned.numbers
                pairs = zip(values, phase.inputs, strict=True)
                beside += [unflatten_outputs(graph, v, [*i], numbers)[1] for v, i in pairs]
        self.beside = Beside.of(beside, planned.weights) if beside else NOTHING
        self.progress.num_steps += 1
        self._use_measurements(planned)
        return planned.loss(losses)

    def eval_epoch(self, loader: Iterable[Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Evaluate; metrics are computed where the outputs are, their values known everywhere."""
        for metric in metrics.values():
            metric.reset()
        self.pass_milestone()
        home = num_steps = 0
        feed = self._evaluate(Mode.EVAL, loader)
        with evaluating(self._task.network):
            for planned, division, meanwhile in feed:
                ran = self._timed(planned, division, feed.holders, meanwhile)
                ((phase, values),) = ran
                before, home = home, phase.planned.plan.home
                if num_steps and planned.first.asks and home != before:
                    raise _other_home(before, home)
                num_steps += 1
                senders = feed.target_senders(planned) if metrics else ()
                has_loss_fn = self._task.loss_fn is not None
                batches = targets_home(
                    *(self._job.control, division, feed.look, senders, home),
                    has_loss_fn=has_loss_fn,
                )
                if self._job.rank == home:
                    self._show(phase.planned, feed.look, batches, values, metrics)
        need_batches(num_steps)
        return self._share_metrics(metrics, home)

    def _show(
        self,
        planned: ReadyPlan,
        signature: Signature,
        batches: Sequence[Arguments],
        values: Sequence[Values],
        metrics: Mapping[str, Metric],
    ) -> None:
        """Show metrics the batches of a step, in their order; all have one signature."""
        look = partial(self._outlook, Mode.EVAL, signature)
        before = look() if len(batches) > 1 else None
        for index, (batch, of_batch) in enumerate(zip(batches, values, strict=True)):
            if index and look() != before:
                refuse_change("a metric changes what forward reads between two batches")
            self._update_metrics(metrics, batch, _outputs(planned, batch, of_batch))

    def predict(self, arguments: Arguments) -> Any:
        """The network's outputs, in its own structure, on every worker."""
        division = Division(arguments, (arguments,))
        with evaluating(self._task.network):
            try:
                planned = self._leading.given(Mode.PREDICT, division, self._step)
                (outputs,) = self._predict(planned, division, self._job.ranks, None)
            except RaisedInEagerError as error:
                self._let_go_on(error, Mode.PREDICT)
                raise
        return outputs

    def predict_loader(self, loader: Iterable[Any]) -> list[Any]:
        """The outputs for each batch; replicas run several at once."""
        self.pass_milestone()
        feed, found = self._evaluate(Mode.PREDICT, loader), []
        with evaluating(self._task.network):
            for planned, division, meanwhile in feed:
                found += self._predict(planned, division, feed.holders, meanwhile)
        return found

    def _predict(self, planned: PlannedStep, *batch: Any) -> list[Any]:
        ((phase, values),) = self._timed(planned, *batch)
        graph, numbers = phase.planned.plan.placed.graph, phase.planned.numbers
        pairs = zip(values, phase.inputs, strict=True)
        return [unflatten_outputs(graph, v, [*inputs], numbers) for v, inputs in pairs]

    def _evaluate(self, mode: Mode, loader: Iterable[Any]) -> Feed:
        is_seen = self.witness is not None
        return self._leading.feed(mode, loader, FROM_THE_START, one_by_one=is_seen)

    def _outlook(self, mode: Mode, signature: Signature) -> Outlook:
        with as_in(mode, self._task.network):
            return outlook(self.planner, mode, signature)

    def _timed(self, planned: PlannedStep, *batch: Any) -> Iterator[tuple[StepPhase, list[Values]]]:
        meter, phases = self._job.meter, self._run(planned, *batch)
        if meter is None:
            return phases
        return meter.timed(planned.first.mode.value, phases)

    def _run(
        self,
        planned: PlannedStep,
        division: Division | None,
        holders: Collection[int],
        meanwhile: Callable[[], None] | None,
    ) -> Iterator[tuple[StepPhase, list[Values]]]:
        """Run a step; gives each of its phases and, for each microbatch, the values it left.

        Args:
            planned: The step.
            division: The batch; None where it is not here.
            holders: The workers that have it.
            meanwhile: What to do while the step waits for its first value.
        """
        step, self._step = self._step, self._step + 1
        self._job.has_stepped = True
        if self._job.num_workers == 1:
            self._job.is_stopping |= self._job.member.state.stops_soon  # there are no tickets
        for phase in planned.phases(division):
            if phase.mark is not None:
                phase.mark()
            if phase.planned.asks:
                known = answered(phase, division, step, self.planner, self._job, self.progress)
                with known as phase:
                    if phase.planned.asks:
                        self._end_in_error(phase, step)
                    state = self._run_phase(phase, step, division, holders, meanwhile)
            else:
                state = self._run_phase(phase, step, division, holders, meanwhile)
            meanwhile = None
            yield phase, state.values
        if planned.exchange is not None:
            planned.exchange.runner.run(step, [()] * planned.exchange.part.num_microbatches)
        self.planner.writes.after_step()

    def _run_phase(
        self,
        phase: StepPhase,
        step: int,
        division: Division | None,
        holders: Collection[int],
        meanwhile: Callable[[], None] | None,
    ) -> StepState:
        plan, profiler = phase.planned, self.profiler
        is_watched = plan.wants_costs or (
            profiler.is_on and plan.plan.placed.graph.mode is Mode.TRAIN
        )
        if is_watched:
            profiler.begin(plan, step)
        before = note_left(plan, self._job.rank) if plan.left_by_calls else {}
        run = partial(
            plan.runner.run,
            step,
            phase.inputs,
            numbers=plan.numbers,
            microbatches=phase.microbatches(self.progress) if phase.weights else None,
            meanwhile=meanwhile,
        )
        in_turn = phase.weights and not plan.plan.is_microbatched
        if self.witness is None and not in_turn:  # as at most steps: contexts take time
            state = run()
        else:
            witness = nullcontext() if self.witness is None else self.witness.watch(plan.runner)
            with witness, phase.drawing(self.progress) if in_turn else nullcontext():
                state = run()
        if is_watched:
            profiler.end(plan)
        if plan.left_by_calls:
            share_left(self._job.control, plan, before)
        if plan.written_inputs and division is not None:
            for inputs in phase.inputs:
                share_written(self._job.control, plan, inputs, holders)
        if plan.asking_inputs and division is not None and holders == self._job.ranks:
            given = map(leaves, division.microbatches[phase.start :])
            share_gradients_of_inputs(self._job.control, plan, state.of_inputs, given)
        if not plan.runner.has_run:
            self._note_first_run(plan)
        return state

    def _note_first_run(self, plan: ReadyPlan) -> None:
        """After a plan's first run workers tell each other the sizes that it gave to buffers."""
        plan.runner.has_run = True
        tensors = named_state(self._task.network, self._task.loss_fn)
        if share_sizes(self._job.control, plan.plan, tensors):
            self.planner.recordings.forget_sizes()

    def _use_measurements(self, planned: PlannedStep) -> None:
        """Once a plan that waits for its costs has been timed often enough, use them."""
        for plan in planned.plans:
            if plan.wants_costs and self.profiler.has_enough(plan):
                costs = self.profiler.collect(plan).costs
                self.profiler.forget(plan)
                self.planner.use_costs(plan, costs)
        if self._trace.is_due:
            self._trace.after_step(planned)

    def start_over(self) -> None:
        """The job has new channels: make plans anew, and tell signatures again."""
        self.profiler.forget()  # what was measured of plans that are gone
        self._trace.start_over()
        self.planner.start_over()
        self._job.readers.forget()
        self._leading.start_over()

    def counters(self) -> dict[str, Any]:
        """The counters that steps go on from, besides the Model's state."""
        norm, losses = self.planner.updater.last_norm, self.beside.losses
        return {"step": self._step, "norm": norm, "losses": losses}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Go on from what ``counters`` gave."""
        self._step = int(counters["step"])
        self.planner.updater.last_norm = counters["norm"]
        self.beside = Beside(dict(counters["losses"]))


def _other_home(before: int, now: int) -> PlacementError:
    return PlacementError(
        f"what metrics are shown was made on worker {before} for one batch, and on worker {now} "
        f"for another, by what forward asks tensors for\n"
        f"  Fix: let the modules that return outputs be on one worker."
    )


def _outputs(plan: ReadyPlan, arguments: Arguments, values: Values) -> Any:
    """The outputs for a whole batch, in the network's own structure."""
    return unflatten_outputs(plan.plan.placed.graph, values, leaves(arguments), plan.numbers)


def _check_history(division: Division) -> None:
    """Refuse a loader's batch behind which backward would go on: only its readers could."""
    if any(getattr(leaf, "grad_fn", None) is not None for leaf in leaves(division.arguments)):
        raise ConfigurationError(
            "a batch of the loader was made of what asks for a gradient (it has a grad_fn), which "
            "only workers that read it could go on with\n"
            "  Fix: detach it in the data set or in collate_fn, as by "
            "x.detach().requires_grad_(); or call train_step on each batch."
        )
