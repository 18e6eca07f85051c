"""Run all workers of a job in one process: no cluster, no network, no timing.

    cluster = SimulatedCluster(make_task, num_workers=3)
    losses = cluster.train_step(((images,), {}))        # one loss per worker

Every worker has a network, an optimizer and random generators of its own; engines, feeds, plans,
programs, runners, ownership and the frames on the wire are the real ones. Workers take turns: one
runs until it would have to wait for a message that is not there yet, then the next does. So a run
is the same every time, and a state in which nobody can go on is an error at once, not a hang.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from graphsplit.batches.signature import Arguments, Signature
from graphsplit.capture.graph import CapturedGraph, Mode
from graphsplit.capture.state.owned_tensors import make_buffers
from graphsplit.checkpoint.forms import kept_forms
from graphsplit.cluster.member.identity import ReportedPosition
from graphsplit.cluster.member.member import Member
from graphsplit.cluster.member.state_machine import MemberState
from graphsplit.errors import GraphsplitError, PlanMismatchError
from graphsplit.failure import AbortSignal
from graphsplit.guards.places import Place
from graphsplit.job.job import Job
from graphsplit.job.process_generators import GeneratorWatch
from graphsplit.partition.plan import PartitionPlan
from graphsplit.planning.modes import evaluating
from graphsplit.planning.passes import capture_graph
from graphsplit.planning.planner import Planner
from graphsplit.planning.ready_plan import ReadyPlan
from graphsplit.planning.task import Task
from graphsplit.program.lower import StepPart, WorkerProgram
from graphsplit.runtime.parts import RunnerParts
from graphsplit.runtime.randomness import process_generators, set_process_generators
from graphsplit.runtime.runner import ProgramRunner
from graphsplit.runtime.step_state import StepState
from graphsplit.settings import FAIL_FAST
from graphsplit.torch_ext.attributes import named_tensors
from graphsplit.train.cluster_engine import ClusterEngine
from graphsplit.train.metrics import Metric
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.wait import Wait, WaitPolicy
from simulated.captures import (
    RecentGraphs,
    is_of_one_network,
    keeps_tensors,
    plain_attributes,
    state_of_copy,
)
from simulated.memory import MemoryFabric, MemoryTransport

T = TypeVar("T")

_Passes = tuple[PartitionPlan, tuple[WorkerProgram, ...]]


class Captures:
    """Captured graphs, kept: capture takes most of a test, and no placement of modules changes it.

    Give one to several simulations of the same network under different placements.
    """

    def __init__(self) -> None:
        self._graphs = RecentGraphs()

    def graph(
        self, task: Task, mode: Mode, signature: Signature, lift: tuple[Place, ...] = ()
    ) -> CapturedGraph:
        """The graph of a task's step; one that was captured before, if it holds for this task."""
        trained = tuple(p.requires_grad for p in task.network.parameters())
        modes = tuple(m.training for m in task.network.modules())
        buffers = tuple(named_tensors(task.network))
        look = (plain_attributes(task.network), modes, buffers, str(kept_forms(task)))
        key = (mode, signature.text, trained, task.autocast, *look)
        known = None if lift else self._graphs.get(key)
        if known is not None:
            moved = moved_to(known, task)
            if moved.state.guards.hold():
                return moved
        graph = capture_graph(task, mode, signature, lift=lift)
        # What belongs to one network alone is captured for each.
        if not (lift or keeps_tensors(graph.state) or is_of_one_network(graph)):
            self._graphs[key] = graph
        return graph


def moved_to(graph: CapturedGraph, task: Task) -> CapturedGraph:
    """A graph whose Python values are those of another task that is like the captured one."""
    root = nn.Module()
    root.network = task.network
    if isinstance(task.loss_fn, nn.Module):
        root.loss_fn = task.loss_fn
    make_buffers(dict(root.named_children()), graph.buffers)
    return dataclasses.replace(graph, state=state_of_copy(graph.state, root))


class SimulationError(GraphsplitError, RuntimeError):
    """Simulated workers cannot go on, or left something behind. Names every worker's position."""


class _Abandoned(BaseException):
    """Another worker has failed: this one goes no further."""


