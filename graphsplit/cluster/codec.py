"""Messages to bytes and back. Everything that arrives is checked here, before any state sees it.

A message is refused, with a reason, when it is not one, lacks a field, has a field this version
does not know, or breaks a bound of ``limits``. Nothing is cut to fit, and nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from graphsplit._proto import cluster_pb2 as pb
from graphsplit.cluster import limits
from graphsplit.cluster.messages import (
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

_PLACES = {
    Place.BARRIER: pb.PLACE_BARRIER,
    Place.AGREEMENT: pb.PLACE_AGREEMENT,
    Place.FINISH: pb.PLACE_FINISH,
}
_PLACES_BACK: Mapping[int, Place] = {int(number): place for place, number in _PLACES.items()}
_MAX_PID = (1 << 31) - 1
_KINDS = frozenset(
    {"exception", "lost", "refused", "disagreement", "interrupted", "scheduler_lost", "timeout"}
)
_Parsed = TypeVar("_Parsed", pb.WorkerMessage, pb.SchedulerMessage)


class MessageError(ValueError):
    """What arrived is not a valid message; the text says why."""


# Encoding. The dataclasses are our own, so their values are trusted here.


def encode_worker(message: WorkerMessage) -> bytes:
    """The bytes of a worker's message."""
    match message:
        case Register():
            out = pb.WorkerMessage(register=_register_to_pb(message))
        case Heartbeat():
            beat = pb.Heartbeat(
                progress=message.progress,
                position=message.position,
                watched=message.watched,
                location=location_to_pb(message.location),
                wants_stop=message.wants_stop,
            )
            out = pb.WorkerMessage(heartbeat=beat)
        case Arrive():
            arrive = pb.Arrive(
                place=_PLACES[message.place],
                name=message.name,
                digest=message.digest,
                number=message.number,
            )
            out = pb.WorkerMessage(arrive=arrive)
        case Text():
            text = pb.Text(name=message.name, chunk=message.chunk, last=message.last)
            out = pb.WorkerMessage(text=text)
        case Failed():
            out = pb.WorkerMessage(failed=cause_to_pb(message.cause))
        case Ready():
            out = pb.WorkerMessage(ready=pb.Ready(generation=message.generation))
        case Rejoin():
            rejoin = pb.Rejoin(generation=message.generation, endpoints=message.endpoints)
            out = pb.WorkerMessage(rejoin=rejoin)
        case Leave():
            out = pb.WorkerMessage(leave=pb.Leave())
    return out.SerializeToString()


def encode_scheduler(message: SchedulerMessage) -> bytes:
    """The bytes of a scheduler's message."""
    match message:
        case Accepted():
            accepted = pb.Accepted(
                job=message.job, recovery=message.recovery, keeps_journal=message.keeps_journal
            )
            out = pb.SchedulerMessage(accepted=accepted)
        case Refused():
            out = pb.SchedulerMessage(refused=pb.Refused(reason=message.reason))
        case Formed():
            out = pb.SchedulerMessage(formed=_formed_to_pb(message))
        case Started():
            out = pb.SchedulerMessage(started=pb.Started(generation=message.generation))
        case StopSoon():
            out = pb.SchedulerMessage(stop_soon=pb.StopSoon())
        case Recovering():
            recovering = pb.Recovering(
                generation=message.generation, cause=cause_to_pb(message.cause)
            )
            out = pb.SchedulerMessage(recovering=recovering)
        case Progress():
            out = pb.SchedulerMessage(progress=pb.Progress(values=message.values))
        case Departed():
            departed = pb.Departed(
                place=_PLACES[message.place], name=message.name, number=message.number
            )
            out = pb.SchedulerMessage(departed=departed)
        case TextWanted():
            out = pb.SchedulerMessage(text_wanted=pb.TextWanted(name=message.name))
        case FailureNoted():
            out = pb.SchedulerMessage(failure_noted=pb.FailureNoted())
        case Abort():
            out = pb.SchedulerMessage(abort=cause_to_pb(message.cause))
    return out.SerializeToString()


def encode_plan(peers: Sequence[Peer]) -> bytes:
    """The part of ``Formed`` that is the same for all workers, to be put behind the rest.

    A message of bytes that stand one behind the other is all of their fields together.
    """
    return pb.SchedulerMessage(
        formed=pb.Formed(peers=[_peer_to_pb(peer) for peer in peers])
    ).SerializeToString()


