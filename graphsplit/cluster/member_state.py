"""Every rule of a worker's side, as a state machine without I/O, clock or threads.

::

    joining ──Accepted──> waiting ──Formed──> running ──released──> finished
       │                     │                   │
       └─Refused─> refused   └──────Abort, or the stream ends──────> aborted
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from graphsplit.cluster.messages import (
    Abort,
    Accepted,
    Arrive,
    Departed,
    FailureNoted,
    Formed,
    Place,
    Progress,
    Refused,
    SchedulerMessage,
    TextWanted,
)
from graphsplit.failure import FailureCause


class MemberPhase(Enum):
    """How far this worker has come."""

    JOINING = "joining"
    WAITING = "waiting"
    REFUSED = "refused"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(frozen=True)
class EndJob:
    """Set the abort signal to this cause."""

    cause: FailureCause


@dataclass(frozen=True)
class ShowText:
    """Send the text of this agreement."""

    name: str


@dataclass(frozen=True)
class Say:
    """Print a line for the person who watches."""

    line: str


MemberEffect = EndJob | ShowText | Say

_OVER = (MemberPhase.REFUSED, MemberPhase.FINISHED, MemberPhase.ABORTED)


class MemberState:
    """What this worker knows of the job. Not thread-safe; ``Member`` locks around it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.phase = MemberPhase.JOINING
        self.refusal = ""
        self.formed: Formed | None = None
        self.waits_at: Arrive | None = None
        self.is_failure_noted = False
        self._progress: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing that happens to the stream matters any more."""
        return self.phase in _OVER

    def progress(self, rank: int) -> int:
        """The last progress number heard of a rank; 0 if none was."""
        return self._progress[rank] if 0 <= rank < len(self._progress) else 0

    def arrive(self, arrival: Arrive) -> None:
        """This worker goes to a place and waits there."""
        assert self.waits_at is None, "one place at a time"
        self.waits_at = arrival

    def handle(self, message: SchedulerMessage) -> list[MemberEffect]:
        """Take in one message of the scheduler, and return what is to be done, in order."""
        if self.is_over:
            return []
        match message:
            case Accepted():
                self.phase = MemberPhase.WAITING
            case Refused():
                return self._refuse(message.reason)
            case Formed():
                self.formed = message
                self.phase = MemberPhase.RUNNING
                return [Say("warning: " + warning) for warning in message.warnings]
            case Progress():
                self._progress = message.values
            case Departed():
                return self._depart(message)
            case TextWanted():
                return [ShowText(message.name)]
            case FailureNoted():
                self.is_failure_noted = True
            case Abort():
                return self._end(message.cause)
        return []

    def lose_stream(self, detail: str) -> list[MemberEffect]:
        """The stream ended. While joining, that is only a failed attempt."""
        if self.is_over or self.phase is MemberPhase.JOINING:
            return []
        message = f"lost: the connection to the scheduler at {self._address} ended ({detail})"
        return self._end(FailureCause("scheduler_lost", message))

    def _refuse(self, reason: str) -> list[MemberEffect]:
        if self.phase is MemberPhase.RUNNING:
            return self._end(FailureCause("refused", f"the scheduler refused us: {reason}"))
        self.phase = MemberPhase.REFUSED
        self.refusal = reason
        return []

    def _depart(self, message: Departed) -> list[MemberEffect]:
        here = self.waits_at
        if here is None or (here.place, here.name) != (message.place, message.name):
            what = f"the scheduler let us go from {message.place.value} {message.name!r}"
            return self._end(FailureCause("scheduler_lost", f"{what}, where we did not wait"))
        self.waits_at = None
        if message.place is Place.FINISH:
            self.phase = MemberPhase.FINISHED
        return []

    def _end(self, cause: FailureCause) -> list[MemberEffect]:
        self.phase = MemberPhase.ABORTED
        return [EndJob(cause)]
