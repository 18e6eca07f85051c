"""Run all workers of a job in one thread: no cluster, no processes, no timing.

    cluster = SimulatedCluster(make_task, num_workers=3)
    losses = cluster.train_step(((images,), {}))        # one loss per worker

Every worker has a network, an optimizer and a random generator of its own; plans, programs,
runners, ownership and the frames on the wire are the real ones. Workers take turns: one runs until
it would have to wait for a message that is not there yet, then the next does. So a run is the same
every time, and a state in which nobody can go on is an error at once, not a hang.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from graphsplit.batches.batch import Arguments, Signature, leaves
from graphsplit.batches.microbatches import Division
from graphsplit.capture.graph import CapturedGraph, Mode
from graphsplit.capture.state.attributes import plain_attributes
from graphsplit.capture.state.kept_tensors import keeps_tensors
from graphsplit.capture.state.owned_tensors import make_buffers
from graphsplit.cluster.member.identity import ReportedPosition
from graphsplit.errors import GraphsplitError, PlanMismatchError
from graphsplit.guards.places import Place
from graphsplit.job.job import Job
from graphsplit.optimizers.ownership import TensorOwners
from graphsplit.partition.plan import PartitionPlan
from graphsplit.planning.modes import evaluating
from graphsplit.planning.passes import capture_graph
from graphsplit.planning.planner import Planner, ReadyPlan
from graphsplit.planning.step_plan import PlannedStep, StepPhase, TrainingProgress, plan_step
from graphsplit.planning.task import Task
from graphsplit.program.instruction import Opcode
from graphsplit.program.lower import StepPart, WorkerProgram
from graphsplit.runtime.random.randomness import (
    all_generators,
    process_generators,
    set_all_generators,
    set_process_generators,
)
from graphsplit.runtime.runner import ProgramRunner
from graphsplit.runtime.step_state import StepState
from graphsplit.settings import FAIL_FAST, recapture_every
from graphsplit.train.outputs import unflatten_outputs
from graphsplit.transport.memory import MemoryFabric, MemoryTransport
from graphsplit.transport.wait import WaitPolicy

_Passes = tuple[PartitionPlan, tuple[WorkerProgram, ...]]


class Captures:
    """Captured graphs, kept: capture takes most of a test, and no placement of modules changes it.

    Give one to several simulations of the same network under different placements.
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple[object, ...], CapturedGraph] = {}

    def graph(
        self, task: Task, mode: Mode, signature: Signature, lift: tuple[Place, ...] = ()
    ) -> CapturedGraph:
        """The graph of a task's step; one that was captured before, if it holds for this task."""
        trained = tuple(p.requires_grad for p in task.network.parameters())
        modes = tuple(m.training for m in task.network.modules())
        buffers = tuple(name for name, _ in task.network.named_buffers())
        look = (plain_attributes(task.network), modes, buffers)
        key = (mode, signature.text, trained, task.autocast, *look)
        known = None if lift else self._graphs.get(key)
        if known is not None:
            moved = moved_to(known, task)
            if moved.state.guards.hold():
                return moved
        graph = capture_graph(task, mode, signature, lift=lift)
        if not lift and not keeps_tensors(graph.state.changes):  # of its network alone
            self._graphs[key] = graph
        return graph


def moved_to(graph: CapturedGraph, task: Task) -> CapturedGraph:
    """A graph whose Python values are those of another task that is like the captured one."""
    root = nn.Module()
    root.network = task.network
    if isinstance(task.loss_fn, nn.Module):
        root.loss_fn = task.loss_fn
    make_buffers(dict(root.named_children()), graph.buffers)
    return dataclasses.replace(graph, state=graph.state.for_copy(root))


class SimulationError(GraphsplitError, RuntimeError):
    """Simulated workers cannot go on, or left something behind. Names every worker's position."""


