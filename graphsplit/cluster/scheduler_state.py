"""Every rule of the scheduler, as a state machine without I/O, clock or threads.

``handle`` maps an event and a clock reading to effects; the shell in ``scheduler`` carries them
out. All states, messages and their order are written down in docs/explanation/membership.md::

    forming ──all came──> planned ──all ready──> running ──all at the finish──> draining
       │                     │  ^                   │                              │
       │                 a worker is lost, and the job recovers                all left
       │                     v  └──all are back──┐  v                              v
       │                  recovering(generation + 1)                            finished
       └── timeout, failure, loss, disagreement, Ctrl-C ──> failed(cause) ──all left──> over

Times are seconds of any clock that does not run backwards.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from graphsplit.cluster import causes
from graphsplit.cluster.events import (
    Connected,
    Disconnected,
    Drop,
    Effect,
    Event,
    Exit,
    GiveUp,
    Interrupted,
    JobOver,
    Log,
    Malformed,
    Persist,
    ProcessEnded,
    Received,
    Refuse,
    Send,
    Tick,
)
from graphsplit.cluster.formation import bit_warnings, choose_seed, misfit, missing_ranks, refusal
from graphsplit.cluster.image import JobImage
from graphsplit.cluster.limits import (
    FORMING_REPORT_INTERVAL_S,
    FROZEN_AFTER_S,
    LEAVE_TIMEOUT_S,
    MAX_UNEXPLAINED_RECOVERIES,
    REGISTER_TIMEOUT_S,
    TEXT_TIMEOUT_S,
)
from graphsplit.cluster.meetings import Dispute, Meeting, place_name
from graphsplit.cluster.messages import (
    STOPPED,
    Abort,
    Accepted,
    Arrive,
    Departed,
    Failed,
    FailureNoted,
    Formed,
    Heartbeat,
    Leave,
    Peer,
    Place,
    Progress,
    Ready,
    Recovering,
    Register,
    Rejoin,
    SchedulerMessage,
    Started,
    StopSoon,
    Text,
    TextWanted,
    WorkerMessage,
)
from graphsplit.cluster.roster import NO_NODE, Roster, Worker
from graphsplit.cluster.rules import EX_TEMPFAIL, JobIdentity, JobRules
from graphsplit.cluster.status import JobStatus, WorkerStatus
from graphsplit.cluster.suspicion import Suspicion
from graphsplit.cluster.text import forming_line, join_numbers, where, who
from graphsplit.cluster.watchdog import Watchdog, stall_report
from graphsplit.errors import STOPPED_STATUS
from graphsplit.failure import FailureCause


class Phase(Enum):
    """How far the job has come."""

    FORMING = "forming"
    PLANNED = "planned"
    RUNNING = "running"
    RECOVERING = "recovering"
    DRAINING = "draining"
    FINISHED = "finished"
    FAILED = "failed"


_HEALTHY = frozenset({Phase.FORMING, Phase.PLANNED, Phase.RUNNING, Phase.RECOVERING})
_ENDED = "ended"


class SchedulerState:
    """The scheduler's state. Not thread-safe; one caller feeds it events in order.

    Attributes:
        phase: How far the job has come.
        generation: The generation that is planned or runs, or is to be formed next.
        is_over: Whether the scheduler may go: nobody is left to be told anything.
    """

    def __init__(self, rules: JobRules, identity: JobIdentity, now: float) -> None:
        self._rules = rules
        self._identity = identity
        self.phase = Phase.FORMING
        self.generation = identity.generation
        self.is_over = False
        self._seed: int | None = None
        self._roster = Roster(rules.num_workers)
        self._strangers: dict[int, float] = {}
        self._spares: dict[int, Register] = {}
        self._former: dict[int, Worker] = {}
        self._absent: dict[str, Worker] = {}
        self._offering: set[str] = set()
        self._ready: set[str] = set()
        self._meeting = Meeting(rules.num_workers)
        self._dispute: Dispute | None = None
        self._suspicion = Suspicion()
        self._recovers_from: FailureCause | None = None
        self._num_unexplained = 0
        self._num_refused = 0
        self._num_to_come = 0
        self._num_recoveries = 0
        self._is_stopping = False
        self._watchdog = Watchdog(rules.receive_timeout_s)
        self._started = now
        self._since = now
        self._now = now
        self._last_tick = now
        self._next_report = now + FORMING_REPORT_INTERVAL_S
        self._leave_deadline = 0.0
        self._exit = Exit(0)
        self._effects: list[Effect] = []
        self._peers: tuple[Peer, ...] = ()
        self._warnings: tuple[str, ...] = ()

    @classmethod
    def restored(cls, rules: JobRules, image: JobImage, now: float) -> SchedulerState:
        """The state that another scheduler wrote down; its workers are expected to come back."""
        state = cls(rules, JobIdentity(image.job, image.seed, image.generation), now)
        state._seed = image.seed
        for rank, one in sorted(image.members.items()):
            away = Worker(NO_NODE, one, last_seen=now, last_change=now, is_connected=False)
            state._roster.fill(away, rank)
        state._recovers_from = image.cause
        if image.phase == "planned":
            # Nobody has run in it; who knows of it gives it up.
            state.phase, state.generation = Phase.RECOVERING, image.generation + 1
            state._recovers_from = FailureCause("lost", "the scheduler was lost and is back")
        elif image.phase == _ENDED:
            raise ValueError("a job that has ended cannot be restored")
        else:
            state.phase = Phase(image.phase)
        if state.phase is Phase.FAILED and image.cause is not None:
            state._exit = Exit(state._failure_status(image.cause), image.cause)
        # Workers that try again only now and then must hear how it ended.
        state._leave_deadline = now + rules.node_timeout_s
        return state

    @property
    def job(self) -> str:
        """The job's id."""
        return self._identity.job

    def open(self) -> list[Effect]:
        """What is to be done before the first event."""
        self._effects = []
        if len(self._roster):
            name = self.phase.value
            self._log(
                f"back from the journal: generation {self.generation}, {name}", event="restored"
            )
            self._persist()
        return self._effects

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event in, and return what is to be done, in order."""
        self._effects = []
        self._now = now
        if self.is_over:
            return []
        match event:
            case Connected():
                self._strangers[event.node] = now
            case Received():
                self._receive(event.node, event.message, event.generation)
            case Malformed():
                self._protest(event.node, f"sent a malformed message: {event.reason}")
            case Disconnected():
                self._disconnect(event.node)
            case Interrupted():
                self._interrupt(event)
            case ProcessEnded():
                self._note_end(event)
            case Tick():
                self._tick()
        self._settle()
        return self._effects

    # Messages.

    def _receive(self, node: int, message: WorkerMessage, generation: int) -> None:
        if isinstance(message, Register):
            self._register(node, message)
            return
        worker = self._roster.get(node)
        if worker is None:
            # Somebody who waits for a rank has a stream, and beats.
            if node not in self._spares:
                self._protest(node, f"sent {type(message).__name__} before it was registered")
            return
        worker.last_seen = self._now
        is_present = generation == self.generation
        match message:
            case Heartbeat():
                self._note_progress(worker, message, is_present=is_present)
            case Failed():
                self._report(worker, message.cause, is_present=is_present)
            case Leave():
                worker.is_leaving = True
            case Ready():
                self._note_ready(worker, message)
            case Rejoin():
                self._note_offer(worker, message)
            case Arrive():
                self._arrive(worker, message, is_present=is_present)
            case Text():
                self._add_text(worker, message, is_present=is_present)

    def _protest(self, node: int, what: str) -> None:
        """A node broke the protocol: a stranger is refused, a worker ends the job."""
        worker = self._roster.get(node)
        if worker is None:
            if node in self._strangers or node in self._spares:
                self._refuse(node, what)
        elif self._is_healthy:
            self._fail(worker.cause("refused", f"the scheduler refused it: it {what}"))

    def _note_progress(self, worker: Worker, beat: Heartbeat, *, is_present: bool) -> None:
        if is_present:
            progress = max(worker.progress, beat.progress)
            if (progress, beat.position) != (worker.progress, worker.position):
                worker.last_change = self._now
            worker.progress, worker.position = progress, beat.position
            worker.location = beat.location
        if beat.wants_stop:
            self._stop_soon(f"worker {worker.rank} was asked to end")
        if beat.watched and self.phase is Phase.RUNNING:
            asked = set(beat.watched)
            known = {one.rank: one.progress for one in self._workers_of(asked)}
            self._send(worker, Progress(known))

    def _stop_soon(self, why: str) -> bool:
        """Have all workers end in order. False if they are told already, or not there to be told.

        Workers repeat their wish by every heartbeat, until the job runs.
        """
        if self._is_stopping or self.phase is not Phase.RUNNING:
            return False
        self._is_stopping = True
        self._log(f"{why}: all workers leave when their step is done", event="stopping")
        self._broadcast(StopSoon())
        return True

    def _workers_of(self, ranks: set[int]) -> list[Worker]:
        """Some workers by rank, once ranks are final and all are held."""
        in_order = self._roster.in_order
        return [in_order[rank] for rank in sorted(ranks) if rank < len(in_order)]

    def _report(self, worker: Worker, cause: FailureCause, *, is_present: bool) -> None:
        self._send(worker, FailureNoted())
        if not self._is_healthy:
            return
        if cause.is_retryable and not is_present:
            return  # what it saw of a membership that is over; see [Note: fences]
        # Who it was is what the registration says; only the worker knows the rest.
        known = worker.cause(cause.kind, cause.message, traceback=cause.traceback)
        position = cause.position or worker.position
        known = replace(known, position=position, location=cause.location)
        self._suspicion.report(known, self._now)

    # Registration.

    def _register(self, node: int, new: Register) -> None:
        if self._roster.get(node) is not None or node in self._spares:
            self._protest(node, "registered twice")
            return
        known = self._roster.of(new.incarnation)
        if known is not None and new.attempt < known.attempt:
            self._refuse(node, "it has opened another stream since", new)
        elif new.resume is not None:
            self._resume(node, new, known)
        elif self.phase is Phase.FAILED and self._exit.cause is not None:
            self._tell_latecomer(node, self._exit.cause)
        elif not self._is_healthy:
            self._refuse(node, "the job is ending", new)
        elif known is not None and self._rules.workers_reconnect:
            self._come_again(known, node, new)
        elif self.phase is Phase.FORMING:
            self._enlist(node, new)
        else:
            self._offer_place(node, new)

    def _tell_latecomer(self, node: int, cause: FailureCause) -> None:
        self._strangers.pop(node, None)
        self._num_to_come -= 1
        self._effects += [Send(node, self._accepted()), Send(node, Abort(cause))]

    def _enlist(self, node: int, new: Register) -> None:
        reason = refusal(new, self._roster.holders(new), rules=self._rules.fitting)
        if reason is not None:
            self._refuse(node, reason, new)
            return
        self._strangers.pop(node, None)
        self._absent.pop(new.incarnation, None)
        self._roster.add(Worker(node, new, last_seen=self._now, last_change=self._now))
        self._log(f"{who(new)} registered", event="registered")
        self._effects.append(Send(node, self._accepted()))
        if self._roster.is_full:
            self._plan()

    def _offer_place(self, node: int, new: Register) -> None:
        """A new worker while all ranks were given out: it waits until one is free, if it may."""
        holders = self._roster.holders(new)
        rules = self._rules.fitting
        waits = self._rules.waits_for_rejoin
        reason = (
            misfit(new, holders.first, rules=rules) if waits else refusal(new, holders, rules=rules)
        )
        for spare in self._spares.values() if reason is None else ():
            if new.node_id == spare.node_id:
                reason = f"another process with the name {new.node_id!r} waits already"
        if reason is not None:
            self._refuse(node, reason, new)
            return
        self._strangers.pop(node, None)
        self._spares[node] = new
        self._effects.append(Send(node, self._accepted()))
        self._log(
            f"{who(new)} registered, and waits for a rank that is free", event="spare_registered"
        )
        if self.phase is Phase.RECOVERING:
            self._fill()

    def _come_again(self, worker: Worker, node: int, new: Register) -> None:
        """A worker that had not heard of any plan lost its stream, and registers again."""
        self._attach(worker, node, new)
        if self.phase is Phase.PLANNED:
            self._send(worker, self._formed_for(worker))
        elif self.phase is Phase.RECOVERING:
            self._offering.add(new.incarnation)
            self._fill()

    def _resume(self, node: int, new: Register, known: Worker | None) -> None:
        assert new.resume is not None
        is_ours = new.resume.job == self._identity.job
        worker = (known or self._revived(new)) if is_ours else None
        if worker is None:
            self._refuse(
                node,
                f"it was worker {new.resume.rank} of job {new.resume.job} in generation "
                f"{new.resume.generation}, and is not expected any more: the job went on without "
                f"it, or this scheduler serves another one",
                new,
            )
            return
        self._attach(worker, node, new)
        match self.phase:
            case Phase.PLANNED:
                self._send(worker, self._formed_for(worker))
            case Phase.RUNNING:
                self._send(worker, Started(self.generation))
                self._repeat_stop(worker)
                self._catch_up(new.resume.num_departed)
            case Phase.RECOVERING:
                self._send(worker, self._recovering())
            case Phase.FAILED if self._exit.cause is not None:
                self._send(worker, Abort(self._exit.cause))

    def _revived(self, new: Register) -> Worker | None:
        """The worker that was given up and is back before another one took its rank."""
        assert new.resume is not None
        lost = self._former.get(new.resume.rank)
        if self.phase is not Phase.RECOVERING or lost is None:
            return None
        if lost.registration.incarnation != new.incarnation:
            return None
        del self._former[new.resume.rank]
        self._absent.pop(new.incarnation, None)
        lost.node, lost.is_connected = NO_NODE, False
        self._roster.fill(lost, new.resume.rank)
        self._persist()
        return lost

    def _attach(self, worker: Worker, node: int, new: Register) -> None:
        self._strangers.pop(node, None)
        if worker.is_connected:
            self._effects.append(Drop(worker.node))
        self._roster.attach(worker, node)
        # In planned, what the others were told must stay true.
        kept = worker.registration.endpoints if self.phase is Phase.PLANNED else new.endpoints
        worker.registration = replace(worker.registration, endpoints=kept, attempt=new.attempt)
        worker.last_seen = worker.last_change = self._now
        worker.is_lost = worker.is_leaving = False
        self._suspicion.withdraw_loss(worker.rank)
        self._log(f"worker {worker.rank} ({where(worker.registration)}) is back", event="returned")
        self._send(worker, self._accepted())

    def _refuse(self, node: int, reason: str, new: Register | None = None) -> None:
        self._strangers.pop(node, None)
        self._spares.pop(node, None)
        self._num_refused += 1
        name = who(new) if new is not None else "a connection"
        self._log(f"refused {name}: {reason}", event="refused", level="warning")
        self._effects.append(Refuse(node, reason))

    # A generation: planned, ready, running.

    def _plan(self) -> None:
        self._roster.seal()
        self.phase = Phase.PLANNED
        self._ready.clear()
        self._former.clear()
        self._absent.clear()
        by_rank = self._roster.registrations
        if self._seed is None:
            self._seed = choose_seed(by_rank, self._identity.seed)
        self._persist()
        self._peers = tuple(worker.peer() for worker in self._roster)
        self._warnings = bit_warnings(by_rank)
        for worker in self._roster:
            # A rank is decided just now: from here on, silence and progress are counted.
            worker.last_change = self._now
            self._send(worker, self._formed_for(worker))
        took_s = self._now - self._since
        self._log(f"all {len(self._peers)} workers registered after {took_s:.1f} s", event="formed")
        for one in self._roster:
            self._log(f"rank {one.rank}: {who(one.registration)}", event="rank")
        for warning in self._warnings:
            self._log("warning: " + warning, event="warning", level="warning")

    def _formed_for(self, worker: Worker) -> Formed:
        assert self._seed is not None, "seeds are chosen when ranks are"
        return Formed(
            rank=worker.rank,
            job=self._identity.job,
            generation=self.generation,
            seed=self._seed,
            peers=self._peers,
            warnings=self._warnings,
        )

    def _note_ready(self, worker: Worker, ready: Ready) -> None:
        if self.phase is not Phase.PLANNED or ready.generation != self.generation:
            return
        self._ready.add(worker.registration.incarnation)
        if len(self._ready) == self._rules.num_workers:
            self.phase = Phase.RUNNING
            self._persist()
            self._broadcast(Started(self.generation))
            for one in self._roster:
                self._repeat_stop(one)

    def _repeat_stop(self, worker: Worker) -> None:
        if self._is_stopping:
            self._send(worker, StopSoon())

    # Recovery.

    def _can_recover(self, cause: FailureCause) -> bool:
        return (
            self._rules.waits_for_rejoin
            and cause.kind == "lost"
            and self.phase is not Phase.FORMING
            and self._num_unexplained < MAX_UNEXPLAINED_RECOVERIES
        )

    def _recover(self, cause: FailureCause) -> None:
        lost = [worker for worker in self._roster if worker.is_lost]
        for worker in lost:
            self._roster.remove(worker)
            self._absent[worker.registration.incarnation] = worker
            self._former[worker.rank] = worker
            self._offering.discard(worker.registration.incarnation)
            if worker.is_connected:
                self._effects.append(Drop(worker.node))
        self._suspicion = Suspicion()
        self._num_unexplained = 0 if lost else self._num_unexplained + 1
        is_first = self.phase is not Phase.RECOVERING
        if is_first:
            self._num_recoveries += 1
            self._leave_generation(cause)
        self._persist()
        if is_first:
            self._log(
                f"recovering to generation {self.generation} from " + cause.describe(),
                event="recovering",
                level="warning",
            )
            self._broadcast(self._recovering())
        self._fill()

    def _leave_generation(self, cause: FailureCause) -> None:
        self.phase = Phase.RECOVERING
        self.generation += 1
        self._recovers_from = cause
        self._since = self._now
        self._next_report = self._now + FORMING_REPORT_INTERVAL_S
        self._offering.clear()
        self._meeting = Meeting(self._rules.num_workers)
        self._dispute = None
        for worker in self._roster:
            worker.is_finished = False
            worker.progress = 0

    def _recovering(self) -> Recovering:
        assert self._recovers_from is not None
        return Recovering(self.generation, self._recovers_from)

    def _note_offer(self, worker: Worker, offer: Rejoin) -> None:
        if self.phase is not Phase.RECOVERING or offer.generation != self.generation:
            return
        worker.registration = replace(worker.registration, endpoints=offer.endpoints)
        self._offering.add(worker.registration.incarnation)
        self._fill()

    def _fill(self) -> None:
        """Give vacant ranks to those who wait for one; plan when all are there."""
        vacant = [] if self._roster.is_full else self._roster.vacant
        for rank in vacant:
            nodes = sorted(self._spares, key=lambda node: self._spares[node].wished_rank is None)
            fitting = (n for n in nodes if self._spares[n].wished_rank in (rank, None))
            node = next(fitting, None)
            if node is None:
                continue
            new = self._spares.pop(node)
            worker = Worker(node, new, last_seen=self._now, last_change=self._now)
            self._roster.fill(worker, rank)
            self._offering.add(new.incarnation)
            self._former.pop(rank, None)
            self._log(f"{who(new)} takes rank {rank}", event="rank")
        if self._roster.is_full and len(self._offering) == self._rules.num_workers:
            self._plan()

    # Meetings.

    def _arrive(self, worker: Worker, arrival: Arrive, *, is_present: bool) -> None:
        if self.phase is Phase.DRAINING and arrival.place is Place.FINISH:
            self._let_go(worker, arrival)
        if not self._is_healthy or not is_present:
            return
        waits_at = self._meeting.waits_at(worker.rank)
        if self.phase is Phase.RUNNING and arrival.number <= self._meeting.num_departed:
            self._let_go(worker, arrival)
            return
        if arrival == waits_at:
            return
        number = self._meeting.num_departed + 1
        if self.phase is not Phase.RUNNING or waits_at is not None or arrival.number != number:
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
        self._num_unexplained = 0
        if arrival.place is Place.FINISH:
            self._exit = Exit(STOPPED_STATUS if arrival.name == STOPPED else 0)
            end = "stopped in order" if arrival.name == STOPPED else "finished"
            self._log(f"all workers have {end}", event=arrival.name or "finished")
            self.phase = Phase.DRAINING
            self._effects.append(JobOver())
            self._leave_deadline = self._now + LEAVE_TIMEOUT_S
            self._persist()
        self._broadcast(Departed(arrival.place, arrival.name, arrival.number))

    def _let_go(self, worker: Worker, arrival: Arrive) -> None:
        """The others are gone from there already; this worker missed the news."""
        self._send(worker, Departed(arrival.place, arrival.name, arrival.number))

    def _catch_up(self, num_departed: int) -> None:
        """A worker knows of more departures than this scheduler, which was away."""
        for worker in self._workers_of(set(self._meeting.catch_up(num_departed))):
            arrival = self._meeting.waits_at(worker.rank)
            assert arrival is not None
            self._meeting.leave(worker.rank)
            self._let_go(worker, arrival)

    def _start_dispute(self, name: str, ranks: tuple[int, int]) -> None:
        self._dispute = Dispute(name, ranks, self._now)
        for worker in self._roster:
            if worker.rank in ranks:
                self._send(worker, TextWanted(name))

    def _add_text(self, worker: Worker, text: Text, *, is_present: bool) -> None:
        if not self._is_healthy or not is_present:
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
        return self.phase in _HEALTHY

    def _disconnect(self, node: int) -> None:
        self._strangers.pop(node, None)
        if (spare := self._spares.pop(node, None)) is not None:
            self._log(f"{who(spare)} does not wait for a rank any more", event="spare_left")
        worker = self._roster.get(node)
        if worker is None or not worker.is_connected:
            return
        worker.is_connected = False
        if self._is_healthy:
            self._lose(worker, causes.LEFT_EARLY if worker.is_leaving else causes.BROKEN)

    def _lose(self, worker: Worker, message: str) -> None:
        if worker.is_lost:
            return
        worker.is_lost = True
        if self.phase is Phase.FORMING and self._rules.waits_for_rejoin:
            self._log(worker.cause("lost", message).headline, event="worker_lost")
            self._roster.remove(worker)
            self._absent[worker.registration.incarnation] = worker
            self._effects.append(Drop(worker.node))
            return
        self._suspicion.observe_loss(worker.cause("lost", message), self._now)

    def _note_end(self, event: ProcessEnded) -> None:
        """A process has ended for good. If it was one of ours, its stream may not tell us so."""
        if not self._is_healthy:
            return
        worker = next((one for one in self._roster if one.is_process(event.host, event.pid)), None)
        cause = causes.ended(event.rank, event.host, event.pid, event.how, event.error)
        if self.phase is Phase.FORMING:
            self._fail(cause)
        elif worker is not None:
            self._lose(worker, causes.ended_process(event.how))
        elif self.phase is Phase.RECOVERING and event.rank in self._roster.vacant:
            self._fail(cause)

    def _interrupt(self, event: Interrupted) -> None:
        if not self._is_healthy:
            # Told twice, or told while everyone is leaving anyway: do not wait any more.
            self._end()
            return
        has_begun = any(one.location.step is not None for one in self._roster)
        may_wait = event.signal_name == "SIGTERM" and has_begun
        if may_wait and self._stop_soon("the scheduler got SIGTERM"):
            return
        message = f"the job was interrupted by {event.signal_name}"
        self._fail(FailureCause("interrupted", message), status=128 + event.signal_number)

    def _fail(self, cause: FailureCause, *, status: int | None = None) -> None:
        if cause.kind == "timeout" and self.phase is Phase.RUNNING:
            report = stall_report(self.status(self._now), self._still_s())
            self._log(report, event="stalled", level="error")
        if self.phase is Phase.FORMING and cause.kind in ("lost", "exception"):
            # The others are on their way: they are to hear of it, and not to look for nobody.
            is_known = any(one.is_process(cause.host, cause.pid) for one in self._roster)
            self._num_to_come = self._rules.num_workers - len(self._roster) - (not is_known)
        self.phase = Phase.FAILED
        self._leave_deadline = self._now + LEAVE_TIMEOUT_S
        self._exit = Exit(self._failure_status(cause) if status is None else status, cause)
        told = cause.describe() if cause.is_told_by_worker else cause.story()
        self._log(f"the job failed: {told}", event="failed", level="error")
        self._persist()
        self._broadcast(Abort(cause))
        for node in self._spares:
            self._effects.append(Send(node, Abort(cause)))
        for worker in self._roster:
            if worker.is_lost and worker.is_connected:  # frozen: it will not leave by itself
                self._give_up(worker, causes.unheard(self._rules.node_timeout_s), is_final=True)

    def _failure_status(self, cause: FailureCause) -> int:
        if cause.kind == "interrupted":
            return 130
        return EX_TEMPFAIL if self._rules.restarts and cause.is_retryable else 1

    def _settle(self) -> None:
        """Act on what the event made true: a root cause is known, or everyone has left."""
        cause = self._suspicion.due(self._now) if self._is_healthy else None
        if cause is not None and self._can_recover(cause):
            self._recover(cause)
        elif cause is not None:
            self._fail(cause)
        is_awaited = self._num_to_come > 0 or any(self._is_expected(one) for one in self._roster)
        if not self._is_healthy and not is_awaited:
            self._end()

    def _is_expected(self, worker: Worker) -> bool:
        """Whether this worker has yet to hear how the job ended, or to leave."""
        if worker.is_lost:
            return False
        is_away = not worker.is_leaving and self._rules.workers_reconnect
        return worker.is_connected or is_away

    def _end(self) -> None:
        for node in [*self._strangers, *self._spares]:
            self._refuse(node, "the job is ending")
        self.is_over = True
        if self.phase is Phase.DRAINING:
            self.phase = Phase.FINISHED
        self._persist()
        self._effects.append(self._exit)

    # Time.

    def _tick(self) -> None:
        self._forgive_own_silence()
        for node, since in list(self._strangers.items()):
            if self._now - since >= REGISTER_TIMEOUT_S:
                self._refuse(node, f"it did not register within {REGISTER_TIMEOUT_S:g} s")
        if self.phase in (Phase.FORMING, Phase.PLANNED, Phase.RECOVERING):
            self._tick_incomplete()
        if self.phase is Phase.RUNNING:
            self._tick_meeting()
            self._tick_watchdog()
        if self._is_healthy:
            self._tick_silence()
            self._tick_absent()
        elif self._now >= self._leave_deadline:
            left = [worker for worker in self._roster if self._is_expected(worker)]
            for worker in left:
                self._give_up(worker, causes.LINGERED, is_final=True)
            if left:
                ranks = join_numbers(worker.rank for worker in left)
                self._log(
                    f"workers {ranks} did not leave in {LEAVE_TIMEOUT_S:g} s",
                    event="lingering",
                    level="warning",
                )
            self._end()

    def _forgive_own_silence(self) -> None:
        """If this process was frozen, what the workers sent meanwhile is not read yet."""
        gap = self._now - self._last_tick
        self._last_tick = self._now
        if gap > FROZEN_AFTER_S:
            for worker in self._roster:
                worker.last_seen += gap

    def _tick_incomplete(self) -> None:
        """Not all workers are there, or ready: say so now and then, and not for ever."""
        is_late = self._now - self._since >= self._rules.topo_timeout_s
        if not is_late and self._now < self._next_report:
            return
        self._next_report += FORMING_REPORT_INTERVAL_S
        if self._recovers_from is not None:
            self._tick_recovering(is_late=is_late)
            return
        missing = missing_ranks(self._roster.registrations, self._rules.num_workers)
        line = forming_line(self._rules.num_workers, missing)
        if is_late:
            self._fail(causes.incomplete(self._rules.topo_timeout_s, line, self._num_refused))
        else:
            self._log(line, event="incomplete")

    def _tick_recovering(self, *, is_late: bool) -> None:
        assert self._recovers_from is not None
        vacant = self._roster.vacant
        offering = self._offering
        slow = [one.rank for one in self._roster if one.registration.incarnation not in offering]
        if is_late:
            timeout_s = self._rules.topo_timeout_s
            self._fail(causes.unrecovered(self._recovers_from, timeout_s, vacant, slow))
            return
        self._log(
            f"generation {self.generation}: nobody yet for ranks {join_numbers(vacant) or 'none'}; "
            f"not ready to go on: workers {join_numbers(slow) or 'none'}",
            event="incomplete",
        )

    def _tick_silence(self) -> None:
        timeout_s = self._rules.node_timeout_s
        for worker in list(self._roster):
            if self._now - worker.last_seen <= timeout_s:
                continue
            was_here = worker.is_connected
            self._lose(
                worker, causes.silent(timeout_s) if was_here else causes.did_not_return(timeout_s)
            )

    def _tick_absent(self) -> None:
        """Who was lost and does not come back may be frozen: whoever started it may replace it."""
        timeout_s = self._rules.node_timeout_s
        for incarnation, worker in list(self._absent.items()):
            if self._now - worker.last_seen > timeout_s:
                del self._absent[incarnation]
                self._give_up(worker, causes.unheard(timeout_s))

    def _give_up(self, worker: Worker, why: str, *, is_final: bool = False) -> None:
        pid = worker.registration.pid
        self._effects.append(GiveUp(worker.rank, pid, why, is_final))

    def _tick_meeting(self) -> None:
        if self._dispute is not None:
            if self._now - self._dispute.since >= TEXT_TIMEOUT_S:
                self._fail(FailureCause("disagreement", self._dispute.describe()))
            return
        place = self._meeting.open_place
        # At the end of the job some may have much left to do; they are alive, or they are lost.
        if place is None or place.place is Place.FINISH:
            return
        timeout_s = self._rules.receive_timeout_s
        missing = self._workers_of(set(self._meeting.missing))
        latest = max([self._meeting.last_arrival, *(one.last_change for one in missing)])
        if self._now - latest > timeout_s:
            self._fail(causes.stalled(missing, place, timeout_s))

    def _tick_watchdog(self) -> None:
        still_s = self._still_s()
        if self.phase is Phase.RUNNING and self._watchdog.is_due(still_s):
            report = stall_report(self.status(self._now), still_s)
            self._log(report, event="stalled", level="warning")

    def _still_s(self) -> float:
        """How long nobody has made progress, of those who still have something to do."""
        changes = [one.last_change for one in self._roster if not one.is_finished]
        return self._now - max(changes, default=self._now)

    def status(self, now: float) -> JobStatus:
        """What is going on, for those who ask."""
        return JobStatus(
            job=self._identity.job,
            phase=self.phase.value,
            generation=self.generation,
            num_workers=self._rules.num_workers,
            seconds=max(0.0, now - self._started),
            workers=tuple(
                self._worker_status(one, now)
                for one in sorted(self._roster, key=lambda one: one.rank)
            ),
            cause=self._exit.cause or self._recovers_from,
            num_refused=self._num_refused,
            num_recoveries=self._num_recoveries,
            recovery=self._rules.recovery,
        )

    def _worker_status(self, worker: Worker, now: float) -> WorkerStatus:
        arrival = self._meeting.waits_at(worker.rank)
        new = worker.registration
        return WorkerStatus(
            rank=worker.rank,
            node_id=new.node_id,
            host=new.host,
            pid=new.pid,
            state=worker.state,
            progress=worker.progress,
            position=worker.position,
            location=worker.location,
            meets_at="" if arrival is None else place_name(arrival),
            heard_s=max(0.0, now - worker.last_seen),
            still_s=max(0.0, now - worker.last_change),
        )

    # Effects.

    def _accepted(self) -> Accepted:
        return Accepted(self._identity.job, self._rules.recovery, self._rules.keeps_journal)

    def _persist(self) -> None:
        if not self._rules.keeps_journal or self._seed is None:
            return
        cause = self._recovers_from if self.phase is Phase.RECOVERING else self._exit.cause
        image = JobImage(
            job=self._identity.job,
            seed=self._seed,
            num_workers=self._rules.num_workers,
            recovery=self._rules.recovery,
            phase=_ENDED if self.is_over else self.phase.value,
            generation=self.generation,
            members={worker.rank: worker.registration for worker in self._roster},
            cause=cause,
        )
        self._effects.append(Persist(image))

    def _send(self, worker: Worker, message: SchedulerMessage) -> None:
        if worker.is_connected:
            self._effects.append(Send(worker.node, message))

    def _broadcast(self, message: SchedulerMessage) -> None:
        for worker in self._roster:
            self._send(worker, message)

    def _log(self, line: str, *, event: str, level: str = "info") -> None:
        self._effects.append(Log(line, event, level))
