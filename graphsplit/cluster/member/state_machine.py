"""Every rule of a worker's side, as a state machine without I/O, clock or threads.

All states, messages and their order are written down in docs/explanation/membership.md::

    joining ──Accepted──> waiting ──Formed──> ready ──Started──> running ──released──> finished
       │                     ^                ^ │                   │
       └─Refused─> refused   │                │ └───Recovering──┐   └──Recovering──> recovering
                             │                │                 v                        │
                             │                └───Formed──── rejoining <─────offer───────┘
                             │
       any of them ──Abort, or the scheduler is lost for good──> failed

Whether there is a stream at the moment is another matter: where the job recovers, a lost stream
is opened again, and ``registration`` says where this worker stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from graphsplit.cluster.wire.messages import (
    Abort,
    Accepted,
    Arrive,
    Departed,
    FailureNoted,
    Formed,
    MeetingKind,
    Progress,
    Ready,
    Recovering,
    Refused,
    Register,
    Rejoin,
    Resume,
    SchedulerMessage,
    Started,
    StopSoon,
    TextWanted,
    WorkerMessage,
)
from graphsplit.errors import InvariantError
from graphsplit.failure import FailureCause
from graphsplit.settings import FAIL_FAST, GO_ON, WAIT_REJOIN


class MemberPhase(Enum):
    """How far this worker has come."""

    JOINING = "joining"
    WAITING = "waiting"
    REFUSED = "refused"
    READY = "ready"
    RUNNING = "running"
    RECOVERING = "recovering"
    REJOINING = "rejoining"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class EndJob:
    """Set the abort signal to this cause, for good."""

    cause: FailureCause


@dataclass(frozen=True)
class EndGeneration:
    """Set the abort signal to this cause: the generation is over, the job goes on."""

    cause: FailureCause


@dataclass(frozen=True)
class BeginGeneration:
    """All workers are ready: from now on another abort signal counts."""

    generation: int


@dataclass(frozen=True)
class Tell:
    """Send a message to the scheduler."""

    message: WorkerMessage


@dataclass(frozen=True)
class Reconnect:
    """Open another stream, again and again; ``lose_scheduler`` if that does not help."""

    why: str


@dataclass(frozen=True)
class ShowText:
    """Send the text of this agreement."""

    name: str


@dataclass(frozen=True)
class Say:
    """Print a line for the person who watches."""

    line: str


MemberEffect = EndJob | EndGeneration | BeginGeneration | Tell | Reconnect | ShowText | Say

_OVER = (MemberPhase.REFUSED, MemberPhase.FINISHED, MemberPhase.FAILED)


class MemberState:
    """A worker's state in its job. Not thread-safe; ``Member`` locks around it.

    Attributes:
        phase: How far this worker has come.
        refusal: Why it was refused.
        formed: The plan of the last generation that it is part of.
        waits_at: Where it waits for the others.
        progress: The last progress number heard of each worker, by rank.
        stops_soon: Whether all are to end in order.
        num_departed: From how many meetings of this generation it was let go.
        job: The job's id; empty until the scheduler told it.
        recovery: The policy for lost workers.
        keeps_journal: Whether the scheduler comes back when it is lost.
    """

    def __init__(self, address: str, endpoints: Mapping[str, str] | None = None) -> None:
        self._address = address
        self.phase = MemberPhase.JOINING
        self.refusal = ""
        self.formed: Formed | None = None
        self.waits_at: Arrive | None = None
        self.num_departed = 0
        self.is_failure_noted = False
        self.stops_soon = False
        self.job = ""
        self.recovery = FAIL_FAST
        self.keeps_journal = False
        self._next_generation = 0
        self._endpoints: Mapping[str, str] = dict(endpoints or {})
        self.progress: Mapping[int, int] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing that happens to the stream matters any more."""
        return self.phase in _OVER

    @property
    def generation(self) -> int:
        """The generation this worker lives in: the last one that was planned with it, or 0."""
        return self.formed.generation if self.formed is not None else 0

    @property
    def reconnects(self) -> bool:
        """Whether a lost stream is to be opened again."""
        return self.keeps_journal or self.recovery in (WAIT_REJOIN, GO_ON)

    def registration(self, new: Register) -> Register:
        """The first message on a stream: ``new``, or where this worker stands already."""
        if self.formed is None:
            return new
        return replace(
            new,
            endpoints=self._endpoints,
            resume=Resume(
                job=self.job,
                generation=self.formed.generation,
                rank=self.formed.rank,
                num_departed=self.num_departed,
            ),
        )

    def arrive(self, kind: MeetingKind, name: str = "", digest: str = "") -> Arrive:
        """This worker goes to a meeting and waits there. Returns what to tell the scheduler."""
        if self.waits_at is not None:
            raise InvariantError("a member waits at one meeting at a time")
        self.waits_at = Arrive(kind, name, digest, number=self.num_departed + 1)
        return self.waits_at

    def offer(self, endpoints: Mapping[str, str]) -> list[MemberEffect]:
        """This worker has left its generation, and can be reached here in the next one."""
        if self.phase is not MemberPhase.RECOVERING:
            return []
        self.phase = MemberPhase.REJOINING
        self._endpoints = dict(endpoints)
        return [self._offered()]

    def handle(
        self, message: SchedulerMessage, generation: int | None = None
    ) -> list[MemberEffect]:
        """Take in one message of the scheduler, and return what is to be done, in order.

        Args:
            message: The message.
            generation: The generation that the scheduler lived in when it sent this; None stands
                for that of this worker.
        """
        if self.is_over:
            return []
        match message:
            case Accepted():
                return self._accept(message)
            case Refused():
                return self._refuse(message.reason)
            case Formed():
                return self._form(message)
            case Started():
                return self._start(message)
            case Recovering():
                return self._recover(message)
            case Abort():
                return self._end(message.cause)
            case FailureNoted():
                self.is_failure_noted = True
            case StopSoon():
                self.stops_soon = True
        if generation is not None and generation != self.generation:
            return []  # of another generation; see [Note: fences]
        match message:
            case Progress():
                self.progress = message.values
            case Departed():
                return self._depart(message)
            case TextWanted():
                return [ShowText(message.name)]
        return []

    def lose_stream(self, detail: str) -> list[MemberEffect]:
        """The stream ended. While joining, that is only a failed attempt."""
        if self.is_over or self.phase is MemberPhase.JOINING:
            return []
        if self.reconnects:
            return [Reconnect(detail)]
        return self.lose_scheduler(detail)

    def lose_scheduler(self, detail: str) -> list[MemberEffect]:
        """The scheduler is lost for good."""
        if self.is_over:
            return []
        message = f"lost: the connection to the scheduler at {self._address} ended ({detail})"
        return self._end(FailureCause("scheduler_lost", message))

    def _accept(self, message: Accepted) -> list[MemberEffect]:
        self.job = message.job
        self.recovery, self.keeps_journal = message.recovery, message.keeps_journal
        match self.phase:
            case MemberPhase.JOINING:
                self.phase = MemberPhase.WAITING
            case MemberPhase.READY:
                return [Tell(Ready(self.generation))]
            case MemberPhase.RUNNING if self.waits_at is not None:
                return [Tell(self.waits_at)]
        return []

    def _refuse(self, reason: str) -> list[MemberEffect]:
        if self.formed is not None:
            return self._end(FailureCause("refused", f"the scheduler refused us: {reason}"))
        self.phase = MemberPhase.REFUSED
        self.refusal = reason
        return []

    def _form(self, message: Formed) -> list[MemberEffect]:
        if self.phase in (MemberPhase.RUNNING, MemberPhase.RECOVERING, MemberPhase.JOINING):
            return []  # told again, or of a generation that this worker is no part of yet
        if message.generation < max(self.generation, self._next_generation):
            return []
        is_news = message != self.formed
        self.formed = message
        self.phase = MemberPhase.READY
        told: list[MemberEffect] = [Tell(Ready(message.generation))]
        warnings = message.warnings if is_news else ()
        return told + [Say("warning: " + warning) for warning in warnings]

    def _start(self, message: Started) -> list[MemberEffect]:
        if self.phase is not MemberPhase.READY or message.generation != self.generation:
            return []
        self.phase = MemberPhase.RUNNING
        self.waits_at = None
        self.num_departed = 0
        self.progress = {}
        return [BeginGeneration(message.generation)]

    def _recover(self, message: Recovering) -> list[MemberEffect]:
        if message.generation <= self.generation:
            return []
        self._next_generation = max(self._next_generation, message.generation)
        match self.phase:
            case MemberPhase.RUNNING:
                self.phase = MemberPhase.RECOVERING
                self.waits_at = None
                return [EndGeneration(message.cause)]
            case MemberPhase.READY | MemberPhase.REJOINING:
                # Nothing was done in that generation, so nothing has to be left.
                self.phase = MemberPhase.REJOINING
                return [self._offered()]
        return []

    def _offered(self) -> Tell:
        return Tell(Rejoin(self._next_generation, self._endpoints))

    def _depart(self, message: Departed) -> list[MemberEffect]:
        if message.number <= self.num_departed:
            return []
        here = self.waits_at
        if here is None or (here.kind, here.name) != (message.kind, message.name):
            what = f"the scheduler let us go from {message.kind.value} {message.name!r}"
            return self._end(FailureCause("scheduler_lost", f"{what}, where we did not wait"))
        self.waits_at = None
        self.num_departed += 1
        if message.kind is MeetingKind.FINISH:
            self.phase = MemberPhase.FINISHED
        return []

    def _end(self, cause: FailureCause) -> list[MemberEffect]:
        self.phase = MemberPhase.FAILED
        return [EndJob(cause)]