@dataclass
class _Shared:
    """The things that all workers of one simulated job have in common.

    Attributes:
        fabric: The messages under way.
        texts: What the first worker brought to each agreement.
        passes: Plans and programs, by number, made by the first worker that needed them.
        captures: The graphs they are made from; None if every worker makes all by itself.
    """

    captures: Captures | None
    fabric: MemoryFabric = field(default_factory=MemoryFabric)
    texts: dict[str, str] = field(default_factory=dict)
    passes: dict[int, _Passes] = field(default_factory=dict)


class _Member:
    """Membership as a planner sees it."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.position = ReportedPosition()
        self._rank = rank
        self._texts = shared.texts

    def agree(self, topic: str, text: str) -> None:
        """Compare with what the first worker brought."""
        first = self._texts.setdefault(topic, text)
        if text == first:
            return
        lines = zip(first.splitlines(), text.splitlines(), strict=False)
        differing = next(((a, b) for a, b in lines if a != b), ("(end)", "(end)"))
        raise PlanMismatchError(
            f"{topic}: workers 0 and {self._rank} made different plans\n  worker 0: {differing[0]}"
            f"\n  worker {self._rank}: {differing[1]}\n  Fix: let make_task give equal tasks."
        )


class _Job:
    """A job as a planner sees it."""

    recovery_policy = FAIL_FAST

    def __init__(self, rank: int, num_workers: int, shared: _Shared) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self.member = _Member(rank, shared)
        self.transport = MemoryTransport(shared.fabric, generation=1, policy=WaitPolicy())
        self.owners = TensorOwners()
        self._num_plans = 0
        # Graphs that are shared are captured once: that is what they are shared for.
        self.recapture_every = recapture_every(os.environ) if shared.captures is None else 0

    @property
    def following_plan_number(self) -> int:
        """The number that the plan made next will have."""
        return self._num_plans

    def next_plan_number(self) -> int:
        """A number that no other plan of this job has."""
        number, self._num_plans = self._num_plans, self._num_plans + 1
        return number


class _Planner(Planner):
    """A planner that shares what all workers would compute alike: capture takes most of a test."""

    def __init__(self, task: Task, job: _Job, shared: _Shared) -> None:
        super().__init__(task, cast(Job, job))
        self._shared = shared
        self._num_asked = 0

    def _record(self, mode: Mode, signature: Signature, lift: tuple[Place, ...]) -> CapturedGraph:
        captures = self._shared.captures
        if captures is None:
            return super()._record(mode, signature, lift)
        return captures.graph(self._task, mode, signature, lift)

    def _pure_passes(self, graph: CapturedGraph, part: StepPart) -> _Passes:
        if self._shared.captures is None:
            return super()._pure_passes(graph, part)
        number, self._num_asked = self._num_asked, self._num_asked + 1
        if number not in self._shared.passes:
            self._shared.passes[number] = super()._pure_passes(graph, part)
        return self._shared.passes[number]


@dataclass
class SimulatedWorker:
    """One worker of a simulated job.

    Attributes:
        rank: Its rank.
        task: Its network, loss and optimizer.
        planner: Its plans, and who owns what.
        generator: The state of its random generator while others run.
        process: The states of Python's and NumPy's generators, if it draws from them.
        progress: How far its training is.
    """

    rank: int
    task: Task
    planner: Planner
    generator: torch.Tensor
    process: torch.Tensor | None = None
    progress: TrainingProgress = field(default_factory=TrainingProgress)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let this worker's generator be the default one."""
        torch.default_generator.set_state(self.generator)
        if self.process is not None:
            set_process_generators(self.process)
        try:
            yield
        finally:
            self.generator = torch.default_generator.get_state()
            if self.process is not None:
                self.process = process_generators()


