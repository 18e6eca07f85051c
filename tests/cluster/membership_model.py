"""A small cluster as one value: both state machines, the streams between them, and what can fail.

Every action of a world gives another world. Nothing is left to chance, and no time passes unless
an action says so, so that all worlds that can be reached can be counted and looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from graphsplit.cluster.decisions.job_state import Phase
from graphsplit.cluster.events import (
    Connected,
    Disconnected,
    Drop,
    Effect,
    Event,
    Exit,
    Persist,
    Received,
    Refuse,
    Send,
    Tick,
)
from graphsplit.cluster.fencing import StreamGuard, Verdict
from graphsplit.cluster.image import JobImage, from_json, to_json
from graphsplit.cluster.limits import GRACE_S, LEAVE_TIMEOUT_S
from graphsplit.cluster.member_state import (
    BeginGeneration,
    EndGeneration,
    EndJob,
    MemberEffect,
    MemberPhase,
    MemberState,
    Reconnect,
    Tell,
)
from graphsplit.cluster.messages import Failed, Fence, Leave, Place, Refused, Register
from graphsplit.cluster.rules import JobIdentity, JobRules
from graphsplit.cluster.scheduler_state import SchedulerState
from graphsplit.failure import FailureCause

TOPO_S, NODE_S = 100.0, 1e6
RAISED = FailureCause("exception", "ValueError: the user's mistake")


class BrokenInvariant(AssertionError):
    """A world that must not be."""


@dataclass
class Stream:
    """One stream: what is under way in both directions, oldest first, and whether it has an end.

    What is under way when a stream ends may still arrive, or not; then comes the end.
    """

    slot: int
    incarnation: str
    to_scheduler: list[tuple[Fence, Any]] = field(default_factory=list)
    to_member: list[tuple[Fence, Any]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=lambda: [0, 0])
    guards: list[StreamGuard] = field(default_factory=lambda: [StreamGuard(), StreamGuard()])
    is_cut: bool = False
    scheduler_sees_end: bool = False
    member_sees_end: bool = False


@dataclass
class Process:
    """One worker's process: its state machine and what its script does next."""

    incarnation: str
    state: MemberState
    node: int | None = None
    wants_stream: bool = True
    told: FailureCause | None = None
    num_attempts: int = 0


@dataclass(frozen=True)
class Budget:
    """What may still go wrong. The workers are alike, so the first to fail is 0, then 0 or 1."""

    failures: int = 0
    kinds: frozenset[str] = frozenset()
    num_slots: int = 1