class _Turn(threading.Thread, Generic[T]):
    """One worker's part of a call. It runs while the others stand still, until it has to wait."""

    def __init__(self, worker: SimulatedWorker, call: Callable[[SimulatedWorker], T]) -> None:
        super().__init__(name=f"simulated worker {worker.rank}", daemon=True)
        self.worker = worker
        self.can_go_on: Callable[[], bool] = lambda: True
        self.waits_for = ""
        self.is_over = False
        self.error: BaseException | None = None
        self.result: T
        self._call = call
        self._is_abandoned = False
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        """Make the call, from the first turn on."""
        self._may_run.acquire()
        if self._is_abandoned:  # before it has begun
            return
        try:
            self.result = self._call(self.worker)
        except BaseException as error:  # raised again where the call was made
            self.error = error
        self.can_go_on, self.is_over = lambda: False, True
        self._has_stopped.release()

    def take(self) -> None:
        """Run until this worker has to wait, or is done. The caller stands still meanwhile."""
        with self.worker.active():
            self._may_run.release()
            self._has_stopped.acquire()
        if self.error is not None:
            raise self.error

    def pause(self, waits_for: str, can_go_on: Callable[[], bool]) -> None:
        """Let others run until this worker can go on. Called on its own thread."""
        if self._is_abandoned:
            raise _Abandoned
        self.waits_for, self.can_go_on = waits_for, can_go_on
        self._has_stopped.release()
        self._may_run.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def where(self) -> str:
        """Where the worker is, and what it waits for."""
        position = self.worker.position
        return f"worker {self.worker.rank}: {position.text()}; it waits for {self.waits_for}"

    def abandon(self) -> None:
        """End it, wherever it is."""
        self._is_abandoned = True
        if self.is_alive():
            self._may_run.release()
            self.join()


class _TurnsFabric(MemoryFabric):
    """Messages between workers that take turns."""

    def wait(self, spec: ChannelSpec, wait: Wait, is_ready: Callable[[], bool]) -> None:
        """Let others run until ``is_ready``. The caller holds ``changed``."""
        turn = threading.current_thread()
        assert isinstance(turn, _Turn)
        while not is_ready():
            self.changed.release()
            try:
                turn.pause(wait.what, is_ready)
            finally:
                self.changed.acquire()


@dataclass
class _Shared:
    """The things that all workers of one simulated job have in common.

    Attributes:
        captures: The graphs they are made from; None if every worker makes all by itself.
        num_workers: How many they are.
        fabric: The messages under way.
        texts: What the first worker brought to each agreement, with its rank.
        passes: Plans and programs, by number, made by the first worker that needed them.
    """

    captures: Captures | None
    num_workers: int
    fabric: MemoryFabric = field(default_factory=_TurnsFabric)
    texts: dict[str, tuple[int, str]] = field(default_factory=dict)
    passes: dict[int, _Passes] = field(default_factory=dict)

    def job(self, rank: int) -> Job:
        """The job as one of them sees it."""
        transport = MemoryTransport(self.fabric, generation=1, policy=WaitPolicy())
        # Graphs that are shared are captured once. Of workers that capture, the last looks again.
        looks_again = self.captures is None and rank == self.num_workers - 1
        every = int(os.environ.get("GS_RECAPTURE_EVERY", 0)) if looks_again else 0
        member = cast(Member, _Member(rank, self))
        return Job(member, transport, AbortSignal(), recapture_every=every)


class _Member:
    """Membership as a job sees it where nobody comes, goes or fails."""

    recovery = FAIL_FAST
    generation = 1

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank = rank
        self.num_workers = self.num_seats = shared.num_workers
        self.seats = tuple(range(shared.num_workers))
        self.position = ReportedPosition()
        self.state = MemberState("simulated")
        self._texts = shared.texts

    def agree(self, topic: str, text: str) -> None:
        """Compare with what the first worker brought."""
        other, first = self._texts.setdefault(topic, (self.rank, text))
        if text == first:
            return
        lines = zip(first.splitlines(), text.splitlines(), strict=False)
        differing = next(((a, b) for a, b in lines if a != b), ("(end)", "(end)"))
        raise PlanMismatchError(
            f"{topic}: workers {other} and {self.rank} made different plans\n"
            f"  worker {other}: {differing[0]}\n  worker {self.rank}: {differing[1]}\n"
            f"  Fix: let make_task give equal tasks."
        )