class SimulatedCluster:
    """A job whose workers take turns in one thread.

    The default generator is left as it was found by every method.

    Args:
        make_task: Makes one worker's task; called once per worker, each time with the generator in
            the state it has now, as all processes of a job start from one seed.
        num_workers: Size of the cluster.
        captures: Where to look for graphs, and to keep them, so that each is captured once. None:
            every worker captures and plans by itself, as in a real job, and plans are compared.
    """

    def __init__(
        self, make_task: Callable[[], Task], num_workers: int, *, captures: Captures | None = None
    ) -> None:
        self._shared = _Shared(captures)
        self._step = 0
        self.workers: list[SimulatedWorker] = []
        with _generator_kept():
            start = torch.default_generator.get_state()
            for rank in range(num_workers):
                torch.default_generator.set_state(start)
                task = make_task()
                planner = _Planner(task, _Job(rank, num_workers, self._shared), self._shared)
                state = torch.default_generator.get_state()
                progress = TrainingProgress(accumulate=task.accumulate)
                self.workers.append(SimulatedWorker(rank, task, planner, state, progress=progress))
            self._process = process_generators()

    def train_step(self, arguments: Arguments, *, batch: Any = None) -> list[torch.Tensor]:
        """Train on one batch; returns the loss as each worker knows it.

        Args:
            arguments: The batch, as arguments of the network and the loss.
            batch: The same as a loader yields it, for tasks with a way of their own to split it.
        """
        divisions = [self._divided(worker.task, arguments, batch) for worker in self.workers]
        losses: list[list[torch.Tensor]] = [[] for _ in self.workers]
        planned, phases = self._run(Mode.TRAIN, divisions)
        for plan, states in phases:
            loss = plan.placed.graph.loss_node
            assert loss is not None
            for found, state in zip(losses, states, strict=True):
                found += [values[loss] for values in state.values]
        for worker in self.workers:
            worker.progress.num_steps += 1
        return [step.loss(found) for step, found in zip(planned, losses, strict=True)]

    def _divided(self, task: Task, arguments: Arguments, batch: Any) -> Division:
        """A worker's own copy of a batch, divided."""
        if batch is None:
            return task.divider.divide_arguments(copy.deepcopy(arguments))
        return task.divider.divide(copy.deepcopy(batch), has_loss_fn=task.loss_fn is not None)

    def evaluate(self, arguments: Arguments) -> Any:
        """Evaluate one batch; returns the outputs, after the loss where the task asks for it."""
        plan, states = self._run_whole(Mode.EVAL, arguments)
        graph, state = plan.placed.graph, states[plan.home]
        found = unflatten_outputs(graph, state.values[0], leaves(arguments), state.numbers)
        return found if graph.loss is None else found[:2]

    def predict(self, arguments: Arguments) -> list[Any]:
        """The network's outputs as each worker knows them."""
        plan, states = self._run_whole(Mode.PREDICT, arguments)
        return [
            unflatten_outputs(plan.placed.graph, state.values[0], leaves(arguments), state.numbers)
            for state in states
        ]

    def latest(self, mode: Mode) -> ReadyPlan | None:
        """The plan that was used last in a mode, as worker 0 has it."""
        return self.workers[0].planner.latest(mode)

    def owner_of(self, name: str) -> SimulatedWorker:
        """The worker that owns a parameter or buffer; any, before the first plan."""
        return self.workers[self.workers[0].planner.owners.get(name, 0)]

    def _run_whole(self, mode: Mode, arguments: Arguments) -> tuple[PartitionPlan, list[StepState]]:
        copies = [copy.deepcopy(arguments) for _ in self.workers]
        with ExitStack() as stack:
            for worker in self.workers:
                stack.enter_context(evaluating(worker.task.network))
            _, phases = self._run(mode, [Division(one, (one,)) for one in copies])
        return phases[0]

    def _run(
        self, mode: Mode, divisions: Sequence[Division]
    ) -> tuple[list[PlannedStep], list[tuple[PartitionPlan, list[StepState]]]]:
        """Run a step; returns each worker's plans, and what each phase left on every worker."""
        with _generator_kept():
            planned = [
                self._planned(worker, mode, division)
                for worker, division in zip(self.workers, divisions, strict=True)
            ]
            self._note_draws(planned)
            by_worker = [
                made.phases(division if worker.rank in made.consumers else None)
                for worker, made, division in zip(self.workers, planned, divisions, strict=True)
            ]
            number, self._step = self._step, self._step + 1
            left = [self._run_phase(number, phases) for phases in zip(*by_worker, strict=True)]
        return planned, left

    def _note_draws(self, planned: Sequence[PlannedStep]) -> None:
        """From now on workers have Python's and NumPy's generators of their own, if they draw."""
        if planned[0].first.plan.placed.graph.draws_from_process:
            for worker in self.workers:
                worker.process = self._process if worker.process is None else worker.process

    def _planned(self, worker: SimulatedWorker, mode: Mode, division: Division) -> PlannedStep:
        is_training = mode is Mode.TRAIN
        with worker.active():
            if is_training:
                worker.progress.begin()
            note = partial(worker.progress.agreement, worker.task.divider) if is_training else str
            progress = worker.progress if is_training else None
            return plan_step(worker.planner, mode, division.shape(), note=note, progress=progress)

    def _run_phase(
        self, step: int, phases: Sequence[StepPhase]
    ) -> tuple[PartitionPlan, list[StepState]]:
        states = []
        for worker, phase in zip(self.workers, phases, strict=True):
            if phase.mark is not None:
                phase.mark()
            microbatches = phase.microbatches(worker.progress) if phase.weights else None
            planned = phase.planned
            states.append(planned.runner.begin(step, phase.inputs, planned.numbers, microbatches))
        self._take_turns([phase.planned.runner for phase in phases], states)
        plan = phases[0].planned.plan
        self._check_nothing_left(states, plan)
        return plan, states

    def _take_turns(self, runners: Sequence[ProgramRunner], states: Sequence[StepState]) -> None:
        while any(runner.next_instruction() is not None for runner in runners):
            has_moved = False
            for worker, runner, state in zip(self.workers, runners, states, strict=True):
                if not self._can_advance(runner):
                    continue
                has_moved = True
                with worker.active():
                    while self._can_advance(runner):
                        runner.advance(state)
            if not has_moved:
                raise SimulationError("no worker can go on:\n  " + _positions(runners))

    def _can_advance(self, runner: ProgramRunner) -> bool:
        instruction = runner.next_instruction()
        if instruction is None:
            return False
        if instruction.opcode not in (Opcode.SEND, Opcode.RECEIVE):
            return True
        channel = self._shared.fabric.channels[runner.plan_number, instruction.operand]
        if instruction.opcode is Opcode.SEND:
            return len(channel.messages) < runner.depth_of(instruction.operand)
        return bool(channel.messages)

    def _check_nothing_left(self, states: Sequence[StepState], plan: PartitionPlan) -> None:
        outputs = {output.node for output in plan.placed.graph.outputs}
        left = [
            f"a message of plan {plan}, edge {edge}, was never received"
            for (plan, edge), channel in self._shared.fabric.channels.items()
            if channel.messages
        ]
        for rank, state in enumerate(states):
            for name in ("leaves", "collected", "received"):
                found = sorted(key for kept in getattr(state, name) for key in kept)
                if found and any(state.roots):
                    left.append(f"worker {rank} never used {name} {found}")
            if any(state.pending):
                left.append(f"worker {rank} never computed some weight gradients")
            kept = {value for values in state.values for value in values} - outputs
            if kept or state.generators:
                left.append(f"worker {rank} never freed {sorted(kept)} {sorted(state.generators)}")
        if left:
            raise SimulationError("the step left something behind:\n  " + "\n  ".join(left))


@contextmanager
def _generator_kept() -> Iterator[None]:
    before = all_generators()
    try:
        yield
    finally:
        set_all_generators(before)


def _positions(runners: Sequence[ProgramRunner]) -> str:
    return "\n  ".join(f"worker {rank}: {runner.where()}" for rank, runner in enumerate(runners))
