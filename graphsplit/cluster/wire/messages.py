"""The messages between a worker and the scheduler, as frozen values.

The state machines speak only these; ``codec`` turns them into bytes and back. The type hints name
the kind of each field, and so its bound. There is one stream per worker, from its registration to
its release; in which states which messages may come: docs/explanation/membership.md::

    worker                                  scheduler
    Register            ------------------>             identity, wished rank, endpoints
                        <------------------  Accepted   (or Refused, and the stream ends)
                        <------------------  Formed     rank, peers, job, seed: all have arrived
    Ready               ------------------>             every earlier generation is given up
                        <------------------  Started    all are ready
    Heartbeat ...       ------------------>             progress and position, once a second
                        <------------------  Progress   of the ranks that it asks for
    Arrive              ------------------>             at an agreement, a barrier or the finish
                        <------------------  Departed   all workers have arrived there
                        <------------------  TextWanted (digests differ: show your text)
    Text                ------------------>
    Failed              ------------------>             this worker raised
                        <------------------  FailureNoted
                        <------------------  Recovering a worker was lost: leave the generation
    Rejoin              ------------------>             left it; endpoints for the next one
                        <------------------  StopSoon   all are to end at the end of a step
                        <------------------  Abort      the root cause, to everyone
    Leave               ------------------>             the last message of an orderly end

A stream that breaks is a lost worker (seen by the scheduler) or a lost scheduler (seen by a
worker), at once; where the job recovers, the worker opens a new one and resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from graphsplit.cluster.wire import limits
from graphsplit.cluster.wire.fields import (
    Cause,
    Count,
    Endpoints,
    FromOne,
    Incarnation,
    Lines,
    Name,
    NeededHost,
    NeededIncarnation,
    NeededName,
    NeededNodeId,
    Pid,
    Place,
    PlaceText,
    PositionText,
    Rank,
    RecoveryPolicy,
    Versions,
)
from graphsplit.encoding.fields import AtMost, chunk, integer, string
from graphsplit.root_cause import NOWHERE

DIGEST_CHARS = 64
"""How long a SHA-256 digest is in hexadecimal."""

STOPPED = "stopped"
"""The name of the finish to which all come that were asked to end."""


class MeetingKind(Enum):
    """Why all workers meet before any of them goes on."""

    BARRIER = "barrier"
    AGREEMENT = "agreement"
    FINISH = "finish"


@dataclass(frozen=True)
class Peer:
    """One worker of the job, as the others know it."""

    rank: Rank
    node_id: NeededNodeId
    incarnation: NeededIncarnation
    host: NeededHost
    pid: Pid
    endpoints: Endpoints = field(default_factory=dict)


@dataclass(frozen=True)
class Fence:
    """The origin of a message, so that one of the past is never taken for one of the present.

    Attributes:
        job: The job's id; empty until the sender knows it.
        generation: The generation that the sender lives in; 0 before the first.
        incarnation: The life of the worker whose stream it is: random for every start of a process.
        number: Counts the messages of one stream in one direction, from 1.
    """

    job: Name = ""
    generation: Count = 0
    incarnation: Incarnation = ""
    number: Count = 0


# Worker to scheduler.


@dataclass(frozen=True)
class Resume:
    """A worker that lost its stream tells where it stands.

    Attributes:
        job: The job it takes part in.
        generation: The last generation that was planned with it.
        rank: Its rank there.
        num_departed: From how many meetings of that generation it was let go.
    """

    job: NeededName
    generation: FromOne
    rank: Rank
    num_departed: Count = 0


@dataclass(frozen=True, kw_only=True)
class NodeIdentity:
    """The properties of a worker that must fit those of the others.

    Attributes:
        versions: Versions that must be equal everywhere: ``{"graphsplit": "0.1.0",
            "torch": "2.13.0", "python": "3.11"}``. The scheduler compares all entries.
        script_digest: SHA-256 of the user's script in hexadecimal; empty if there is no file.
        num_threads: Threads of one operation. A difference changes bits, so it is reported.
        cpu_capability: Instruction set of the kernels. A difference is reported likewise.
        seed: The seed that the script set itself; None if it set none.
    """

    versions: Versions = field(default_factory=dict)
    script_digest: Name = ""
    num_threads: Count = 0
    cpu_capability: Name = ""
    seed: Count | None = None


@dataclass(frozen=True)
class Register(NodeIdentity):
    """A worker asks to take part, or comes back on a new stream (``resume``).

    ``wished_rank`` None: any rank; ``recovery``: the policy that this
    worker was started with; ``attempt`` counts the streams of this process, so that a late word on
    an old one is known as such.
    """

    node_id: NeededNodeId
    incarnation: NeededIncarnation
    role: NeededName
    num_workers: Annotated[int, integer(1, limits.MAX_WORKERS)]
    wished_rank: Annotated[int, integer(-(1 << 31), (1 << 31) - 1)] | None
    host: NeededHost
    pid: Pid
    endpoints: Endpoints = field(default_factory=dict)
    recovery: RecoveryPolicy = "fail_fast"
    resume: Resume | None = None
    attempt: FromOne = 1

    @property
    def process(self) -> str:
        """The worker's process, for people: ``host 10.0.0.1, pid 17``."""
        return f"host {self.host}, pid {self.pid}"

    @property
    def who(self) -> str:
        """The worker as a person can find it: ``worker 'a' (host 10.0.0.1, pid 17)``."""
        return f"worker {self.node_id!r} ({self.process})"


@dataclass(frozen=True)
class CallMade:
    """A call that all workers make, in the same order.

    Attributes:
        name: What was called: ``"state_dict"``; ``END_OF_SCRIPT`` when there is nothing more.
        source: The user's line.
        milestones: How many the worker had passed before.
        times: How many calls of that name since these milestones; it is the last of them.
    """

    name: Name
    source: PlaceText = ""
    milestones: Count = 0
    times: Count = 1


