"""What a worker and the scheduler say to each other, as frozen values.

The state machines speak only these; ``codec`` turns them into bytes and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from graphsplit.failure import FailureCause


class Place(Enum):
    """Where all workers meet before any of them goes on."""

    BARRIER = "barrier"
    AGREEMENT = "agreement"
    FINISH = "finish"


@dataclass(frozen=True)
class Peer:
    """One worker of the job, as the others know it."""

    rank: int
    node_id: str
    incarnation: str
    host: str
    pid: int
    endpoints: Mapping[str, str] = field(default_factory=dict)


# Worker to scheduler.


@dataclass(frozen=True)
class Register:
    """A worker asks to take part. ``wished_rank`` None: any rank; ``seed`` None: none was set."""

    node_id: str
    incarnation: str
    role: str
    num_workers: int
    wished_rank: int | None
    host: str
    pid: int
    endpoints: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    script_digest: str = ""
    num_threads: int = 0
    cpu_capability: str = ""
    seed: int | None = None


@dataclass(frozen=True)
class Heartbeat:
    """The worker is alive, has come this far, and is here (in words)."""

    progress: int
    position: str = ""


@dataclass(frozen=True)
class Arrive:
    """The worker waits at a place until all workers have arrived there."""

    place: Place
    name: str = ""
    digest: str = ""


@dataclass(frozen=True)
class Text:
    """A piece of the text whose digest differs, asked for by ``TextWanted``."""

    name: str
    chunk: bytes
    last: bool


@dataclass(frozen=True)
class Failed:
    """The worker raised; this is the root cause as far as it knows."""

    cause: FailureCause


@dataclass(frozen=True)
class Leave:
    """The worker closes its stream on purpose."""


WorkerMessage = Register | Heartbeat | Arrive | Text | Failed | Leave


# Scheduler to worker.


@dataclass(frozen=True)
class Accepted:
    """The registration counts; the worker waits for the others."""


@dataclass(frozen=True)
class Refused:
    """The worker may not take part; the stream ends."""

    reason: str


@dataclass(frozen=True)
class Formed:
    """All workers have arrived. ``peers`` are in the order of their ranks."""

    rank: int
    job: str
    generation: int
    seed: int
    peers: tuple[Peer, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Progress:
    """The progress numbers of all ranks, in their order."""

    values: tuple[int, ...]


@dataclass(frozen=True)
class Departed:
    """All workers have arrived at this place, and go on. From the finish: they are released."""

    place: Place
    name: str = ""


@dataclass(frozen=True)
class TextWanted:
    """The digests at an agreement differ; the scheduler wants to see this worker's text."""

    name: str


@dataclass(frozen=True)
class FailureNoted:
    """The scheduler has the worker's ``Failed``."""


@dataclass(frozen=True)
class Abort:
    """The job ended, for this cause."""

    cause: FailureCause


SchedulerMessage = (
    Accepted | Refused | Formed | Progress | Departed | TextWanted | FailureNoted | Abort
)
