"""Every rule of the scheduler, as a state machine without I/O, clock or threads.

``handle`` maps an event and a clock reading to effects; the shell in ``scheduler`` carries them
out::

    forming ──all registered──> running ──all at the finish──> releasing ──all left──> ended (0)
       │                           │
       └── timeout, loss, Ctrl-C ──┴── failure, loss, disagreement ──> aborting ──all left──> ended

Times are seconds of any clock that does not run backwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from graphsplit.cluster.events import (
    Connected,
    Disconnected,
    Effect,
    Event,
    Exit,
    Interrupted,
    Log,
    Malformed,
    Received,
    Refuse,
    Send,
    Tick,
)
from graphsplit.cluster.formation import bit_warnings, choose_seed, missing_ranks, refusal
from graphsplit.cluster.limits import (
    FORMING_REPORT_INTERVAL_S,
    FROZEN_AFTER_S,
    LEAVE_TIMEOUT_S,
    PROGRESS_PUSH_INTERVAL_S,
    REGISTER_TIMEOUT_S,
    TEXT_TIMEOUT_S,
)
from graphsplit.cluster.meetings import Dispute, Meeting, place_name
from graphsplit.cluster.messages import (
    Abort,
    Accepted,
    Arrive,
    Departed,
    Failed,
    FailureNoted,
    Formed,
    Heartbeat,
    Leave,
    Place,
    Progress,
    Register,
    SchedulerMessage,
    Text,
    TextWanted,
    WorkerMessage,
)
from graphsplit.cluster.roster import Roster, Worker
from graphsplit.cluster.suspicion import Suspicion
from graphsplit.cluster.text import forming_line, join_numbers, where, who
from graphsplit.failure import FailureCause


class Phase(Enum):
    """How far the job has come."""

    FORMING = "forming"
    RUNNING = "running"
    RELEASING = "releasing"
    ABORTING = "aborting"
    ENDED = "ended"


@dataclass(frozen=True)
class JobRules:
    """What the scheduler was told about the job."""

    num_workers: int
    topo_timeout_s: float
    node_timeout_s: float
    receive_timeout_s: float


@dataclass(frozen=True)
class JobIdentity:
    """What the shell drew at random: a job id of 128 bits in hexadecimal, and a seed."""

    job: str
    seed: int
    generation: int = 1


class SchedulerState:
    """The scheduler's state. Not thread-safe; one caller feeds it events in order."""

    def __init__(self, rules: JobRules, identity: JobIdentity, now: float) -> None:
        self._rules = rules
        self._identity = identity
        self._phase = Phase.FORMING
        self._roster = Roster(rules.num_workers)
        self._strangers: dict[int, float] = {}
        self._meeting = Meeting(rules.num_workers)
        self._dispute: Dispute | None = None
        self._suspicion = Suspicion()
        self._num_refused = 0
        self._started = now
        self._now = now
        self._last_tick = now
        self._next_report = now + FORMING_REPORT_INTERVAL_S
        self._next_push = now
        self._pushed: tuple[int, ...] = ()
        self._leave_deadline = 0.0
        self._exit = Exit(0)
        self._effects: list[Effect] = []

    @property
    def phase(self) -> Phase:
        """How far the job has come."""
        return self._phase

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event in, and return what is to be done, in order."""
        self._effects = []
        self._now = now
        if self._phase is Phase.ENDED:
            return []
        match event:
            case Connected():
                self._strangers[event.node] = now
            case Received():
                self._receive(event.node, event.message)
            case Malformed():
                self._protest(event.node, f"sent a malformed message: {event.reason}")
            case Disconnected():
                self._disconnect(event.node)
            case Interrupted():
                self._interrupt(event)
            case Tick():
                self._tick()
        self._settle()
        return self._effects

    # Messages.

    def _receive(self, node: int, message: WorkerMessage) -> None:
        if isinstance(message, Register):
            self._register(node, message)
            return
        worker = self._roster.get(node)
        if worker is None:
            self._protest(node, f"sent {type(message).__name__} before it was registered")
            return
        worker.last_seen = self._now
        match message:
            case Heartbeat():
                self._note_progress(worker, message)
            case Failed():
                self._report(worker, message.cause)
            case Leave():
                worker.is_leaving = True
            case Arrive():
                self._arrive(worker, message)
            case Text():
                self._add_text(worker, message)

    def _protest(self, node: int, what: str) -> None:
        """A node broke the protocol: a stranger is refused, a worker ends the job."""
        worker = self._roster.get(node)
        if worker is None:
            if node in self._strangers:
                self._refuse(node, what)
        elif self._is_healthy:
            self._fail(worker.cause("refused", f"the scheduler refused it: it {what}"))

    def _note_progress(self, worker: Worker, beat: Heartbeat) -> None:
        progress = max(worker.progress, beat.progress)
        if (progress, beat.position) != (worker.progress, worker.position):
            worker.last_change = self._now
        worker.progress, worker.position = progress, beat.position

    def _report(self, worker: Worker, cause: FailureCause) -> None:
        self._send(worker, FailureNoted())
        if not self._is_healthy:
            return
        # Who it was is what the registration says; only the worker knows the rest.
        known = worker.cause(cause.kind, cause.message, traceback=cause.traceback)
        self._suspicion.report(
            replace(known, position=cause.position or worker.position), self._now
        )

    # Registration.

    def _register(self, node: int, new: Register) -> None:
        if self._roster.get(node) is not None:
            self._protest(node, "registered twice")
            return
        if self._phase in (Phase.ABORTING, Phase.RELEASING):
            self._refuse(node, "the job is ending", new)
            return
        reason = refusal(new, self._roster.registrations, num_workers=self._rules.num_workers)
        if reason is not None:
            self._refuse(node, reason, new)
            return
        self._strangers.pop(node, None)
        worker = Worker(node, new, last_seen=self._now, last_change=self._now)
        self._roster.add(worker)
        self._log(f"{who(new)} registered")
        self._send(worker, Accepted())
        if len(self._roster) == self._rules.num_workers:
            self._form()

    def _refuse(self, node: int, reason: str, new: Register | None = None) -> None:
        self._strangers.pop(node, None)
        self._num_refused += 1
        name = who(new) if new is not None else "a connection"
        self._log(f"refused {name}: {reason}")
        self._effects.append(Refuse(node, reason))

    def _form(self) -> None:
        self._roster.seal()
        self._phase = Phase.RUNNING
        by_rank = self._roster.registrations
        warnings = bit_warnings(by_rank)
        peers = tuple(worker.peer() for worker in self._roster)
        seed = choose_seed(by_rank, self._identity.seed)
        for worker in self._roster:
            # A rank is decided just now: from here on, silence and progress are counted.
            worker.last_change = self._now
            self._send(
                worker,
                Formed(
                    rank=worker.rank,
                    job=self._identity.job,
                    generation=self._identity.generation,
                    seed=seed,
                    peers=peers,
                    warnings=warnings,
                ),
            )
        took_s = self._now - self._started
        self._log(f"all {len(peers)} workers registered after {took_s:.1f} s")
        for peer in peers:
            self._log(f"rank {peer.rank}: {who(by_rank[peer.rank])}")
        for warning in warnings:
            self._log("warning: " + warning)

    # Meetings.

    def _arrive(self, worker: Worker, arrival: Arrive) -> None:
        if not self._is_healthy:
            return
        if self._phase is Phase.FORMING or self._meeting.is_waiting(worker.rank):
            self._protest(worker.node, f"arrived at {place_name(arrival)} out of turn")
            return
        apart = self._meeting.arrive(worker.rank, arrival, self._now)
        if apart is not None:
            self._fail(FailureCause("disagreement", apart))
            return
        worker.is_finished = arrival.place is Place.FINISH
        if not self._meeting.is_complete:
            return
        ranks = self._meeting.differing() if arrival.place is Place.AGREEMENT else None
        if ranks is None:
            self._depart(arrival)
        else:
            self._start_dispute(arrival.name, ranks)

    def _depart(self, arrival: Arrive) -> None:
        self._meeting.dissolve()
        self._broadcast(Departed(arrival.place, arrival.name))
        if arrival.place is Place.FINISH:
            self._log("all workers have finished")
            self._phase = Phase.RELEASING
            self._leave_deadline = self._now + LEAVE_TIMEOUT_S

    def _start_dispute(self, name: str, ranks: tuple[int, int]) -> None:
        self._dispute = Dispute(name, ranks, self._now)
        for worker in self._roster:
            if worker.rank in ranks:
                self._send(worker, TextWanted(name))

    def _add_text(self, worker: Worker, text: Text) -> None:
        if not self._is_healthy:
            return
        if self._dispute is None:
            self._protest(worker.node, "sent a text that nobody asked for")
            return
        wrong = self._dispute.add(worker.rank, text.name, text.chunk, last=text.last)
        if wrong is not None:
            self._protest(worker.node, wrong)
        elif self._dispute.is_complete:
            self._fail(FailureCause("disagreement", self._dispute.describe()))

    # The end.

    @property
    def _is_healthy(self) -> bool:
        return self._phase in (Phase.FORMING, Phase.RUNNING)

    def _disconnect(self, node: int) -> None:
        self._strangers.pop(node, None)
        worker = self._roster.get(node)
        if worker is None or not worker.is_connected:
            return
        worker.is_connected = False
        if not self._is_healthy or worker.is_finished:
            return
        message = (
            "lost: it left before the job was finished, and reported no error"
            if worker.is_leaving
            else "lost: its connection broke, so its process was killed or crashed"
        )
        self._lose(worker, message)

    def _lose(self, worker: Worker, message: str) -> None:
        if worker.is_lost:
            return
        worker.is_lost = True
        self._log(f"worker {worker.rank} ({where(worker.registration)}): {message}")
        self._suspicion.observe_loss(worker.cause("lost", message), self._now)

    def _interrupt(self, event: Interrupted) -> None:
        if not self._is_healthy:
            # Told twice, or told while everyone is leaving anyway: do not wait any more.
            self._end()
            return
        message = f"the job was interrupted by {event.signal_name}"
        self._fail(FailureCause("interrupted", message), status=128 + event.signal_number)

    def _fail(self, cause: FailureCause, *, status: int | None = None) -> None:
        self._phase = Phase.ABORTING
        self._leave_deadline = self._now + LEAVE_TIMEOUT_S
        if status is None:
            status = 130 if cause.kind == "interrupted" else 1
        self._exit = Exit(status, cause)
        self._log("the job failed: " + cause.describe())
        self._broadcast(Abort(cause))

    def _settle(self) -> None:
        """Act on what the event made true: a root cause is known, or everyone has left."""
        if self._is_healthy:
            cause = self._suspicion.due(self._now)
            if cause is not None:
                self._fail(cause)
        is_ending = self._phase in (Phase.ABORTING, Phase.RELEASING)
        if is_ending and not self._roster.connected:
            self._end()

    def _end(self) -> None:
        for node in list(self._strangers):
            self._refuse(node, "the job is ending")
        self._phase = Phase.ENDED
        self._effects.append(self._exit)

    # Time.

    def _tick(self) -> None:
        self._forgive_own_silence()
        for node, since in list(self._strangers.items()):
            if self._now - since >= REGISTER_TIMEOUT_S:
                self._refuse(node, f"it did not register within {REGISTER_TIMEOUT_S:g} s")
        if self._phase is Phase.FORMING:
            self._tick_forming()
        if self._phase is Phase.RUNNING:
            self._tick_meeting()
            self._push_progress()
        if self._is_healthy:
            self._tick_silence()
        elif self._now >= self._leave_deadline:
            left = [worker.rank for worker in self._roster.connected]
            if left:
                self._log(f"workers {join_numbers(left)} did not leave in {LEAVE_TIMEOUT_S:g} s")
            self._end()

    def _forgive_own_silence(self) -> None:
        """If this process was frozen, what the workers sent meanwhile is not read yet."""
        gap = self._now - self._last_tick
        self._last_tick = self._now
        if gap > FROZEN_AFTER_S:
            for worker in self._roster:
                worker.last_seen += gap

    def _tick_forming(self) -> None:
        waited_s = self._now - self._started
        missing = missing_ranks(self._roster.registrations, self._rules.num_workers)
        line = forming_line(self._rules.num_workers, missing)
        if waited_s >= self._rules.topo_timeout_s:
            refused = f"; {self._num_refused} refused" if self._num_refused else ""
            message = (
                f"not all workers came within {self._rules.topo_timeout_s:g} s "
                f"(MS_TOPO_TIMEOUT): {line}{refused}\n"
                f"  Fix: start the missing workers with this scheduler's address, or look in "
                f"their logs for why they ended"
            )
            self._fail(FailureCause("timeout", message))
        elif self._now >= self._next_report:
            self._next_report += FORMING_REPORT_INTERVAL_S
            self._log(line)

    def _tick_silence(self) -> None:
        for worker in self._roster:
            silent_s = self._now - worker.last_seen
            if worker.is_finished or not worker.is_connected:
                continue
            if silent_s > self._rules.node_timeout_s:
                self._lose(
                    worker,
                    f"lost: nothing was heard from it for {self._rules.node_timeout_s:g} s "
                    f"(MS_NODE_TIMEOUT), so it is frozen or cut off",
                )

    def _tick_meeting(self) -> None:
        if self._dispute is not None:
            if self._now - self._dispute.since >= TEXT_TIMEOUT_S:
                self._fail(FailureCause("disagreement", self._dispute.describe()))
            return
        place = self._meeting.open_place
        # At the end of the job some may have much left to do; they are alive, or they are lost.
        if place is None or place.place is Place.FINISH:
            return
        missing = self._meeting.missing
        changes = [worker.last_change for worker in self._roster if worker.rank in missing]
        if self._now - max(self._meeting.last_arrival, *changes) > self._rules.receive_timeout_s:
            self._fail(self._stalled(place, missing))

    def _stalled(self, place: Arrive, missing: list[int]) -> FailureCause:
        timeout_s = self._rules.receive_timeout_s
        message = (
            f"workers {join_numbers(missing)} did not come to {place_name(place)}, where the "
            f"others wait, and made no progress for {timeout_s:g} s (MS_RECEIVE_MSG_TIMEOUT)\n"
            f"  Fix: if they really need longer, raise MS_RECEIVE_MSG_TIMEOUT"
        )
        first = next(worker for worker in self._roster if worker.rank == missing[0])
        return first.cause("timeout", message)

    def _push_progress(self) -> None:
        values = tuple(worker.progress for worker in self._roster)
        if self._now >= self._next_push and values != self._pushed:
            self._next_push = self._now + PROGRESS_PUSH_INTERVAL_S
            self._pushed = values
            self._broadcast(Progress(values))

    # Effects.

    def _send(self, worker: Worker, message: SchedulerMessage) -> None:
        if worker.is_connected:
            self._effects.append(Send(worker.node, message))

    def _broadcast(self, message: SchedulerMessage) -> None:
        for worker in self._roster:
            self._send(worker, message)

    def _log(self, line: str) -> None:
        self._effects.append(Log(line))