class _Planner(Planner):
    """A planner that shares what all workers would compute alike: capture takes most of a test."""

    def __init__(self, task: Task, job: Job, shared: _Shared) -> None:
        super().__init__(task, job)
        self._shared = shared
        self._num_asked = 0

    def _record(self, mode: Mode, signature: Signature, lift: tuple[Place, ...]) -> CapturedGraph:
        captures = self._shared.captures
        if captures is None:
            return super()._record(mode, signature, lift)
        return captures.graph(self._task, mode, signature, lift)

    def _pure_passes(self, graph: CapturedGraph, part: StepPart) -> _Passes:
        if self._shared.captures is None or is_of_one_network(graph):
            return super()._pure_passes(graph, part)  # each worker has its own code
        number, self._num_asked = self._num_asked, self._num_asked + 1
        if number not in self._shared.passes:
            self._shared.passes[number] = super()._pure_passes(graph, part)
        return self._shared.passes[number]

    def _runner(self, parts: RunnerParts) -> ProgramRunner:
        return _Runner(parts)


class _Runner(ProgramRunner):
    """A runner that leaves nothing behind but outputs."""

    def run(self, *args: Any, **options: Any) -> StepState:
        """See ``ProgramRunner.run``."""
        state, rank = super().run(*args, **options), self._parts.program.worker
        left = []
        for name in ("leaves", "collected", "received"):
            unused = sorted(key for kept in getattr(state, name) for key in kept)
            if unused and any(state.roots):
                left.append(f"worker {rank} never used {name} {unused}")
        if any(state.pending):
            left.append(f"worker {rank} never computed some weight gradients")
        outputs = {output.node for output in self._plan.placed.graph.outputs}
        kept = {value for values in state.values for value in values} - outputs
        if kept or state.generators:
            left.append(f"worker {rank} never freed {sorted(kept)} {sorted(state.generators)}")
        _refuse_what_is_left(left)
        return state


def _refuse_what_is_left(left: Sequence[str]) -> None:
    if left:
        raise SimulationError("the step left something behind:\n  " + "\n  ".join(left))


class _Seen(Metric):
    """Keeps loss and outputs of the batch that an evaluation shows."""

    needs_loss = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the batch before."""
        self.loss: torch.Tensor | None = None
        self.outputs: Any = None

    def update(
        self, *, outputs: Any, target: Any, loss: torch.Tensor | None, num_samples: int
    ) -> None:
        """See a batch."""
        self.loss, self.outputs = loss, outputs

    def compute(self) -> float:
        """Nothing: what it saw is looked at."""
        return 0.0


class _ProcessGenerators:
    """Python's and NumPy's generators, read and set only where somebody has drawn from them.

    Both take longer than most turns do.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was seen: a watch that has seen a Gaussian kept reads the state each time."""
        self._watch = GeneratorWatch()
        self._state: torch.Tensor | None = None

    def state(self) -> torch.Tensor:
        """Their states."""
        if any(self._watch.look()) or self._state is None:
            self._state = process_generators()
        return self._state

    def put(self, state: torch.Tensor) -> None:
        """Set states that ``state`` gave."""
        if any(self._watch.look()) or self._state is not state:
            set_process_generators(state)
            self._watch.look()
            self._state = state


_PROCESS = _ProcessGenerators()


@dataclass
class SimulatedWorker:
    """One worker of a simulated job.

    Attributes:
        rank: Its rank.
        task: Its network, loss and optimizer.
        engine: Runs its part of every step.
        position: Where it is.
        generator: The state of PyTorch's generator while others run.
        process: Those of Python's and NumPy's.
    """

    rank: int
    task: Task
    engine: ClusterEngine
    position: ReportedPosition
    generator: torch.Tensor
    process: torch.Tensor

    @property
    def planner(self) -> Planner:
        """Its plans, and who owns what."""
        return self.engine.planner

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let this worker's generators be those of the process."""
        torch.default_generator.set_state(self.generator)
        _PROCESS.put(self.process)
        try:
            yield
        finally:
            self.generator = torch.default_generator.get_state()
            self.process = _PROCESS.state()