def encode_worker_fence(fence: Fence) -> bytes:
    """The fence of a worker's message: to be put behind the bytes of the message."""
    return pb.WorkerMessage(fence=_fence_to_pb(fence)).SerializeToString()


def encode_scheduler_fence(fence: Fence) -> bytes:
    """The fence of a scheduler's message: to be put behind the bytes of the message.

    So a message to many is encoded once.
    """
    return pb.SchedulerMessage(fence=_fence_to_pb(fence)).SerializeToString()


def _fence_to_pb(fence: Fence) -> pb.Fence:
    return pb.Fence(
        job=fence.job,
        generation=fence.generation,
        incarnation=fence.incarnation,
        number=fence.number,
    )


def _register_to_pb(message: Register) -> pb.Register:
    return pb.Register(
        node_id=message.node_id,
        incarnation=message.incarnation,
        role=message.role,
        num_workers=message.num_workers,
        wished_rank=message.wished_rank,
        host=message.host,
        pid=message.pid,
        endpoints=message.endpoints,
        versions=message.versions,
        script_digest=message.script_digest,
        num_threads=message.num_threads,
        cpu_capability=message.cpu_capability,
        seed=message.seed,
        recovery=message.recovery,
        resume=None if message.resume is None else _resume_to_pb(message.resume),
        attempt=message.attempt,
    )


def _resume_to_pb(resume: Resume) -> pb.Resume:
    return pb.Resume(
        job=resume.job,
        generation=resume.generation,
        rank=resume.rank,
        num_departed=resume.num_departed,
    )


def _formed_to_pb(message: Formed) -> pb.Formed:
    return pb.Formed(
        rank=message.rank,
        job=message.job,
        generation=message.generation,
        seed=message.seed,
        peers=[_peer_to_pb(peer) for peer in message.peers],
        warnings=message.warnings,
    )


def _peer_to_pb(peer: Peer) -> pb.Peer:
    return pb.Peer(
        rank=peer.rank,
        node_id=peer.node_id,
        incarnation=peer.incarnation,
        host=peer.host,
        pid=peer.pid,
        endpoints=peer.endpoints,
    )


def cause_to_pb(cause: FailureCause) -> pb.Cause:
    """A cause as it travels."""
    return pb.Cause(
        kind=cause.kind,
        message=cause.message,
        rank=cause.rank,
        host=cause.host,
        pid=cause.pid,
        position=cause.position,
        traceback=cause.traceback,
        location=location_to_pb(cause.location),
    )


def location_to_pb(at: Location) -> pb.Location | None:
    """A location as it travels; None if nothing is known."""
    if at == NOWHERE:
        return None
    return pb.Location(
        step=at.step,
        microbatch=at.microbatch,
        instruction=at.instruction,
        operation=at.operation,
        module=at.module,
        source=at.source,
        edge=at.edge,
        waits_for=at.waits_for,
        waits_what=at.waits_what,
    )


# Decoding.


def decode_worker(data: bytes) -> WorkerMessage:
    """A worker's message from bytes that may come from anybody, whatever its fence.

    Raises:
        MessageError: They are not a valid message.
    """
    return open_worker(data)[1]


def decode_scheduler(data: bytes) -> SchedulerMessage:
    """A scheduler's message from bytes that may come from anybody, whatever its fence.

    Raises:
        MessageError: They are not a valid message.
    """
    return open_scheduler(data)[1]


def open_worker(data: bytes) -> tuple[Fence, WorkerMessage]:
    """The fence of a worker's message, and the message.

    Raises:
        MessageError: The bytes are not a valid message.
    """
    message = _parse(pb.WorkerMessage(), data)
    kind = message.WhichOneof("kind")
    if kind is None:
        raise MessageError("the message is empty")
    return _fence(message.fence), _WORKER_DECODERS[kind](message)


def open_scheduler(data: bytes) -> tuple[Fence, SchedulerMessage]:
    """The fence of a scheduler's message, and the message.

    Raises:
        MessageError: The bytes are not a valid message.
    """
    message = _parse(pb.SchedulerMessage(), data)
    kind = message.WhichOneof("kind")
    if kind is None:
        raise MessageError("the message is empty")
    return _fence(message.fence), _SCHEDULER_DECODERS[kind](message)


