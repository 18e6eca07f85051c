"""One worker's place in a small cluster: its process, its streams, and what it does with them.

Whatever happens here happens nowhere else: what leaves a slot is an event for the scheduler, and
what comes in are messages that the scheduler sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from membership_invariants import BrokenInvariant, Standing, check_plan, check_told

from graphsplit.cluster.member.state_machine import (
    EndGeneration,
    EndJob,
    MemberEffect,
    MemberPhase,
    MemberState,
    Reconnect,
    Tell,
)
from graphsplit.cluster.scheduler.job.events import Connected, Disconnected, Event, Received
from graphsplit.cluster.scheduler.job.rules import JobRules
from graphsplit.cluster.wire.fencing import FencingVerdict, StreamGuard
from graphsplit.cluster.wire.messages import Fence, Formed, Leave, MeetingKind, Refused, Register

NODES_PER_SLOT = 100
_IS_DONE = (MemberPhase.FAILED, MemberPhase.REFUSED)
_TAKES_PART = (MemberPhase.READY, MemberPhase.RUNNING)


def slot_of(incarnation: str) -> int:
    """The slot of a life."""
    return int(incarnation.split(".")[0])


@dataclass(eq=False)
class Stream:
    """One stream: what is under way in both directions, oldest first, and whether it has an end.

    What is under way when a stream ends may still arrive, or not; then comes the end.
    """

    incarnation: str
    to_scheduler: list[tuple[Fence, Any]] = field(default_factory=list)
    to_member: list[tuple[Fence, Any]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=lambda: [0, 0])
    guards: list[StreamGuard] = field(default_factory=lambda: [StreamGuard(), StreamGuard()])
    is_cut: bool = False
    scheduler_sees_end: bool = False

    def queue(self, way: int) -> list[tuple[Fence, Any]]:
        """What is under way to the scheduler (0), or to the member (1)."""
        return self.to_member if way else self.to_scheduler

    def cut(self, *, loses: bool) -> None:
        """The stream breaks, with all that is under way or without."""
        self.is_cut = True
        if loses:
            self.to_scheduler.clear()
            self.to_member.clear()


@dataclass(eq=False)
class Process:
    """One worker's process: its state machine and what its script does next."""

    incarnation: str
    state: MemberState
    node: int | None = None
    wants_stream: bool = True
    num_attempts: int = 0


