"""Messages to bytes and back. Everything that arrives is checked here, before any state sees it.

A message is refused, with a reason, when it is not one, lacks a field, has a field this version
does not know, or breaks a bound of ``limits``. Nothing is cut to fit, and nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    Formed,
    Heartbeat,
    Leave,
    Peer,
    Place,
    Progress,
    Refused,
    Register,
    SchedulerMessage,
    Text,
    TextWanted,
    WorkerMessage,
)
from graphsplit.failure import FailureCause

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
            beat = pb.Heartbeat(progress=message.progress, position=message.position)
            out = pb.WorkerMessage(heartbeat=beat)
        case Arrive():
            arrive = pb.Arrive(
                place=_PLACES[message.place], name=message.name, digest=message.digest
            )
            out = pb.WorkerMessage(arrive=arrive)
        case Text():
            text = pb.Text(name=message.name, chunk=message.chunk, last=message.last)
            out = pb.WorkerMessage(text=text)
        case Failed():
            out = pb.WorkerMessage(failed=_cause_to_pb(message.cause))
        case Leave():
            out = pb.WorkerMessage(leave=pb.Leave())
    return out.SerializeToString()


def encode_scheduler(message: SchedulerMessage) -> bytes:
    """The bytes of a scheduler's message."""
    match message:
        case Accepted():
            out = pb.SchedulerMessage(accepted=pb.Accepted())
        case Refused():
            out = pb.SchedulerMessage(refused=pb.Refused(reason=message.reason))
        case Formed():
            out = pb.SchedulerMessage(formed=_formed_to_pb(message))
        case Progress():
            out = pb.SchedulerMessage(progress=pb.Progress(values=message.values))
        case Departed():
            departed = pb.Departed(place=_PLACES[message.place], name=message.name)
            out = pb.SchedulerMessage(departed=departed)
        case TextWanted():
            out = pb.SchedulerMessage(text_wanted=pb.TextWanted(name=message.name))
        case FailureNoted():
            out = pb.SchedulerMessage(failure_noted=pb.FailureNoted())
        case Abort():
            out = pb.SchedulerMessage(abort=_cause_to_pb(message.cause))
    return out.SerializeToString()


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
    )


def _formed_to_pb(message: Formed) -> pb.Formed:
    return pb.Formed(
        rank=message.rank,
        job=message.job,
        generation=message.generation,
        seed=message.seed,
        peers=[
            pb.Peer(
                rank=peer.rank,
                node_id=peer.node_id,
                incarnation=peer.incarnation,
                host=peer.host,
                pid=peer.pid,
                endpoints=peer.endpoints,
            )
            for peer in message.peers
        ],
        warnings=message.warnings,
    )


def _cause_to_pb(cause: FailureCause) -> pb.Cause:
    return pb.Cause(
        kind=cause.kind,
        message=cause.message,
        rank=cause.rank,
        host=cause.host,
        pid=cause.pid,
        position=cause.position,
        traceback=cause.traceback,
    )


# Decoding.


def decode_worker(data: bytes) -> WorkerMessage:
    """A worker's message from bytes that may come from anybody.

    Raises:
        MessageError: They are not a valid message.
    """
    message = _parse(pb.WorkerMessage(), data)
    kind = message.WhichOneof("kind")
    if kind is None:
        raise MessageError("the message is empty")
    return _WORKER_DECODERS[kind](message)


def decode_scheduler(data: bytes) -> SchedulerMessage:
    """A scheduler's message from bytes that may come from anybody.

    Raises:
        MessageError: They are not a valid message.
    """
    message = _parse(pb.SchedulerMessage(), data)
    kind = message.WhichOneof("kind")
    if kind is None:
        raise MessageError("the message is empty")
    return _SCHEDULER_DECODERS[kind](message)


def _parse(message: _Parsed, data: bytes) -> _Parsed:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MessageError("the bytes are not a message of this protocol") from error
    _refuse_unknown_fields(message)
    return message


def _refuse_unknown_fields(message: Message) -> None:
    if len(UnknownFieldSet(message)):
        name = message.DESCRIPTOR.name
        raise MessageError(f"{name} has a field that this version of graphsplit does not know")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            _refuse_unknown_fields(part)


def _register(message: pb.WorkerMessage) -> Register:
    raw = message.register
    versions = _map(raw.versions, "versions", limits.MAX_VERSIONS, limits.MAX_VERSION_CHARS)
    if not 1 <= raw.num_workers <= limits.MAX_WORKERS:
        raise MessageError(f"num_workers is {raw.num_workers}, not 1 to {limits.MAX_WORKERS}")
    return Register(
        node_id=_string(raw.node_id, "node_id", limits.MAX_NODE_ID_CHARS, required=True),
        incarnation=_string(
            raw.incarnation, "incarnation", limits.MAX_INCARNATION_CHARS, required=True
        ),
        role=_string(raw.role, "role", limits.MAX_NAME_CHARS, required=True),
        num_workers=raw.num_workers,
        wished_rank=raw.wished_rank if raw.HasField("wished_rank") else None,
        host=_string(raw.host, "host", limits.MAX_HOST_CHARS, required=True),
        pid=_pid(raw.pid, lowest=1),
        endpoints=_endpoints(raw.endpoints),
        versions=versions,
        script_digest=_string(raw.script_digest, "script_digest", limits.MAX_NAME_CHARS),
        num_threads=raw.num_threads,
        cpu_capability=_string(raw.cpu_capability, "cpu_capability", limits.MAX_NAME_CHARS),
        seed=raw.seed if raw.HasField("seed") else None,
    )