def _fence(raw: pb.Fence) -> Fence:
    return Fence(
        job=checked_string(raw.job, "job", limits.MAX_NAME_CHARS),
        generation=raw.generation,
        incarnation=checked_string(raw.incarnation, "incarnation", limits.MAX_INCARNATION_CHARS),
        number=raw.number,
    )


def _parse(message: _Parsed, data: bytes) -> _Parsed:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MessageError("the bytes are not a message of this protocol") from error
    refuse_unknown_fields(message)
    return message


def refuse_unknown_fields(message: Message) -> None:
    """Refuse a message from another version, at any depth.

    Raises:
        MessageError: It has a field that this version does not know.
    """
    if len(UnknownFieldSet(message)):
        name = message.DESCRIPTOR.name
        raise MessageError(f"{name} has a field that this version of graphsplit does not know")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            refuse_unknown_fields(part)


def _register(message: pb.WorkerMessage) -> Register:
    raw = message.register
    versions = _map(raw.versions, "versions", limits.MAX_VERSIONS, limits.MAX_VERSION_CHARS)
    if not 1 <= raw.num_workers <= limits.MAX_WORKERS:
        raise MessageError(f"num_workers is {raw.num_workers}, not 1 to {limits.MAX_WORKERS}")
    return Register(
        node_id=checked_string(raw.node_id, "node_id", limits.MAX_NODE_ID_CHARS, required=True),
        incarnation=checked_string(
            raw.incarnation, "incarnation", limits.MAX_INCARNATION_CHARS, required=True
        ),
        role=checked_string(raw.role, "role", limits.MAX_NAME_CHARS, required=True),
        num_workers=raw.num_workers,
        wished_rank=raw.wished_rank if raw.HasField("wished_rank") else None,
        host=checked_string(raw.host, "host", limits.MAX_HOST_CHARS, required=True),
        pid=_pid(raw.pid, lowest=1),
        endpoints=_endpoints(raw.endpoints),
        versions=versions,
        script_digest=checked_string(raw.script_digest, "script_digest", limits.MAX_NAME_CHARS),
        num_threads=raw.num_threads,
        cpu_capability=checked_string(raw.cpu_capability, "cpu_capability", limits.MAX_NAME_CHARS),
        seed=raw.seed if raw.HasField("seed") else None,
        recovery=_recovery(raw.recovery),
        resume=_resume(raw.resume) if raw.HasField("resume") else None,
        attempt=_attempt(raw.attempt),
    )


def _attempt(value: int) -> int:
    if value < 1:
        raise MessageError("the number of the attempt is missing")
    return value


def _recovery(name: str) -> str:
    if name not in RECOVERY_POLICIES:
        raise MessageError("the recovery policy is not known")
    return name


def _resume(raw: pb.Resume) -> Resume:
    return Resume(
        job=checked_string(raw.job, "job", limits.MAX_NAME_CHARS, required=True),
        generation=_generation(raw.generation),
        rank=_rank(raw.rank),
        num_departed=raw.num_departed,
    )


def _rank(value: int) -> int:
    if value >= limits.MAX_WORKERS:
        raise MessageError(f"rank is {value}, not 0 to {limits.MAX_WORKERS - 1}")
    return value


def _generation(value: int) -> int:
    if value < 1:
        raise MessageError("the generation is missing")
    return value


def _heartbeat(message: pb.WorkerMessage) -> Heartbeat:
    raw = message.heartbeat
    position = checked_string(raw.position, "position", limits.MAX_POSITION_CHARS, lines=True)
    if len(raw.watched) > limits.MAX_WATCHED:
        raise MessageError(f"{len(raw.watched)} ranks are watched")
    return Heartbeat(
        raw.progress,
        position,
        watched=tuple(_rank(rank) for rank in raw.watched),
        location=location_from_pb(raw.location),
        wants_stop=raw.wants_stop,
    )