@dataclass(eq=False)
class Slot:
    """The place of one worker. Actions change it; whoever wants the former one copies it before.

    Attributes:
        number: Which one it is.
        rules: What the job is told about itself.
        process: The process that is there now.
        streams: All streams that somebody still looks at, by their node.
        num_lives: How many processes were started here.
        num_streams: How many streams were opened.
        outcome: What became of it: ``finished``, ``failed`` or ``refused``.
        hears_in_turn: Whether what is under way to it must not be heard at once.
    """

    number: int
    rules: JobRules
    process: Process | None = None
    streams: dict[int, Stream] = field(default_factory=dict)
    num_lives: int = 0
    num_streams: int = 0
    outcome: str = ""
    hears_in_turn: bool = False

    @property
    def worker(self) -> Process:
        """The process that is there."""
        assert self.process is not None
        return self.process

    @property
    def stream(self) -> Stream | None:
        """The stream of the process that is there."""
        if self.process is None or self.process.node is None:
            return None
        return self.streams[self.process.node]

    @property
    def plan(self) -> Formed | None:
        """The plan of the generation that the worker takes part in, if it does."""
        if self.process is None or self.process.state.phase not in _TAKES_PART:
            return None
        return self.process.state.formed

    @property
    def has_hope(self) -> bool:
        """Whether no worker failed here, or was refused, or is about to hear that it is."""
        phase = self.process.state.phase if self.process is not None else None
        under_way = self.stream.to_member if self.stream is not None else []
        is_refused = any(isinstance(message, Refused) for _, message in under_way)
        return self.outcome in ("", "finished") and phase not in _IS_DONE and not is_refused

    @property
    def standing(self) -> Standing:
        """What this slot claims, to be compared with others."""
        incarnation = self.process.incarnation if self.process is not None else ""
        return Standing(incarnation, self.plan, self.outcome)

    def start(self) -> None:
        """A process starts. Its life begins with the number of the slot: see ``slot_of``."""
        self.num_lives += 1
        life = f"{self.number}.{self.num_lives}"
        self.process = Process(life, MemberState("scheduler", {"at": life}))

    def connect(self) -> Event:
        """The worker opens a stream and says who it is."""
        worker = self.worker
        node = NODES_PER_SLOT * self.number + self.num_streams
        self.num_streams += 1
        worker.num_attempts += 1
        self.streams[node] = Stream(worker.incarnation)
        worker.node, worker.wants_stream = node, False
        new = Register(
            node_id=str(self.number),
            incarnation=worker.incarnation,
            role="MS_WORKER",
            num_workers=self.rules.num_workers,
            wished_rank=self.number,
            host="h",
            pid=1,
            endpoints={"at": worker.incarnation},
            recovery=self.rules.recovery,
            attempt=worker.num_attempts,
        )
        self.say(worker.state.registration(new))
        return Connected(node)

    def hear(self, node: int) -> Event | None:
        """The scheduler takes the oldest message of a stream."""
        stream = self.streams[node]
        fence, message = stream.to_scheduler.pop(0)
        verdict = stream.guards[0].check(fence)
        if verdict is FencingVerdict.TAKE:
            return Received(node, message, fence.generation)
        if verdict is FencingVerdict.BREAK:
            stream.is_cut = True
        return None

    def see_end(self, node: int) -> Event:
        """The scheduler notices that a stream has ended."""
        self.streams[node].scheduler_sees_end = True
        return Disconnected(node)

    def tell(self, node: int) -> None:
        """The worker takes the oldest message of its stream."""
        stream, state = self.streams[node], self.worker.state
        fence, message = stream.to_member.pop(0)
        verdict = stream.guards[1].check(fence)
        if verdict is FencingVerdict.BREAK:
            stream.is_cut = True
        if verdict is not FencingVerdict.TAKE:
            return
        before = (state.num_departed, state.generation)
        self._carry_out(state.handle(message, fence.generation))
        if state.num_departed > before[0] and fence.generation != before[1]:
            raise BrokenInvariant(f"a departure of generation {fence.generation} counted")
        if (plan := self.plan) is not None:
            check_plan(self.worker.incarnation, state._endpoints, plan)
        if state.phase is MemberPhase.FINISHED:
            self.outcome = "finished"

    def lose(self, node: int) -> None:
        """The worker notices that its stream has ended."""
        worker = self.worker
        assert worker.node == node
        worker.node = None
        if worker.state.phase is MemberPhase.JOINING:
            worker.wants_stream = True
        self._carry_out(worker.state.lose_stream("it ended"))

    def give_up(self) -> None:
        """The scheduler does not come back, and the worker's patience is over."""
        self._carry_out(self.worker.state.lose_scheduler("nobody answers"))

    def arrive(self) -> None:
        """The script of a worker comes to its barrier, and then to its end."""
        state = self.worker.state
        if state.num_departed:
            self.say(state.arrive(MeetingKind.FINISH))
        else:
            # Named by the generation: two generations that meet are a disagreement.
            self.say(state.arrive(MeetingKind.BARRIER, f"of generation {state.generation}"))

    def offer(self) -> None:
        """The script of a worker calls ``Job.recover``."""
        worker = self.worker
        endpoints = {"at": f"{worker.incarnation} after {worker.state.generation}"}
        self._carry_out(worker.state.offer(endpoints))

    def leave(self) -> None:
        """A worker that is done closes its stream, and its process ends."""
        phase = self.worker.state.phase
        if phase in (MemberPhase.FAILED, MemberPhase.REFUSED):
            self.outcome = phase.value
        self.say(Leave())
        if self.stream is not None:
            self.stream.is_cut = True
        self.process = None

    def say(self, message: Any) -> None:
        """The worker sends a message, if its stream is there."""
        worker, stream = self.worker, self.stream
        if stream is None or stream.is_cut:
            return
        stream.numbers[0] += 1
        state = worker.state
        fence = Fence(state.job, state.generation, worker.incarnation, stream.numbers[0])
        stream.to_scheduler.append((fence, message))

    def _carry_out(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case Tell():
                    self.say(effect.message)
                case Reconnect():
                    self.worker.wants_stream = True
                case EndJob() | EndGeneration():
                    check_told(effect.cause)
