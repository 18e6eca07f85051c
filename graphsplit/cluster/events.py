"""What can happen to the scheduler, and what it can do about it, as frozen values.

A *node* is one connection, numbered by the shell; it becomes a worker when its registration is
accepted. Numbers are never used twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphsplit.cluster.image import JobImage
from graphsplit.cluster.messages import SchedulerMessage, WorkerMessage
from graphsplit.failure import FailureCause


@dataclass(frozen=True)
class Connected:
    """A stream was opened."""

    node: int


@dataclass(frozen=True)
class Received:
    """A valid message arrived on a stream, from a worker that lives in this generation."""

    node: int
    message: WorkerMessage
    generation: int = 1


@dataclass(frozen=True)
class Malformed:
    """Something arrived on a stream that is not a valid message."""

    node: int
    reason: str


@dataclass(frozen=True)
class Disconnected:
    """A stream ended or broke; nothing more will come from this node."""

    node: int


@dataclass(frozen=True)
class Interrupted:
    """The scheduler's process got a signal."""

    signal_name: str
    signal_number: int


@dataclass(frozen=True)
class ProcessEnded:
    """The launcher says that a worker's process has ended, and that it starts no other one.

    Attributes:
        rank: Its rank.
        host: Where it ran.
        pid: Its process id there.
        how: ``was killed by SIGKILL``, or ``ended with status 1``.
        error: What it left as its reason; empty if it left none.
    """

    rank: int
    host: str
    pid: int
    how: str
    error: str = ""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Connected | Received | Malformed | Disconnected | Interrupted | ProcessEnded | Tick


@dataclass(frozen=True)
class Send:
    """Send a message to a node. Order per node is kept."""

    node: int
    message: SchedulerMessage


@dataclass(frozen=True)
class Refuse:
    """Tell a node why it may not take part, and end its stream."""

    node: int
    reason: str


@dataclass(frozen=True)
class Drop:
    """End a node's stream without a word. A worker that is alive comes back on another one."""

    node: int


@dataclass(frozen=True)
class GiveUp:
    """The job does not count on a worker's process any more, though it may still be there.

    Attributes:
        rank: The worker's rank.
        pid: Its process id.
        why: What was noticed of it.
        is_final: Whether it would come back too late in any case: the job is over.
    """

    rank: int
    pid: int
    why: str
    is_final: bool = False


@dataclass(frozen=True)
class JobOver:
    """The job has finished: a process that ends now needs no successor."""


@dataclass(frozen=True)
class Persist:
    """Write this to the journal, and be sure that it is there, before anything that follows."""

    image: JobImage


@dataclass(frozen=True)
class Log:
    """Print a line for the person who watches.

    Attributes:
        line: The line; further lines belong to it.
        event: What happened, in one word, for programs that read logs.
        level: ``"info"``, ``"warning"`` or ``"error"``.
    """

    line: str
    event: str = "note"
    level: str = "info"


@dataclass(frozen=True)
class Exit:
    """End all streams and the scheduler. ``cause`` is None when the job finished."""

    status: int
    cause: FailureCause | None = None


Effect = Send | Refuse | Drop | GiveUp | JobOver | Persist | Log | Exit
