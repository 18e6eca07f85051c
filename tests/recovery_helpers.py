"""Workers of a job that recovers, as threads that take turns: scripts run whole, in one process.

Each thread is a worker; one runs at a time, until it waits for another. So each can have the
default generator for itself. Killing a worker means that an exception ends its thread, at any
instruction, and that another thread takes its rank and runs the script from its first line.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from collected import leave_out_what_is_there
from simulated.captures import (
    RecentGraphs,
    is_of_one_network,
    keeps_tensors,
    plain_attributes,
)
from simulated.memory import MemoryFabric, MemoryTransport
from simulated.simulate import moved_to

import graphsplit as gs
from graphsplit.cluster.member.calls import CallHistory
from graphsplit.cluster.member.identity import failure_of
from graphsplit.cluster.scheduler.job.divergence import describe_divergence
from graphsplit.errors import CollectiveMismatchError, GraphsplitError, PlanMismatchError
from graphsplit.failure import AbortSignal, FailureCause
from graphsplit.job import joined
from graphsplit.job.control import ControlChannels
from graphsplit.job.job import Job
from graphsplit.optimizers.tensor_owners import TensorOwners
from graphsplit.planning import passes, planner
from graphsplit.recovery.loops.anew import HandedOver, Successor
from graphsplit.recovery.script import RecoveringScript
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.recovery.snapshot.replicator import HeldCopies, Replicator
from graphsplit.recovery.snapshot.shard import SnapshotShard
from graphsplit.settings import FAIL_FAST, GO_ON, WAIT_REJOIN
from graphsplit.torch_ext.attributes import named_tensors
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.wait import Wait, WaitPolicy

DEADLINE_S = 240.0
_MOST_PAUSES = 200  # of 10 ms, in which no worker makes a call, and nobody's wait ends
_here = threading.local()


class Killed(BaseException):
    """The worker is gone, without a word."""


class StartedAnew(Killed):
    """The worker begins its script again, of its own accord."""


@dataclass(frozen=True)
class Generators:
    """The states of the generators that each process has for itself."""

    default: torch.Tensor
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Generators:
        return cls(torch.default_generator.get_state(), random.getstate(), np.random.get_state())

    def put_back(self) -> None:
        torch.default_generator.set_state(self.default)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class Turns:
    """Who runs. A thread that waits lets others run, and keeps its own generator meanwhile."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.deadline = time.monotonic() + DEADLINE_S
        self.calls: dict[int, CallHistory] = {}
        self._num_calls, self._num_pauses = -1, 0

    def pause(self) -> None:
        """Let others run for a moment. The caller holds ``changed``."""
        if time.monotonic() > self.deadline:
            raise TimeoutError("the simulated job hangs")
        self._end_circle()
        if not hasattr(_here, "job"):  # a thread beside compute
            self.changed.wait(0.01)
            return
        state = Generators.now()
        self.changed.wait(0.01)
        state.put_back()

    def _end_circle(self) -> None:
        """End what the scheduler would, a little later: workers in other calls than each other."""
        made = {rank: calls.made() for rank, calls in self.calls.items()}
        num_calls = sum(calls.num for calls in made.values())
        self._num_pauses = self._num_pauses + 1 if num_calls == self._num_calls else 0
        self._num_calls = num_calls
        within = [calls.within for calls in made.values()]
        if self._num_pauses > _MOST_PAUSES and len({one and one.name for one in within}) > 1:
            raise CollectiveMismatchError(describe_divergence(next(filter(None, within)), made))

    def wait_for(self, is_done: Callable[[], bool], abort: AbortSignal | None = None) -> None:
        while not is_done():
            if abort is not None:
                abort.raise_if_set()
            self.pause()
        self.went_on()

    def went_on(self) -> None:
        """What a worker waited for has come: they are in no circle."""
        self._num_pauses = 0


