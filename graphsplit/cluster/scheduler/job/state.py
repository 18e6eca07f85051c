"""The job as the scheduler knows it. Mutable values, and the effects they lead to; no rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from graphsplit.cluster.scheduler.job.events import Effect, Exit, Log, Refuse, Send
from graphsplit.cluster.scheduler.job.meetings import Dispute, Meetings
from graphsplit.cluster.scheduler.job.roster import Roster, Worker
from graphsplit.cluster.scheduler.job.rules import JobIdentity, JobRules
from graphsplit.cluster.scheduler.job.suspicion import Suspicion
from graphsplit.cluster.status.watchdog import Watchdog
from graphsplit.cluster.wire.limits import FORMING_REPORT_INTERVAL_S, MAX_LIVES
from graphsplit.cluster.wire.messages import Accepted, Peer, Register, SchedulerMessage
from graphsplit.failure import FailureCause


class JobPhase(Enum):
    """How far the job has come."""

    FORMING = "forming"
    PLANNED = "planned"
    RUNNING = "running"
    RECOVERING = "recovering"
    DRAINING = "draining"
    FINISHED = "finished"
    FAILED = "failed"


_HEALTHY = frozenset({JobPhase.FORMING, JobPhase.PLANNED, JobPhase.RUNNING, JobPhase.RECOVERING})


@dataclass(eq=False)
class Candidates:
    """Processes that have a stream, but no rank.

    Attributes:
        strangers: Nodes that have not registered yet, and since when they are there.
        spares: Who has registered, and waits for a rank that is free.
        attempts: On which of its streams each life spoke last, of all that were ever let in, up to
            ``MAX_LIVES``. A late registration on an earlier one must not count, whatever became of
            the worker since.
        num_refused: How many were sent away.
    """

    strangers: dict[int, float] = field(default_factory=dict)
    spares: dict[int, Register] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    num_refused: int = 0


@dataclass(eq=False)
class Generation:
    """The generation that is to be formed, is planned, or runs.

    Attributes:
        number: Its number.
        since: When it was begun to be formed.
        next_report: When to say next who is missing.
        offering: The lives that have left every earlier generation.
        ready: The lives that know its plan.
        peers: All of its workers, by rank, once it is planned.
        warnings: Differences that change its bits.
    """

    number: int
    since: float
    next_report: float
    offering: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    peers: tuple[Peer, ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def begun(cls, number: int, now: float) -> Generation:
        """A generation that nobody is part of yet."""
        return cls(number, now, now + FORMING_REPORT_INTERVAL_S)


@dataclass(eq=False)
class Recovery:
    """The recoveries of the job.

    Attributes:
        cause: Why the last generation was left; None in a job that lost nobody.
        former: Who held each rank that is vacant.
        num_recoveries: How many generations were left.
        num_unexplained: How many of them in a row, though no process was lost.
    """

    cause: FailureCause | None = None
    former: dict[int, Worker] = field(default_factory=dict)
    num_recoveries: int = 0
    num_unexplained: int = 0


@dataclass(eq=False)
class Gathering:
    """Where the workers of this generation gather.

    Attributes:
        meeting: Who waits where.
        dispute: The texts that two of them disagree about; None while all agree.
    """

    meeting: Meetings
    dispute: Dispute | None = None


@dataclass(eq=False)
class Liveness:
    """The workers that may be lost, and those that stand still.

    Attributes:
        watchdog: Says when a stall is to be reported.
        last_tick: When the clock was looked at last.
        suspicion: The explanations of a failure.
        absent: Who was lost, and may be frozen, by its life.
    """

    watchdog: Watchdog
    last_tick: float
    suspicion: Suspicion = field(default_factory=Suspicion)
    absent: dict[str, Worker] = field(default_factory=dict)


@dataclass(eq=False)
class Ending:
    """How the job ends.

    Attributes:
        exit: The effect that the scheduler ends with.
        is_stopping: Whether all workers were asked to end in order.
        leave_deadline: Until when everybody may leave.
        num_to_come: How many have yet to come, only to hear that the job has failed.
        latecomers: Host and process id of those who came since, and heard it.
    """

    exit: Exit = field(default_factory=lambda: Exit(0))
    is_stopping: bool = False
    leave_deadline: float = 0.0
    num_to_come: int = 0
    latecomers: set[tuple[str, int]] = field(default_factory=set)


class JobState:
    """All that is known of the job. What only some concerns look at is in a value of its own.

    Attributes:
        rules: The settings of the job.
        identity: Its id, and the seed that was drawn for it.
        seed: The seed of all workers; None until ranks are decided.
        started: When the scheduler started.
        now: When the event came that is being handled.
        phase: How far the job has come.
        is_over: Whether the scheduler may go: nobody is left to be told anything.
        effects: The effects of this event, in order.
        roster: Who has a rank.
        candidates: Who has none.
        generation: The membership that is to be formed, is planned, or runs.
        recovery: The recoveries of the job.
        gathering: Where the workers meet.
        liveness: Who may be lost.
        ending: How the job ends.
        following: The job that begins when new processes come and nobody of this one has come
            back; None where only its own workers may.
    """

    def __init__(self, rules: JobRules, identity: JobIdentity, now: float) -> None:
        self.rules = rules
        self.started = self.now = now
        self.is_over = False
        self.effects: list[Effect] = []
        self.candidates = Candidates()
        self.following: JobIdentity | None = None
        self.begin(identity, now)

    def begin(self, identity: JobIdentity, now: float) -> None:
        """A job of which nobody is part yet."""
        rules = self.rules
        self.identity = identity
        self.seed: int | None = None
        self.phase = JobPhase.FORMING
        self.roster = Roster(rules.num_workers)
        self.generation = Generation.begun(identity.generation, now)
        self.recovery = Recovery()
        self.gathering = Gathering(Meetings(range(rules.num_workers)))
        self.liveness = Liveness(Watchdog(rules.receive_timeout_s), now)
        self.ending = Ending()

    @property
    def is_healthy(self) -> bool:
        """Whether the job goes on."""
        return self.phase in _HEALTHY

    def workers_of(self, ranks: set[int]) -> list[Worker]:
        """Some workers by rank, once ranks are final."""
        return [worker for worker in self.roster.in_order if worker.rank in ranks]

    def gather_anew(self) -> None:
        """Meetings of those who have a rank now."""
        self.gathering = Gathering(Meetings([worker.rank for worker in self.roster]))

    def tell(self, node: int, message: SchedulerMessage) -> None:
        """Send a message to whoever is on this stream."""
        self.effects.append(Send(node, message))

    def send(self, worker: Worker, message: SchedulerMessage) -> None:
        """Send a message to a worker, if its stream is there."""
        if worker.is_connected:
            self.tell(worker.node, message)

    def broadcast(self, message: SchedulerMessage) -> None:
        """Send a message to all workers whose stream is there."""
        for worker in self.roster:
            self.send(worker, message)

    def accept(self, node: int, new: Register) -> None:
        """Tell a process that its registration counts."""
        rules = self.rules
        attempts = self.candidates.attempts
        if new.incarnation not in attempts and len(attempts) >= MAX_LIVES:
            del attempts[next(iter(attempts))]
        attempts[new.incarnation] = new.attempt
        self.tell(node, Accepted(self.identity.job, rules.recovery, rules.keeps_journal))

    def refuse(self, node: int, reason: str, new: Register | None = None) -> None:
        """Send somebody away who has no rank."""
        self.candidates.strangers.pop(node, None)
        self.candidates.spares.pop(node, None)
        self.candidates.num_refused += 1
        name = new.who if new is not None else "a connection"
        self.log(f"refused {name}: {reason}", event="refused", level="warning")
        self.effects.append(Refuse(node, reason))

    def log(self, line: str, *, event: str, level: str = "info") -> None:
        """Print a line for the person who watches."""
        self.effects.append(Log(line, event, level))