class World:
    """All of a small cluster. ``actions`` are what can happen next."""

    def __init__(self, rules: JobRules, budget: Budget) -> None:
        self.rules = rules
        self.budget = budget
        self.scheduler: SchedulerState | None = SchedulerState(rules, JobIdentity("job", 7), 0.0)
        self.image: JobImage | None = None
        self.exit: Exit | None = None
        self.streams: dict[int, Stream] = {}
        self.lives = [0] * rules.num_workers
        self.num_streams = [0] * rules.num_workers
        self.workers: list[Process | None] = [None] * rules.num_workers
        self.finished: set[int] = set()
        self.failed: set[int] = set()
        self.refused: set[int] = set()
        for slot in range(rules.num_workers):
            self._start(slot)

    # What can happen.

    def actions(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        """Every action that is possible, with its name.

        When nothing fails any more, it does not matter when a worker hears what was sent to it:
        nobody else can tell. Then only one order of those is looked at.
        """
        if not self.budget.failures:
            for name, action in self._deliveries():
                if name.startswith("worker"):
                    yield name, action
                    return
        yield from self._deliveries()
        yield from self._steps()
        yield from self._times()
        if self.budget.failures:
            yield from self._failures()

    def _deliveries(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        for node, stream in self.streams.items():
            if self.scheduler is not None and not stream.scheduler_sees_end:
                if stream.to_scheduler:
                    yield f"scheduler hears {node}", lambda w, n=node: w.hear(n)
                elif stream.is_cut:
                    yield f"scheduler sees the end of {node}", lambda w, n=node: w.see_end(n)
            worker = self.workers[stream.slot]
            if worker is not None and worker.node == node:
                if stream.to_member:
                    yield f"worker hears {node}", lambda w, n=node: w.tell(n)
                elif stream.is_cut:
                    yield f"worker sees the end of {node}", lambda w, n=node: w.lose(n)

    def _steps(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        for slot, worker in enumerate(self.workers):
            if worker is None:
                is_done = slot in self.finished | self.failed | self.refused
                if not is_done and self.rules.waits_for_rejoin:
                    yield f"{slot} starts again", lambda w, s=slot: w._start(s)
                continue
            state = worker.state
            if worker.wants_stream and worker.node is None and not state.is_over:
                if self.scheduler is not None:
                    yield f"{slot} connects", lambda w, s=slot: w.connect(s)
                elif not self._may_return:
                    yield f"{slot} gives up", lambda w, s=slot: w.give_up(s)
            if state.phase is MemberPhase.RUNNING and state.waits_at is None:
                yield f"{slot} arrives", lambda w, s=slot: w.arrive(s)
            if state.phase is MemberPhase.RECOVERING:
                yield f"{slot} recovers", lambda w, s=slot: w.offer(s)
            if state.is_over:
                yield f"{slot} leaves", lambda w, s=slot: w.leave(s)

    def _times(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        scheduler = self.scheduler
        if scheduler is None:
            if self._may_return:
                yield "scheduler returns", World.restore
            return
        if scheduler.is_over:
            return
        if scheduler._job.liveness.suspicion._known:
            yield "grace is over", lambda w: w.tick(GRACE_S)
        elif self.is_quiet:
            if scheduler._job.is_healthy:
                yield "deadline is over", lambda w: w.tick(TOPO_S)
            else:
                yield "leaving takes too long", lambda w: w.tick(LEAVE_TIMEOUT_S)

    def _failures(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        kinds = self.budget.kinds
        for slot, worker in enumerate(self.workers[: self.budget.num_slots]):
            if worker is None or worker.state.is_over:
                continue
            if "kill" in kinds:
                for lost in self._variants(worker):
                    yield f"{slot} is killed, {lost}", lambda w, s=slot, k=lost: w.kill(s, k)
            if "raise" in kinds and worker.state.phase is MemberPhase.RUNNING:
                yield f"{slot} raises", lambda w, s=slot: w.raise_in(s)
            if worker.node is None:
                continue
            if "break" in kinds and not self.streams[worker.node].is_cut:
                for lost in self._variants(worker):
                    yield f"stream of {slot} breaks, {lost}", lambda w, s=slot, k=lost: w.cut(s, k)
            if "double" in kinds and self.streams[worker.node].to_scheduler:
                yield f"doubled to scheduler, {slot}", lambda w, s=slot: w.double(s, 0)
            if "double" in kinds and self.streams[worker.node].to_member:
                yield f"doubled to worker, {slot}", lambda w, s=slot: w.double(s, 1)
            if "lose" in kinds and len(self.streams[worker.node].to_scheduler) > 1:
                yield f"lost to scheduler, {slot}", lambda w, s=slot: w.drop(s, 0)
            if "lose" in kinds and len(self.streams[worker.node].to_member) > 1:
                yield f"lost to worker, {slot}", lambda w, s=slot: w.drop(s, 1)
            if "freeze" in kinds and self._is_heard(worker):
                yield f"{slot} is silent", lambda w, s=slot: w.freeze(s)
        if "crash" in kinds and self.scheduler is not None and not self.scheduler.is_over:
            yield "scheduler is killed", World.crash

    def _variants(self, worker: Process) -> list[str]:
        stream = self.streams.get(worker.node) if worker.node is not None else None
        if stream is None or not (stream.to_scheduler or stream.to_member):
            return ["nothing lost"]
        return ["nothing lost", "all lost"]

    def _is_heard(self, worker: Process) -> bool:
        scheduler = self.scheduler
        if scheduler is None or not scheduler._job.is_healthy or scheduler.phase is Phase.FORMING:
            return False
        known = scheduler._job.roster.of(worker.incarnation)
        return known is not None and known.is_connected

    @property
    def _may_return(self) -> bool:
        return self.rules.keeps_journal and self.exit is None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing happens any more unless time passes."""
        return not any(True for _ in self._deliveries()) and not any(
            True for name, _ in self._steps()
        )

    @property
    def is_end(self) -> bool:
        """Whether the job is over for everybody."""
        is_gone = self.exit is not None or (self.scheduler is None and not self._may_return)
        return is_gone and all(one is None for one in self.workers)

    # The actions.

    def _start(self, slot: int) -> None:
        self.lives[slot] += 1
        life = f"{slot}.{self.lives[slot]}"
        self.workers[slot] = Process(life, MemberState("scheduler", {"at": life}))

    def connect(self, slot: int) -> None:
        """The worker opens a stream and says who it is."""
        worker = self.workers[slot]
        assert worker is not None
        node = 10 * slot + self.num_streams[slot]
        self.num_streams[slot] += 1
        worker.num_attempts += 1
        self.streams[node] = Stream(slot, worker.incarnation)
        worker.node, worker.wants_stream = node, False
        self._feed(Connected(node))
        new = Register(
            node_id=str(slot),
            incarnation=worker.incarnation,
            role="MS_WORKER",
            num_workers=self.rules.num_workers,
            wished_rank=slot,
            host="h",
            pid=1,
            endpoints={"at": worker.incarnation},
            recovery=self.rules.recovery,
            attempt=worker.num_attempts,
        )
        self._say(worker, worker.state.registration(new))

    def hear(self, node: int) -> None:
        """The scheduler takes the oldest message of a stream."""
        stream = self.streams[node]
        fence, message = stream.to_scheduler.pop(0)
        verdict = stream.guards[0].check(fence)
        if verdict is Verdict.TAKE:
            self._feed(Received(node, message, fence.generation))
        elif verdict is Verdict.BREAK:
            stream.is_cut = True

    def see_end(self, node: int) -> None:
        """The scheduler notices that a stream has ended."""
        self.streams[node].scheduler_sees_end = True
        self._feed(Disconnected(node))

    def tell(self, node: int) -> None:
        """A worker takes the oldest message of its stream."""
        stream = self.streams[node]
        worker = self.workers[stream.slot]
        assert worker is not None
        fence, message = stream.to_member.pop(0)
        verdict = stream.guards[1].check(fence)
        if verdict is Verdict.BREAK:
            stream.is_cut = True
        if verdict is not Verdict.TAKE:
            return
        state = worker.state
        before = (state.num_departed, state.generation)
        self._carry_out(worker, state.handle(message, fence.generation))
        if state.num_departed > before[0] and fence.generation != before[1]:
            raise BrokenInvariant(f"a departure of generation {fence.generation} counted")
        if state.phase is MemberPhase.FINISHED:
            self.finished.add(stream.slot)

    def lose(self, node: int) -> None:
        """A worker notices that its stream has ended."""
        worker = self.workers[self.streams[node].slot]
        assert worker is not None
        self.streams[node].member_sees_end = True
        worker.node = None
        if worker.state.phase is MemberPhase.JOINING:
            worker.wants_stream = True
        self._carry_out(worker, worker.state.lose_stream("it ended"))

    def give_up(self, slot: int) -> None:
        """The scheduler does not come back, and the worker's patience is over."""
        worker = self.workers[slot]
        assert worker is not None
        self._carry_out(worker, worker.state.give_up("nobody answers"))
        if not worker.state.is_over:
            worker.state.phase = MemberPhase.FAILED

    def arrive(self, slot: int) -> None:
        """The script of a worker comes to its barrier, and then to its end."""
        worker = self.workers[slot]
        assert worker is not None
        state = worker.state
        if state.num_departed:
            arrival = state.arrive(Place.FINISH)
        else:
            # Named by the generation: two generations that meet are a disagreement.
            arrival = state.arrive(Place.BARRIER, f"of generation {state.generation}")
        self._say(worker, arrival)

    def offer(self, slot: int) -> None:
        """The script of a worker calls ``Job.recover``."""
        worker = self.workers[slot]
        assert worker is not None
        endpoints = {"at": f"{worker.incarnation} after {worker.state.generation}"}
        self._carry_out(worker, worker.state.offer(endpoints))

    def leave(self, slot: int) -> None:
        """A worker that is done closes its stream, and its process ends."""
        worker = self.workers[slot]
        assert worker is not None
        if worker.state.phase is MemberPhase.FAILED:
            self.failed.add(slot)
        if worker.state.phase is MemberPhase.REFUSED:
            self.refused.add(slot)
        self._say(worker, Leave())
        if worker.node is not None:
            self.streams[worker.node].is_cut = True
        self.workers[slot] = None

    def kill(self, slot: int, lost: str) -> None:
        """A worker's process is gone."""
        self._spend()
        worker = self.workers[slot]
        assert worker is not None
        if worker.node is not None:
            self._cut(self.streams[worker.node], lost)
        self.workers[slot] = None
        if not self.rules.waits_for_rejoin:
            self.failed.add(slot)

    def cut(self, slot: int, lost: str) -> None:
        """A stream breaks; both ends live."""
        self._spend()
        worker = self.workers[slot]
        assert worker is not None and worker.node is not None
        self._cut(self.streams[worker.node], lost)

    def _cut(self, stream: Stream, lost: str) -> None:
        stream.is_cut = True
        if lost == "all lost":
            stream.to_scheduler.clear()
            stream.to_member.clear()

    def double(self, slot: int, way: int) -> None:
        """The oldest message under way comes twice."""
        self._spend()
        queue = self._queue(slot, way)
        queue.insert(0, queue[0])

    def drop(self, slot: int, way: int) -> None:
        """The oldest message under way is lost, and the stream goes on."""
        self._spend()
        self._queue(slot, way).pop(0)

    def _queue(self, slot: int, way: int) -> list[tuple[Fence, Any]]:
        worker = self.workers[slot]
        assert worker is not None and worker.node is not None
        stream = self.streams[worker.node]
        return stream.to_scheduler if way == 0 else stream.to_member

    def freeze(self, slot: int) -> None:
        """Nothing is heard from a worker for too long; later it goes on as if nothing was."""
        self._spend()
        worker = self.workers[slot]
        assert worker is not None and self.scheduler is not None
        known = self.scheduler._job.roster.of(worker.incarnation)
        assert known is not None
        known.last_seen = -2 * NODE_S
        self._feed(Tick())

    def raise_in(self, slot: int) -> None:
        """The user's code raises on a worker."""
        self._spend()
        worker = self.workers[slot]
        assert worker is not None
        self._say(worker, Failed(RAISED))
        worker.state.phase = MemberPhase.FAILED

    def crash(self) -> None:
        """The scheduler's process is gone."""
        self._spend()
        self.scheduler = None
        for stream in self.streams.values():
            stream.is_cut = stream.scheduler_sees_end = True
            stream.to_scheduler.clear()

    def restore(self) -> None:
        """Another scheduler reads the journal."""
        if self.image is None:
            self.scheduler = SchedulerState(self.rules, JobIdentity("job", 7), 0.0)
            return
        self.scheduler = SchedulerState.restored(self.rules, self.image, 0.0)
        self._apply(self.scheduler.open())

    def tick(self, after_s: float) -> None:
        """Time passes."""
        self._feed(Tick(), after_s)

    # Plumbing.

    def _spend(self) -> None:
        budget = self.budget
        self.budget = Budget(budget.failures - 1, budget.kinds, budget.num_slots + 1)

    def _say(self, worker: Process, message: Any) -> None:
        if worker.node is None or self.streams[worker.node].is_cut:
            return
        stream = self.streams[worker.node]
        stream.numbers[0] += 1
        fence = Fence(
            worker.state.job, worker.state.generation, worker.incarnation, stream.numbers[0]
        )
        stream.to_scheduler.append((fence, message))

    def _carry_out(self, worker: Process, effects: list[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case Tell():
                    self._say(worker, effect.message)
                case Reconnect():
                    worker.wants_stream = True
                case EndJob() | EndGeneration():
                    worker.told = effect.cause
                case BeginGeneration():
                    worker.told = None

    def _feed(self, event: Event, now: float = 0.0) -> None:
        scheduler = self.scheduler
        if scheduler is None:
            return
        self._apply(scheduler.handle(event, now))
        self._rewind(scheduler)

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect.node, effect.message)
                case Refuse():
                    self._send(effect.node, Refused(effect.reason))
                    self._hang_up(effect.node)
                case Drop():
                    self._hang_up(effect.node)
                case Persist():
                    self.image = from_json(to_json(effect.image))
                case Exit():
                    self.exit = effect
                    self.scheduler = None
                    for stream in self.streams.values():
                        stream.is_cut = stream.scheduler_sees_end = True

    def _send(self, node: int, message: Any) -> None:
        stream = self.streams[node]
        if stream.is_cut or self.scheduler is None:
            return
        stream.numbers[1] += 1
        job, generation = "job", self.scheduler.generation
        fence = Fence(job, generation, stream.incarnation, stream.numbers[1])
        stream.to_member.append((fence, message))

    def _hang_up(self, node: int) -> None:
        self.streams[node].is_cut = True

    def _rewind(self, scheduler: SchedulerState) -> None:
        """The clock stands at 0 between two actions."""
        job = scheduler._job
        job.now = job.liveness.last_tick = job.generation.since = 0.0
        job.generation.next_report = TOPO_S
        job.ending.leave_deadline = LEAVE_TIMEOUT_S
        job.gathering.meeting.last_arrival = 0.0
        job.door.strangers = dict.fromkeys(job.door.strangers, 0.0)
        job.door.num_refused = 0
        job.effects = []
        for worker in job.roster:
            worker.last_seen = worker.last_change = 0.0

    def forget_the_past(self) -> None:
        """Drop streams that nobody looks at any more, so that equal worlds are equal."""
        for node, stream in list(self.streams.items()):
            worker = self.workers[stream.slot]
            member_done = worker is None or worker.node != node
            if self._is_superseded(node, stream) and not stream.scheduler_sees_end:
                # Nothing that is still under way on it has an effect.
                stream.to_scheduler.clear()
                stream.is_cut = True
                self.see_end(node)
            if member_done:
                stream.to_member.clear()
            scheduler_done = stream.scheduler_sees_end or self.scheduler is None
            if member_done and scheduler_done:
                del self.streams[node]

    def _is_superseded(self, node: int, stream: Stream) -> bool:
        """Whether the scheduler listens to a later stream of the same process."""
        if self.scheduler is None:
            return False
        known = self.scheduler._job.roster.of(stream.incarnation)
        return (
            known is not None and known.node > node and node not in self.scheduler._job.door.spares
        )

    # What must always be true.

    def check(self) -> None:
        """Raise if this world must not be."""
        if self.finished and (self.failed - self._killed()):
            raise BrokenInvariant(f"{self.finished} finished and {self.failed} failed")
        self._check_ranks()
        self._check_agreement()

    def _killed(self) -> set[int]:
        return {slot for slot in self.failed if self.exit is None or self.exit.cause is None}

    def _check_ranks(self) -> None:
        held: dict[tuple[int, int], str] = {}
        for worker in self.workers:
            if worker is None or worker.state.formed is None:
                continue
            state = worker.state
            if state.phase in (MemberPhase.READY, MemberPhase.RUNNING):
                assert state.formed is not None
                place = (state.generation, state.formed.rank)
                if place in held:
                    raise BrokenInvariant(f"{held[place]} and {worker.incarnation} hold {place}")
                held[place] = worker.incarnation
                peer = state.formed.peers[state.formed.rank]
                if peer.incarnation != worker.incarnation:
                    raise BrokenInvariant(f"{worker.incarnation} was told that it is {peer}")

    def _check_agreement(self) -> None:
        cause = self.exit.cause if self.exit is not None else None
        causes = [one.told for one in self.workers if one is not None and one.told is not None]
        for one in [*causes, *([cause] if cause else [])]:
            is_given_up = "not expected" in one.message or "is ending" in one.message
            if one.kind in ("disagreement", "refused") and not is_given_up:
                raise BrokenInvariant(f"the protocol itself failed: {one.message}")


# Copies and keys. Frozen values are shared by all worlds, so they are looked at once.

_PLAIN = (str, int, float, bool, bytes, type(None), Enum, frozenset, tuple)
_frozen: dict[type, bool] = {}
_keys: dict[int, tuple[Any, int]] = {}


def _is_frozen(kind: type) -> bool:
    known = _frozen.get(kind)
    if known is None:
        is_value = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        known = _frozen[kind] = issubclass(kind, _PLAIN) or is_value
    return known


def copy(value: Any) -> Any:
    """A world that can be changed without changing this one."""
    return _copy(value, {})


def _copy(value: Any, seen: dict[int, Any]) -> Any:
    kind = type(value)
    if _is_frozen(kind):
        return value
    if kind is list:
        return [_copy(one, seen) for one in value]
    if kind is dict:
        return {key: _copy(one, seen) for key, one in value.items()}
    if kind is set:
        return set(value)
    known = seen.get(id(value))
    if known is None:
        known = seen[id(value)] = object.__new__(kind)
        known.__dict__.update({name: _copy(one, seen) for name, one in vars(value).items()})
    return known


def key(value: Any) -> Any:
    """What two worlds have in common when they are the same."""
    kind = type(value)
    if kind in (str, int, float, bool, type(None)):
        return value
    if kind is list:
        return tuple([key(one) for one in value])
    if kind is dict:
        return tuple(sorted([(str(name), key(one)) for name, one in value.items()], key=_first))
    if kind in (set, frozenset):
        return tuple(sorted(value))
    if _is_frozen(kind):
        known = _keys.get(id(value))
        if known is None:
            known = _keys[id(value)] = (value, hash(_value_key(value)))
        return known[1]
    return tuple([key(one) for one in vars(value).values()])


def _value_key(value: Any) -> Any:
    kind = type(value)
    if kind is tuple:
        return tuple(key(one) for one in value)
    if isinstance(value, Enum):
        return value.name
    return (kind.__name__, *(key(getattr(value, one.name)) for one in fields(value)))


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]