class SimulatedCluster:
    """A job whose workers take turns in one process.

    The generators of the process are left as they were found by every method.

    Args:
        make_task: Makes one worker's task; called once per worker, each time with the generators in
            the state they have now, as all processes of a job start from one seed.
        num_workers: Size of the cluster.
        captures: Where to look for graphs, and to keep them, so that each is captured once. None:
            every worker captures and plans by itself, as in a real job, and plans are compared.
    """

    def __init__(
        self, make_task: Callable[[], Task], num_workers: int, *, captures: Captures | None = None
    ) -> None:
        self._shared = _Shared(captures, num_workers)
        _PROCESS.begin_anew()
        self.workers: list[SimulatedWorker] = []
        with _generators_kept():
            start, process = torch.default_generator.get_state(), _PROCESS.state()
            for rank in range(num_workers):
                torch.default_generator.set_state(start)
                _PROCESS.put(process)
                task, job = make_task(), self._shared.job(rank)
                engine = ClusterEngine(task, job, _Planner(task, job, self._shared))
                generators = torch.default_generator.get_state(), _PROCESS.state()
                worker = SimulatedWorker(rank, task, engine, job.member.position, *generators)
                self.workers.append(worker)

    def train_step(self, arguments: Arguments, *, batch: Any = None) -> list[torch.Tensor]:
        """Train on one batch; returns the loss as each worker knows it.

        Args:
            arguments: The batch, as arguments of the network and the loss: all workers are given
                it.
            batch: The same as a loader yields it: those read it that need it.
        """

        def train(worker: SimulatedWorker) -> torch.Tensor:
            if batch is None:
                divider = worker.task.divider
                return worker.engine.train_step(divider.divide_arguments(copy.deepcopy(arguments)))
            (loss,) = worker.engine.train_epoch([copy.deepcopy(batch)])
            return loss

        return self.run(train)

    def evaluate(self, batch: Any) -> tuple[torch.Tensor | None, Any]:
        """Evaluate one batch, as a loader yields it; returns loss and outputs."""

        def evaluate(worker: SimulatedWorker) -> _Seen:
            seen = _Seen()
            worker.engine.eval_epoch([copy.deepcopy(batch)], {"seen": seen})
            return seen

        seen = self._run_evaluating(evaluate)
        plan = self.latest(Mode.EVAL)
        assert plan is not None
        at_home = seen[plan.plan.home]
        return at_home.loss, at_home.outputs

    def predict(self, arguments: Arguments) -> list[Any]:
        """The network's outputs as each worker knows them."""
        return self._run_evaluating(lambda worker: worker.engine.predict(copy.deepcopy(arguments)))

    def _run_evaluating(self, call: Callable[[SimulatedWorker], T]) -> list[T]:
        """As ``run``; calls that are kept whole are of the network that was captured first."""
        with ExitStack() as stack:
            for worker in self.workers:
                stack.enter_context(evaluating(worker.task.network))
            return self.run(call)

    def latest(self, mode: Mode) -> ReadyPlan | None:
        """The plan that was used last in a mode, as worker 0 has it."""
        return self.workers[0].planner.latest(mode)

    def owner_of(self, name: str) -> SimulatedWorker:
        """The worker that owns a parameter or buffer; any, before the first plan."""
        return self.workers[self.workers[0].planner.known_owners().get(name, 0)]

    def run(self, call: Callable[[SimulatedWorker], T]) -> list[T]:
        """Let every worker make a call; returns what each gets."""
        if len(self.workers) == 1:  # it waits for nobody
            with _generators_kept(), self.workers[0].active():
                return [call(self.workers[0])]
        turns = [_Turn(worker, call) for worker in self.workers]
        for turn in turns:
            turn.start()
        try:
            with _generators_kept():
                while not all(turn.is_over for turn in turns):
                    ready = [turn for turn in turns if turn.can_go_on()]
                    if not ready:
                        where = "\n  ".join(turn.where() for turn in turns)
                        raise SimulationError(f"no worker can go on:\n  {where}")
                    for turn in ready:
                        turn.take()
        finally:
            for turn in turns:
                turn.abandon()
        _refuse_what_is_left(
            [
                f"a message of plan {plan}, edge {edge}, was never received"
                for (plan, edge), channel in self._shared.fabric.channels.items()
                if channel.messages
            ]
        )
        return [turn.result for turn in turns]


@contextmanager
def _generators_kept() -> Iterator[None]:
    before, process = torch.default_generator.get_state(), _PROCESS.state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
        _PROCESS.put(process)