def _arrive(message: pb.WorkerMessage) -> Arrive:
    raw = message.arrive
    place = _place(raw.place)
    if place is Place.AGREEMENT and len(raw.digest) != 64:
        raise MessageError("an agreement needs a SHA-256 digest of 64 characters")
    return Arrive(
        place=place,
        name=checked_string(
            raw.name, "name", limits.MAX_NAME_CHARS, required=place is not Place.FINISH
        ),
        digest=checked_string(raw.digest, "digest", 64),
        number=_number(raw.number),
    )


def _number(value: int) -> int:
    if value < 1:
        raise MessageError("the number of the meeting is missing")
    return value


def _rejoin(message: pb.WorkerMessage) -> Rejoin:
    raw = message.rejoin
    return Rejoin(_generation(raw.generation), _endpoints(raw.endpoints))


def _text(message: pb.WorkerMessage) -> Text:
    raw = message.text
    if len(raw.chunk) > limits.TEXT_CHUNK_BYTES:
        raise MessageError(f"a chunk of text has {len(raw.chunk)} bytes")
    name = checked_string(raw.name, "name", limits.MAX_NAME_CHARS, required=True)
    return Text(name=name, chunk=raw.chunk, last=raw.last)


def _failed(message: pb.WorkerMessage) -> Failed:
    return Failed(cause_from_pb(message.failed))


def _formed(message: pb.SchedulerMessage) -> Formed:
    raw = message.formed
    num_workers = len(raw.peers)
    if not 1 <= num_workers <= limits.MAX_WORKERS or raw.rank >= num_workers:
        raise MessageError(f"rank {raw.rank} of {num_workers} workers")
    peers = tuple(_peer(peer) for peer in raw.peers)
    if [peer.rank for peer in peers] != list(range(num_workers)):
        raise MessageError("the peers are not in the order of their ranks")
    if len(raw.warnings) > limits.MAX_WARNINGS:
        raise MessageError(f"{len(raw.warnings)} warnings")
    return Formed(
        rank=raw.rank,
        job=checked_string(raw.job, "job", limits.MAX_NAME_CHARS, required=True),
        generation=_generation(raw.generation),
        seed=raw.seed,
        peers=peers,
        warnings=tuple(
            checked_string(warning, "warning", limits.MAX_MESSAGE_CHARS, lines=True)
            for warning in raw.warnings
        ),
    )


def _peer(raw: pb.Peer) -> Peer:
    return Peer(
        rank=raw.rank,
        node_id=checked_string(raw.node_id, "node_id", limits.MAX_NODE_ID_CHARS, required=True),
        incarnation=checked_string(
            raw.incarnation, "incarnation", limits.MAX_INCARNATION_CHARS, required=True
        ),
        host=checked_string(raw.host, "host", limits.MAX_HOST_CHARS, required=True),
        pid=_pid(raw.pid, lowest=1),
        endpoints=_endpoints(raw.endpoints),
    )


def _progress(message: pb.SchedulerMessage) -> Progress:
    if len(message.progress.values) > limits.MAX_WATCHED:
        raise MessageError(f"progress of {len(message.progress.values)} workers")
    return Progress(dict(message.progress.values))


def _accepted(message: pb.SchedulerMessage) -> Accepted:
    raw = message.accepted
    return Accepted(
        job=checked_string(raw.job, "job", limits.MAX_NAME_CHARS, required=True),
        recovery=_recovery(raw.recovery),
        keeps_journal=raw.keeps_journal,
    )


def _recovering(message: pb.SchedulerMessage) -> Recovering:
    raw = message.recovering
    return Recovering(_generation(raw.generation), cause_from_pb(raw.cause))


def _departed(message: pb.SchedulerMessage) -> Departed:
    raw = message.departed
    return Departed(
        place=_place(raw.place),
        name=checked_string(raw.name, "name", limits.MAX_NAME_CHARS),
        number=_number(raw.number),
    )


def _refused(message: pb.SchedulerMessage) -> Refused:
    reason = message.refused.reason
    return Refused(checked_string(reason, "reason", limits.MAX_MESSAGE_CHARS, lines=True))


def _text_wanted(message: pb.SchedulerMessage) -> TextWanted:
    return TextWanted(checked_string(message.text_wanted.name, "name", limits.MAX_NAME_CHARS))


