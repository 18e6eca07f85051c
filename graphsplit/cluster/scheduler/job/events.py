"""The events that happen to the scheduler, and the effects that it has, as frozen values.

A *node* is one connection, numbered by the shell; it becomes a worker when its registration is
accepted. Numbers are never used twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphsplit.cluster.scheduler.job.image import JobImage
from graphsplit.cluster.wire.messages import SchedulerMessage, WorkerMessage
from graphsplit.failure import FailureCause
from graphsplit.launcher_line import Ended, GivenUp, Over


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
class ToldByLauncher:
    """The launcher on this host, which started the scheduler, says something."""

    host: str
    note: Ended


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Connected | Received | Malformed | Disconnected | Interrupted | ToldByLauncher | Tick


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
class TellLauncher:
    """Say something to the launcher that started the scheduler, if one did."""

    note: GivenUp | Over


@dataclass(frozen=True)
class Persist:
    """Write this to the journal, and be sure that it is there, before anything that follows."""

    image: JobImage


@dataclass(frozen=True)
class Log:
    """Print a line for the person who watches.

    Attributes:
        line: The line; further lines belong to it.
        event: The kind of event in one word, for programs that read logs.
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


Effect = Send | Refuse | Drop | TellLauncher | Persist | Log | Exit