END_OF_SCRIPT = "the end of the script"
"""The name of the last call of every worker."""
CALL_OF = "a call of "
"""How the name begins of a network's call in a loop of the script's own; its class follows."""
ASKING = "a value's "
"""How the name begins of a question for a value of such a loop; what the script wrote follows."""
SAVING = "torch.save"
"""How a question is called that a value is asked where it is pickled."""


@dataclass(frozen=True)
class CallsMade:
    """How far a worker has come in what all workers do alike.

    Attributes:
        num: How many calls it has made.
        milestones: How many batches and meetings of all workers it has been through.
        latest: Its latest calls, in order; those of one name between two milestones as one, at the
            line of the first.
        within: The innermost call that it is in, if any.
    """

    num: Count = 0
    milestones: Count = 0
    latest: Annotated[tuple[CallMade, ...], AtMost(limits.MAX_CALLS)] = ()
    within: CallMade | None = None


NO_CALLS = CallsMade()
"""Nothing is known."""


@dataclass(frozen=True)
class Heartbeat:
    """The worker is alive, has come this far, and is here (in words, and in parts).

    ``training`` says in words how training goes: ``"epoch 2 of 5, loss 0.314, 12.3 steps/s"``.

    ``watched`` are the ranks whose progress it wants to be told: those it waits for.
    ``wants_stop``: it was asked to end, and wants all to, when their step is done.
    """

    progress: Count
    position: PositionText = ""
    watched: Annotated[tuple[Rank, ...], AtMost(limits.MAX_WATCHED)] = ()
    location: Place = NOWHERE
    wants_stop: bool = False
    calls: CallsMade = NO_CALLS
    training: PlaceText = ""


@dataclass(frozen=True)
class Arrive:
    """The worker waits at a meeting until all workers have arrived there.

    ``number`` counts the meetings of this generation, from 1.
    """

    kind: MeetingKind
    name: Name = ""
    digest: Annotated[str, string(DIGEST_CHARS)] = ""
    number: FromOne = 1

    @property
    def meeting_name(self) -> str:
        """The meeting in words: ``the barrier 'epoch 3'``."""
        if self.kind is MeetingKind.FINISH:
            return "the end of the job"
        return f"the {self.kind.value} {self.name!r}"


@dataclass(frozen=True)
class Text:
    """The text whose digest differs, asked for by ``TextWanted``."""

    name: NeededName
    text: Annotated[bytes, chunk(limits.MAX_TEXT_BYTES)]


@dataclass(frozen=True)
class Failed:
    """The worker raised; this is the root cause as far as it knows, and the calls it had made."""

    cause: Cause
    calls: CallsMade = NO_CALLS


@dataclass(frozen=True)
class Ready:
    """The worker knows the plan of this generation, and has given up every earlier one."""

    generation: FromOne


@dataclass(frozen=True)
class Rejoin:
    """The worker has left its generation; here it can be reached in the one to be formed."""

    generation: FromOne
    endpoints: Endpoints = field(default_factory=dict)


@dataclass(frozen=True)
class Leave:
    """The worker closes its stream on purpose."""


WorkerMessage = Register | Heartbeat | Arrive | Text | Failed | Ready | Rejoin | Leave


# Scheduler to worker.


@dataclass(frozen=True)
class Accepted:
    """The registration counts; the worker waits for the others.

    Attributes:
        job: The job's random id.
        recovery: The policy for lost workers.
        keeps_journal: The scheduler comes back if it is lost.
    """

    job: NeededName = ""
    recovery: RecoveryPolicy = "fail_fast"
    keeps_journal: bool = False


@dataclass(frozen=True)
class Refused:
    """The worker may not take part; the stream ends."""

    reason: Lines


@dataclass(frozen=True)
class Formed:
    """All workers have arrived: the plan of a generation. ``peers`` are in the order of ranks."""

    rank: Rank
    job: NeededName
    generation: FromOne
    seed: Count
    peers: Annotated[tuple[Peer, ...], AtMost(limits.MAX_WORKERS)]
    warnings: Annotated[tuple[Lines, ...], AtMost(limits.MAX_WARNINGS)] = ()


@dataclass(frozen=True)
class Started:
    """All workers are ready: this generation runs."""

    generation: FromOne


@dataclass(frozen=True)
class StopSoon:
    """All are to end in order: the worker that leads the next step says that it is the last."""


@dataclass(frozen=True)
class Recovering:
    """A worker was lost. All leave their generation; ``generation`` is to be formed next."""

    generation: FromOne
    cause: Cause


@dataclass(frozen=True)
class Progress:
    """The progress numbers of some ranks: of those that the worker's heartbeat asked for."""

    values: Annotated[Mapping[Rank, Count], AtMost(limits.MAX_WATCHED)]


@dataclass(frozen=True)
class Departed:
    """All workers have arrived at this meeting, and go on. From the finish: they are released."""

    kind: MeetingKind
    name: Name = ""
    number: FromOne = 1


@dataclass(frozen=True)
class TextWanted:
    """The digests at an agreement differ; the scheduler wants to see this worker's text."""

    name: Name


@dataclass(frozen=True)
class FailureNoted:
    """The scheduler has the worker's ``Failed``."""


@dataclass(frozen=True)
class Abort:
    """The job ended, for this cause."""

    cause: Cause


SchedulerMessage = (
    Accepted
    | Refused
    | Formed
    | Started
    | StopSoon
    | Recovering
    | Progress
    | Departed
    | TextWanted
    | FailureNoted
    | Abort
)