def _heartbeat(message: pb.WorkerMessage) -> Heartbeat:
    raw = message.heartbeat
    position = _string(raw.position, "position", limits.MAX_POSITION_CHARS, lines=True)
    return Heartbeat(progress=raw.progress, position=position)


def _arrive(message: pb.WorkerMessage) -> Arrive:
    raw = message.arrive
    place = _place(raw.place)
    if place is Place.AGREEMENT and len(raw.digest) != 64:
        raise MessageError("an agreement needs a SHA-256 digest of 64 characters")
    return Arrive(
        place=place,
        name=_string(raw.name, "name", limits.MAX_NAME_CHARS, required=place is not Place.FINISH),
        digest=_string(raw.digest, "digest", 64),
    )


def _text(message: pb.WorkerMessage) -> Text:
    raw = message.text
    if len(raw.chunk) > limits.TEXT_CHUNK_BYTES:
        raise MessageError(f"a chunk of text has {len(raw.chunk)} bytes")
    name = _string(raw.name, "name", limits.MAX_NAME_CHARS, required=True)
    return Text(name=name, chunk=raw.chunk, last=raw.last)


def _failed(message: pb.WorkerMessage) -> Failed:
    return Failed(_cause(message.failed))


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
        job=_string(raw.job, "job", limits.MAX_NAME_CHARS, required=True),
        generation=raw.generation,
        seed=raw.seed,
        peers=peers,
        warnings=tuple(
            _string(warning, "warning", limits.MAX_MESSAGE_CHARS, lines=True)
            for warning in raw.warnings
        ),
    )


def _peer(raw: pb.Peer) -> Peer:
    return Peer(
        rank=raw.rank,
        node_id=_string(raw.node_id, "node_id", limits.MAX_NODE_ID_CHARS, required=True),
        incarnation=_string(
            raw.incarnation, "incarnation", limits.MAX_INCARNATION_CHARS, required=True
        ),
        host=_string(raw.host, "host", limits.MAX_HOST_CHARS, required=True),
        pid=_pid(raw.pid, lowest=1),
        endpoints=_endpoints(raw.endpoints),
    )


def _progress(message: pb.SchedulerMessage) -> Progress:
    if len(message.progress.values) > limits.MAX_WORKERS:
        raise MessageError(f"progress of {len(message.progress.values)} workers")
    return Progress(tuple(message.progress.values))


def _departed(message: pb.SchedulerMessage) -> Departed:
    raw = message.departed
    return Departed(_place(raw.place), _string(raw.name, "name", limits.MAX_NAME_CHARS))


def _refused(message: pb.SchedulerMessage) -> Refused:
    reason = message.refused.reason
    return Refused(_string(reason, "reason", limits.MAX_MESSAGE_CHARS, lines=True))


def _text_wanted(message: pb.SchedulerMessage) -> TextWanted:
    return TextWanted(_string(message.text_wanted.name, "name", limits.MAX_NAME_CHARS))


def _cause(raw: pb.Cause) -> FailureCause:
    if raw.kind not in _KINDS:
        raise MessageError("the kind of failure is not known")
    if not -1 <= raw.rank < limits.MAX_WORKERS:
        raise MessageError(f"the failure names rank {raw.rank}")
    return FailureCause(
        kind=raw.kind,
        message=_string(raw.message, "message", limits.MAX_MESSAGE_CHARS, lines=True),
        rank=raw.rank,
        host=_string(raw.host, "host", limits.MAX_HOST_CHARS),
        pid=_pid(raw.pid, lowest=0),
        position=_string(raw.position, "position", limits.MAX_POSITION_CHARS, lines=True),
        traceback=_string(raw.traceback, "traceback", limits.MAX_TRACEBACK_CHARS, lines=True),
    )


_WORKER_DECODERS: Mapping[str, Callable[[pb.WorkerMessage], WorkerMessage]] = {
    "register": _register,
    "heartbeat": _heartbeat,
    "arrive": _arrive,
    "text": _text,
    "failed": _failed,
    "leave": lambda _: Leave(),
}

_SCHEDULER_DECODERS: Mapping[str, Callable[[pb.SchedulerMessage], SchedulerMessage]] = {
    "accepted": lambda _: Accepted(),
    "refused": _refused,
    "formed": _formed,
    "progress": _progress,
    "departed": _departed,
    "text_wanted": _text_wanted,
    "failure_noted": lambda _: FailureNoted(),
    "abort": lambda message: Abort(_cause(message.abort)),
}


def _string(
    value: str, name: str, most: int, *, required: bool = False, lines: bool = False
) -> str:
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
        _string(key, f"a key of {name}", limits.MAX_NAME_CHARS, required=True): _string(
            value, f"{name}[{key[:40]!r}]", most_chars
        )
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
