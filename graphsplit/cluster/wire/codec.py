"""Every message of the control plane, field by field, with its bounds; to bytes and back.

Everything that arrives is checked here, before any state sees it. A message is refused, with a
reason, when it is not one, lacks a field, has a field this version does not know, or breaks a bound
of ``limits``. ``fields`` has the kinds of fields. A status, for visitors, is in ``status.codec``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from graphsplit._proto import cluster_pb2 as pb
from graphsplit.cluster.wire import limits
from graphsplit.cluster.wire.fields import (
    ANY,
    Layout,
    MessageError,
    choice,
    chunk,
    integer,
    mapping,
    optional,
    parse,
    repeated,
    string,
)
from graphsplit.cluster.wire.messages import (
    Abort,
    Accepted,
    Arrive,
    Departed,
    Failed,
    FailureNoted,
    Fence,
    Formed,
    Heartbeat,
    Leave,
    Peer,
    Place,
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
    Text,
    TextWanted,
    WorkerMessage,
)
from graphsplit.root_cause import NOWHERE, FailureCause, Location
from graphsplit.settings import RECOVERY_POLICIES

_DIGEST_CHARS = 64
_Sent = TypeVar("_Sent")
_MAX_PID = (1 << 31) - 1
_FAILURE_KINDS = (
    "exception",
    "lost",
    "refused",
    "disagreement",
    "interrupted",
    "scheduler_lost",
    "timeout",
)


# Kinds of fields.

NAME = string(limits.MAX_NAME_CHARS)
NEEDED_NAME = string(limits.MAX_NAME_CHARS, required=True)
NODE_ID = string(limits.MAX_NODE_ID_CHARS)
NEEDED_NODE_ID = string(limits.MAX_NODE_ID_CHARS, required=True)
INCARNATION = string(limits.MAX_INCARNATION_CHARS)
NEEDED_INCARNATION = string(limits.MAX_INCARNATION_CHARS, required=True)
HOST = string(limits.MAX_HOST_CHARS)
NEEDED_HOST = string(limits.MAX_HOST_CHARS, required=True)
PLACE_TEXT = string(limits.MAX_PLACE_CHARS)
POSITION = string(limits.MAX_POSITION_CHARS, lines=True)
LINES = string(limits.MAX_MESSAGE_CHARS, lines=True)
TRACEBACK = string(limits.MAX_TRACEBACK_CHARS, lines=True)
RANK = integer(0, limits.MAX_WORKERS - 1)
PID = integer(1, _MAX_PID)
FROM_ONE = integer(1, (1 << 32) - 1)
RECOVERY = choice(RECOVERY_POLICIES, "recovery policy")
ENDPOINTS = mapping(NEEDED_NAME, string(limits.MAX_ENDPOINT_CHARS), limits.MAX_ENDPOINTS)
VERSIONS = mapping(NEEDED_NAME, string(limits.MAX_VERSION_CHARS), limits.MAX_VERSIONS)
PLACE = choice(Place, "place", lambda place: pb.Place.Value(f"PLACE_{place.name}"))
FAILURE_KIND = choice(_FAILURE_KINDS, "kind of failure")

# What messages of both sides contain.

FENCE = Layout(Fence, pb.Fence, job=NAME, generation=ANY, incarnation=INCARNATION, number=ANY)
LOCATION = Layout(
    Location,
    pb.Location,
    step=optional(ANY),
    microbatch=optional(ANY),
    instruction=PLACE_TEXT,
    operation=PLACE_TEXT,
    module=PLACE_TEXT,
    source=PLACE_TEXT,
    edge=optional(ANY),
    waits_for=optional(RANK),
    waits_what=PLACE_TEXT,
)
KNOWN_LOCATION = optional(LOCATION.nested, absent=NOWHERE)
CAUSE = Layout(
    FailureCause,
    pb.Cause,
    kind=FAILURE_KIND,
    message=LINES,
    rank=integer(-1, limits.MAX_WORKERS - 1),
    host=HOST,
    pid=integer(0, _MAX_PID),
    position=POSITION,
    traceback=TRACEBACK,
    location=KNOWN_LOCATION,
)


def _check_arrival(arrival: Arrive) -> None:
    if arrival.place is Place.AGREEMENT and len(arrival.digest) != _DIGEST_CHARS:
        raise MessageError(f"an agreement needs a SHA-256 digest of {_DIGEST_CHARS} characters")
    if arrival.place is not Place.FINISH and not arrival.name:
        raise MessageError("name is missing")


def _check_plan(formed: Formed) -> None:
    if formed.rank >= len(formed.peers):
        raise MessageError(f"rank {formed.rank} of {len(formed.peers)} workers")
    if any(peer.rank != rank for rank, peer in enumerate(formed.peers)):
        raise MessageError("the peers are not in the order of their ranks")


# Worker to scheduler.

RESUME = Layout(
    Resume, pb.Resume, job=NEEDED_NAME, generation=FROM_ONE, rank=RANK, num_departed=ANY
)
REGISTER = Layout(
    Register,
    pb.Register,
    node_id=NEEDED_NODE_ID,
    incarnation=NEEDED_INCARNATION,
    role=NEEDED_NAME,
    num_workers=integer(1, limits.MAX_WORKERS),
    # Compared with the size of the job where its sender can be told what to do.
    wished_rank=optional(ANY),
    host=NEEDED_HOST,
    pid=PID,
    endpoints=ENDPOINTS,
    versions=VERSIONS,
    script_digest=NAME,
    num_threads=ANY,
    cpu_capability=NAME,
    seed=optional(ANY),
    recovery=RECOVERY,
    resume=optional(RESUME.nested),
    attempt=FROM_ONE,
)
HEARTBEAT = Layout(
    Heartbeat,
    pb.Heartbeat,
    progress=ANY,
    position=POSITION,
    watched=repeated(RANK, limits.MAX_WATCHED, "rank"),
    location=KNOWN_LOCATION,
    wants_stop=ANY,
)
ARRIVE = Layout(
    Arrive,
    pb.Arrive,
    _check_arrival,
    place=PLACE,
    name=NAME,
    digest=string(_DIGEST_CHARS),
    number=FROM_ONE,
)
TEXT = Layout(Text, pb.Text, name=NEEDED_NAME, chunk=chunk(limits.TEXT_CHUNK_BYTES), last=ANY)

# Scheduler to worker.

ACCEPTED = Layout(Accepted, pb.Accepted, job=NEEDED_NAME, recovery=RECOVERY, keeps_journal=ANY)
PEER = Layout(
    Peer,
    pb.Peer,
    rank=RANK,
    node_id=NEEDED_NODE_ID,
    incarnation=NEEDED_INCARNATION,
    host=NEEDED_HOST,
    pid=PID,
    endpoints=ENDPOINTS,
)
FORMED = Layout(
    Formed,
    pb.Formed,
    _check_plan,
    rank=RANK,
    job=NEEDED_NAME,
    generation=FROM_ONE,
    seed=ANY,
    peers=repeated(PEER.nested, limits.MAX_WORKERS, "peer"),
    warnings=repeated(LINES, limits.MAX_WARNINGS, "warning"),
)


@dataclass(frozen=True)
class _Outcome:
    """A message of nothing but a cause, which travels as the cause itself."""

    value_type: Any

    def write(self, message: Any) -> Any:
        return CAUSE.write(message.cause)

    def read(self, raw: pb.Cause) -> Any:
        return self.value_type(CAUSE.read(raw))


class _Direction(Generic[_Sent]):
    """All messages of one side; the kind that protobuf notes says which of them one is."""

    def __init__(self, message_type: Any, **kinds: Layout[Any] | _Outcome) -> None:
        self._message_type = message_type
        self._kinds = kinds
        self._kind_of = {layout.value_type: kind for kind, layout in kinds.items()}

    def encode(self, message: _Sent) -> bytes:
        """The bytes of a message, to be followed by those of its fence."""
        kind = self._kind_of[type(message)]
        raw = self._message_type(**{kind: self._kinds[kind].write(message)})
        return bytes(raw.SerializeToString())

    def open(self, data: bytes) -> tuple[Fence, _Sent]:
        """The fence of a message, and the message.

        Raises:
            MessageError: The bytes are not a valid message.
        """
        raw = parse(self._message_type(), data)
        kind = raw.WhichOneof("kind")
        if kind is None:
            raise MessageError("the message is empty")
        return FENCE.read(raw.fence), self._kinds[kind].read(getattr(raw, kind))


_WORKER = _Direction[WorkerMessage](
    pb.WorkerMessage,
    register=REGISTER,
    heartbeat=HEARTBEAT,
    arrive=ARRIVE,
    text=TEXT,
    failed=_Outcome(Failed),
    ready=Layout(Ready, pb.Ready, generation=FROM_ONE),
    rejoin=Layout(Rejoin, pb.Rejoin, generation=FROM_ONE, endpoints=ENDPOINTS),
    leave=Layout(Leave, pb.Leave),
)
_SCHEDULER = _Direction[SchedulerMessage](
    pb.SchedulerMessage,
    accepted=ACCEPTED,
    refused=Layout(Refused, pb.Refused, reason=LINES),
    formed=FORMED,
    started=Layout(Started, pb.Started, generation=FROM_ONE),
    stop_soon=Layout(StopSoon, pb.StopSoon),
    recovering=Layout(Recovering, pb.Recovering, generation=FROM_ONE, cause=CAUSE.nested),
    progress=Layout(Progress, pb.Progress, values=mapping(ANY, ANY, limits.MAX_WATCHED)),
    departed=Layout(Departed, pb.Departed, place=PLACE, name=NAME, number=FROM_ONE),
    text_wanted=Layout(TextWanted, pb.TextWanted, name=NAME),
    failure_noted=Layout(FailureNoted, pb.FailureNoted),
    abort=_Outcome(Abort),
)


encode_worker, open_worker = _WORKER.encode, _WORKER.open
encode_scheduler, open_scheduler = _SCHEDULER.encode, _SCHEDULER.open


def encode_fence(fence: Fence) -> bytes:
    """The fence of a message of either side, to be put behind the bytes of the message.

    A message of bytes that stand one behind the other is all of their fields together. So a
    message to many is encoded once.
    """
    return pb.SchedulerMessage(fence=FENCE.write(fence)).SerializeToString()


def encode_plan(peers: Sequence[Peer]) -> bytes:
    """The part of ``Formed`` that is the same for all workers, to be put behind the rest."""
    plan = pb.Formed(peers=[PEER.write(peer) for peer in peers])
    return pb.SchedulerMessage(formed=plan).SerializeToString()