class TurnsFabric(MemoryFabric):
    """Messages between threads that take turns."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.changed = turns.changed
        self._turns = turns

    def wait(self, spec: ChannelSpec, wait: Wait, is_ready: Callable[[], bool]) -> None:
        while not is_ready():
            wait.check()
            self._turns.pause()
        self._turns.went_on()


class CountedPosition:
    """Where a worker is; ends it at the instruction that was chosen."""

    def __init__(self, kill_at: int | None, wait_to_die: Callable[[], None]) -> None:
        self._progress = self.aside = 0
        self.awaits_all = ""
        self.kill_at = kill_at
        self.lets_join: list[Any] = []
        self._wait_to_die = wait_to_die
        self.calls = CallHistory()
        self.text_source: Callable[[], str] = lambda: ""
        # Always for somebody, so that snapshots need not wait for a pause.
        self.waiting_source: Callable[[], tuple[int, str] | None] = lambda: (0, "its turn")

    def hold(self) -> None:
        self.text_source = self.location_source = None  # type: ignore[assignment]

    @property
    def progress(self) -> int:
        return self._progress

    @progress.setter
    def progress(self, value: int) -> None:
        self._progress = value
        if self.lets_join and threading.current_thread() is _here.job.thread:
            self.lets_join[0] -= 1
            if self.lets_join[0] < 0:
                self.lets_join.pop()()
                self.lets_join.clear()
        if self.kill_at is not None and threading.current_thread() is _here.job.thread:
            self.kill_at -= 1
            if self.kill_at < 0:
                self._wait_to_die()
                raise Killed


class ThreadMember:
    """Membership, as a job sees it."""

    def __init__(self, cluster: ThreadCluster, seat: int, kill_at: int | None) -> None:
        self._cluster = cluster
        self.recovery = cluster.policy if cluster.is_recoverable else FAIL_FAST
        self.seat, self.num_seats = seat, cluster.num_workers
        self.seats = cluster.seats
        self.generation = cluster.generation
        self.position: Any = CountedPosition(kill_at, cluster.wait_to_die)
        self.plan = SimpleNamespace(job="threads")
        self.state = SimpleNamespace(stops_soon=False)
        self.abort = AbortSignal()
        self.failures = self  # it is its own reporter

    @property
    def rank(self) -> int:
        return self.seats.index(self.seat)

    @property
    def num_workers(self) -> int:
        return len(self.seats)

    def agree(self, topic: str, text: str) -> None:
        self.abort.raise_if_set()
        texts = self._cluster.texts.setdefault((self.generation, topic), {})
        texts[self.rank] = text
        self._cluster.turns.changed.notify_all()
        self._cluster.turns.wait_for(lambda: len(texts) == self.num_workers, self.abort)
        if len(set(texts.values())) > 1:
            raise PlanMismatchError(f"{topic}: {texts}")

    def barrier(self, name: str) -> None:
        self.agree(f"barrier {name}", name)

    def cause_of(self, error: BaseException) -> FailureCause | None:
        if isinstance(error, Killed):  # a process that is killed says nothing
            return None
        return failure_of(error, rank=self.rank, host="", pid=0, position="")

    def report(self, cause: FailureCause) -> None:
        self._cluster.fail(cause)

    def await_verdict(self) -> None:
        """What was reported has ended the job already."""

    def is_own(self, cause: FailureCause) -> bool:
        return cause.rank == self.rank and cause.kind != "lost"


class ThreadJob(Job):
    """A job whose workers are threads."""

    thread: threading.Thread

    def __init__(self, cluster: ThreadCluster, seat: int, kill_at: int | None) -> None:
        self._cluster = cluster
        member: Any = ThreadMember(cluster, seat, kill_at)
        super().__init__(member, None, member.abort)  # type: ignore[arg-type]
        self._connect()

    @property
    def recovery_policy(self) -> str:
        return self._cluster.policy if self._cluster.is_recoverable else FAIL_FAST

    def _connect(self) -> None:
        member: Any = self.member
        cluster = self._cluster
        member.generation, member.seats = cluster.generation, cluster.seats
        self._take_place()
        self.owners = TensorOwners() if self.goes_on else self.owners
        self.abort = member.abort = cluster.aborts[self.seat]
        policy = WaitPolicy(self.abort, DEADLINE_S)
        fabric = cluster.fabric
        self.transport = MemoryTransport(fabric, generation=cluster.generation, policy=policy)
        self.control = ControlChannels(self.transport, self.rank, self.num_workers)
        self.num_plans = 0
        self.is_ending = False

    def die_if_doomed(self) -> None:
        if self.seat in self._cluster.doomed:
            self._cluster.doomed.discard(self.seat)
            raise Killed

    def recover(self) -> None:
        self.die_if_doomed()
        self._cluster.gather(self.seat)
        self._connect()


@dataclass
class ThreadCluster:
    """A job whose workers are threads.

    Attributes:
        script: What every worker runs, given its rank; returns what is to be looked at.
        num_workers: How many workers.
        settings: How often snapshots are taken.
        kills: For each worker, how many instructions each of its lives lasts; the last one lasts
            to the end.
        comes_back: Whether a killed worker is started again; if not, the job fails.
        together: Workers that die with the first of them, once.
        dies_when: What must be true before anybody dies, besides: a worker whose time has come
            does nothing until then.
        policy: What the job does about a lost worker.
        joins: Under ``go_on``, who comes back: for each worker, at which instruction of another
            worker's first life, and which worker that is.
        is_recoverable: Whether calls are remembered, so that the job could go on without a worker.
    """

    script: Callable[[int], Any]
    num_workers: int
    settings: SnapshotSettings = field(default_factory=SnapshotSettings)
    kills: dict[int, list[int]] = field(default_factory=dict)
    comes_back: bool = True
    together: tuple[int, ...] = ()
    dies_when: Callable[[], bool] | None = None
    is_recoverable: bool = True
    policy: str = WAIT_REJOIN
    joins: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = Turns()
        self.generation = 0
        self.texts: dict[Any, dict[int, str]] = {}
        self.results: dict[int, Any] = {}
        self.num_killed = self.num_joined = 0
        self.doomed: set[int] = set()
        self.lengths: dict[int, int] = {}
        self.handed_over: dict[int, HandedOver] = {}
        self.num_anew = 0
        self._waiting: set[int] = set()
        self._finished: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._failure: FailureCause | None = None
        self._began = Generators.now()  # all processes of a job begin with one seed
        self.seats: tuple[int, ...] = ()
        self._next_seats = tuple(range(self.num_workers))
        self._form()

    def _form(self) -> None:
        self.generation += 1
        self.seats = self._next_seats
        self._waiting.clear()
        self._finished.clear()
        self.fabric = TurnsFabric(self.turns)
        self.aborts = [AbortSignal(self.generation) for _ in range(self.num_workers)]

    def gather(self, rank: int) -> None:
        """Wait until all have left the generation that is over."""
        before = self.generation
        self._waiting.add(rank)
        self._form_if_all_wait()
        self.turns.wait_for(lambda: self.generation > before or self._failure is not None)
        if self._failure is not None:
            self.aborts[rank].set(self._failure)
            self.aborts[rank].raise_if_set()

    def _form_if_all_wait(self) -> None:
        if self._waiting == set(self._next_seats):
            self._form()
            self.turns.changed.notify_all()

    def join(self, seat: int) -> None:
        """A worker comes that the job went on without: not before it has been lost."""
        self.turns.wait_for(lambda: seat not in self._next_seats or self._failure is not None)
        if seat in self._next_seats:
            return
        self._next_seats = tuple(sorted((*self._next_seats, seat)))
        self._end_generation(FailureCause("lost", "others come", rank=seat), but=seat)
        self.num_joined += 1
        self._start(seat)

    def _end_generation(self, cause: FailureCause, *, but: int) -> None:
        for seat, abort in enumerate(self.aborts):
            if seat != but:
                abort.set(cause, recovers=True)

    def fail(self, cause: FailureCause) -> None:
        self._failure = self._failure or cause
        for abort in self.aborts:
            abort.set(cause)

    def wait_to_die(self) -> None:
        if self.dies_when is not None:
            self.turns.wait_for(self.dies_when)

    def _lose(self, rank: int) -> None:
        self.num_killed += 1
        cause = FailureCause("lost", "killed", rank=rank)
        if rank in self.together:
            self.doomed.update(set(self.together) - {rank})
            self.together = ()
        if not self.comes_back:
            self.fail(cause)
            return
        self._end_generation(cause, but=rank)
        if self.policy == GO_ON:
            self._waiting.discard(rank)
            self._next_seats = tuple(seat for seat in self._next_seats if seat != rank)
            self._form_if_all_wait()
        else:
            self._start(rank)

    def _start(self, rank: int) -> None:
        thread = threading.Thread(target=self._live, args=(rank,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _live(self, rank: int) -> None:
        """One life of one worker; when it has been killed, nothing of it is left."""
        with self.turns.changed:
            ended = self._was_killed(rank)
            if ended is not None:
                if hasattr(_here, "job"):
                    del _here.job
                if isinstance(ended, StartedAnew):
                    self.num_anew += 1
                    self._start(rank)
                else:
                    self.handed_over.pop(rank, None)
                    self._lose(rank)
            self.turns.changed.notify_all()

    def _was_killed(self, rank: int) -> Killed | None:
        job: Any = None
        state = Generators.now()
        self._began.put_back()
        try:
            if self.num_killed:
                self.gather(rank)
            lives = self.kills.get(rank, [])
            kill_at = lives.pop(0) if lives else None
            _here.job = job = ThreadJob(self, rank, kill_at)
            job.thread = threading.current_thread()
            self.turns.calls[rank] = job.member.position.calls
            for seat, (at, other) in list(self.joins.items()):
                if other == rank:
                    del self.joins[seat]
                    job.member.position.lets_join = [at, partial(self.join, seat)]
            if self.is_recoverable:
                job.script = RecoveringScript(job, self.settings)
            result = self.script(rank)
            self._finish(job)
            self.results[rank] = result
            self.lengths[rank] = job.member.position.progress
            if not job.is_stopping:
                job.script.finished()
        except Killed as error:
            return error
        except BaseException as error:
            self.results[rank] = error
            if not isinstance(error, GraphsplitError):
                traceback.print_exc()
            self.fail(FailureCause("exception", repr(error), rank=rank))
        finally:
            if job is not None:
                job.script.close()
            state.put_back()
        return None

    def _finish(self, job: Any) -> None:
        """As ``finalize``: come to the end together, or go back once more."""
        from graphsplit.errors import MembershipChangedError

        while True:
            try:
                for action in job.at_end:
                    action()
                job.member.agree("finish", "")
                return
            except MembershipChangedError:
                job.script.leave_generation()
                job.recover()
                job.after_recovery()

    def run(self) -> list[Any]:
        """Run the script on all workers; returns what each returned.

        Raises:
            BaseException: What the first worker that failed by itself raised, or else one that
                heard of a failure: which of the workers hear of it in time is not certain.
        """
        from graphsplit.errors import JobFailedError

        with self.turns.changed:
            for rank in range(self.num_workers):
                self._start(rank)
        while any(thread.is_alive() for thread in list(self._threads)):
            for thread in list(self._threads):
                thread.join(DEADLINE_S)
                assert not thread.is_alive(), "a worker hangs"
        found = [self.results.get(rank) for rank in range(self.num_workers)]
        errors = [result for result in found if isinstance(result, BaseException)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, JobFailedError))
        return found


@pytest.fixture
def threads_as_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every thread find its own job."""
    leave_out_what_is_there()  # as a job that recovers does: it looks for cycles each time
    monkeypatch.setattr(joined, "current", lambda: getattr(_here, "job", None))

    def get_rank() -> int:
        return _here.job.seat if hasattr(_here, "job") else 0

    # graphsplit keeps the names that were asked for: a patch of their home alone may stay there.
    for place in (gs, joined):
        monkeypatch.setattr(place, "get_rank", get_rank)

    def wait(self: Any) -> None:
        self._changed.release()
        try:
            with _turns_of(self).changed:
                _turns_of(self).pause()
        finally:
            self._changed.acquire()

    def join(self: Any) -> None:
        if self._thread is not None:
            while self._thread.is_alive():
                _turns_of(self).pause()

    def start(self: Any, job: Any, parts: HandedOver) -> None:
        job.die_if_doomed()
        own = {n: SnapshotShard.read(p.pieces(), what="own") for n, p in parts.own.items()}
        held = {n: (torch.cat(list(p)),) for n, p in parts.held.parts.items()}
        job._cluster.handed_over[job.rank] = HandedOver(own, HeldCopies(held))
        raise StartedAnew

    def received(self: Any) -> HandedOver:
        job = _here.job
        parts: HandedOver = job._cluster.handed_over.pop(job.rank, HandedOver())
        return parts

    monkeypatch.setattr(Successor, "start", start)
    monkeypatch.setattr(Successor, "received", received)
    monkeypatch.setattr(planner, "capture_graph", CAPTURES.graph)
    monkeypatch.setattr(Replicator, "_wait", wait)
    monkeypatch.setattr(Replicator, "_join", join)