def cause_from_pb(raw: pb.Cause) -> FailureCause:
    """A cause that arrived.

    Raises:
        MessageError: It breaks a bound, or is of an unknown kind.
    """
    if raw.kind not in _KINDS:
        raise MessageError("the kind of failure is not known")
    if not -1 <= raw.rank < limits.MAX_WORKERS:
        raise MessageError(f"the failure names rank {raw.rank}")
    return FailureCause(
        kind=raw.kind,
        message=checked_string(raw.message, "message", limits.MAX_MESSAGE_CHARS, lines=True),
        rank=raw.rank,
        host=checked_string(raw.host, "host", limits.MAX_HOST_CHARS),
        pid=_pid(raw.pid, lowest=0),
        position=checked_string(raw.position, "position", limits.MAX_POSITION_CHARS, lines=True),
        traceback=checked_string(
            raw.traceback, "traceback", limits.MAX_TRACEBACK_CHARS, lines=True
        ),
        location=location_from_pb(raw.location),
    )


def location_from_pb(raw: pb.Location) -> Location:
    """A location that arrived.

    Raises:
        MessageError: It breaks a bound.
    """
    names = ("instruction", "operation", "module", "source", "waits_what")
    parts = {
        name: checked_string(getattr(raw, name), name, limits.MAX_PLACE_CHARS) for name in names
    }
    return Location(
        step=raw.step if raw.HasField("step") else None,
        microbatch=raw.microbatch if raw.HasField("microbatch") else None,
        edge=raw.edge if raw.HasField("edge") else None,
        waits_for=_rank(raw.waits_for) if raw.HasField("waits_for") else None,
        **parts,
    )


_WORKER_DECODERS: Mapping[str, Callable[[pb.WorkerMessage], WorkerMessage]] = {
    "register": _register,
    "heartbeat": _heartbeat,
    "arrive": _arrive,
    "text": _text,
    "failed": _failed,
    "ready": lambda message: Ready(_generation(message.ready.generation)),
    "rejoin": _rejoin,
    "leave": lambda _: Leave(),
}

_SCHEDULER_DECODERS: Mapping[str, Callable[[pb.SchedulerMessage], SchedulerMessage]] = {
    "accepted": _accepted,
    "refused": _refused,
    "formed": _formed,
    "started": lambda message: Started(_generation(message.started.generation)),
    "recovering": _recovering,
    "stop_soon": lambda _: StopSoon(),
    "progress": _progress,
    "departed": _departed,
    "text_wanted": _text_wanted,
    "failure_noted": lambda _: FailureNoted(),
    "abort": lambda message: Abort(cause_from_pb(message.abort)),
}


def checked_string(
    value: str, name: str, most: int, *, required: bool = False, lines: bool = False
) -> str:
    """A text that arrived.

    Args:
        value: The text.
        name: What it is, for the message.
        most: How many characters it may have.
        required: Whether it must not be empty.
        lines: Whether it may have several lines.

    Raises:
        MessageError: It breaks one of these bounds.
    """
    if required and not value:
        raise MessageError(f"{name} is missing")
    if len(value) > most:
        raise MessageError(f"{name} has {len(value)} characters, more than {most}")
    # Names go into logs and errors: no line breaks or terminal codes from strangers.
    if not lines and not value.isprintable():
        raise MessageError(f"{name} has characters that cannot be printed")
    return value


def _map(raw: Mapping[str, str], name: str, most: int, most_chars: int) -> dict[str, str]:
    if len(raw) > most:
        raise MessageError(f"{name} has {len(raw)} entries, more than {most}")
    return {
        checked_string(
            key, f"a key of {name}", limits.MAX_NAME_CHARS, required=True
        ): checked_string(value, f"{name}[{key[:40]!r}]", most_chars)
        for key, value in raw.items()
    }


def _endpoints(raw: Mapping[str, str]) -> dict[str, str]:
    return _map(raw, "endpoints", limits.MAX_ENDPOINTS, limits.MAX_ENDPOINT_CHARS)


def _pid(value: int, *, lowest: int) -> int:
    if not lowest <= value <= _MAX_PID:
        raise MessageError(f"pid is {value}, not {lowest} to {_MAX_PID}")
    return value


def _place(value: int) -> Place:
    place = _PLACES_BACK.get(value)
    if place is None:
        raise MessageError(f"the place {value} is not known")
    return place