_HOOKS = "_forward_hooks"


def _is_of_a_test(hook: Any) -> bool:
    """Whether a hook may differ between networks that look alike; those of transformers do not."""
    return not hook.__module__.startswith("transformers")


class _Captures:
    """Graphs of networks that are alike, kept: capture takes most of a test."""

    def __init__(self) -> None:
        self._graphs = RecentGraphs()

    def graph(
        self, task: Any, mode: Any, signature: Any, *, lift: Any = (), answers: Any = None
    ) -> Any:
        parameters = tuple((n, p.requires_grad) for n, p in task.network.named_parameters())
        modes = tuple(m.training for m in task.network.modules())
        marks = [str(vars(m).get("_graphsplit_placement")) for m in task.network.modules()]
        forms = [(name, b.dtype, b.shape) for name, b in named_tensors(task.network).items()]
        options = (modes, *marks, *forms, task.autocast, task.with_loss, str(task.dynamic_dims))
        look = (str(task.network), plain_attributes(task.network), str(task.loss_fn))
        key = (look, options, parameters, mode, signature.text)
        is_marked = any(
            "_graphsplit_opaque" in vars(m) or any(map(_is_of_a_test, vars(m)[_HOOKS].values()))
            for m in task.network.modules()
        )
        if key in self._graphs and not is_marked and not lift:
            moved = moved_to(self._graphs[key], task)
            if moved.state.guards.hold():
                return moved
        graph = _capture_graph(task, mode, signature, lift=lift, answers=answers)
        if graph.asks or answers:  # of one worker alone: each has its answers
            return graph
        is_own = keeps_tensors(graph.state) or is_of_one_network(graph)
        if not lift and not is_marked and not is_own:
            self._graphs[key] = graph
        return graph


CAPTURES = _Captures()
_capture_graph = passes.capture_graph


def _turns_of(replicator: Any) -> Turns:
    turns: Turns = replicator._job._cluster.turns
    return turns
