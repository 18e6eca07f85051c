"""What workers say, to bytes and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graphsplit._proto import cluster_pb2 as pb
from graphsplit.cluster.wire import limits
from graphsplit.cluster.wire.codec.parts import (
    cause_from_pb,
    cause_to_pb,
    fence_from_pb,
    fence_to_pb,
    location_from_pb,
    location_to_pb,
    place_from_pb,
    place_to_pb,
)
from graphsplit.cluster.wire.codec.readers import (
    MessageError,
    kind_of,
    parse,
    read_attempt,
    read_endpoints,
    read_generation,
    read_host,
    read_incarnation,
    read_meeting,
    read_name,
    read_node_id,
    read_pid,
    read_position,
    read_rank,
    read_recovery,
    read_text,
    read_versions,
)
from graphsplit.cluster.wire.messages import (
    Arrive,
    Failed,
    Fence,
    Heartbeat,
    Leave,
    Place,
    Ready,
    Register,
    Rejoin,
    Resume,
    Text,
    WorkerMessage,
)

_DIGEST_CHARS = 64


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
                place=place_to_pb(message.place),
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


def encode_worker_fence(fence: Fence) -> bytes:
    """The fence of a worker's message: to be put behind the bytes of the message."""
    return pb.WorkerMessage(fence=fence_to_pb(fence)).SerializeToString()


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


# Decoding.


def decode_worker(data: bytes) -> WorkerMessage:
    """A worker's message from bytes that may come from anybody, whatever its fence.

    Raises:
        MessageError: They are not a valid message.
    """
    return open_worker(data)[1]


def open_worker(data: bytes) -> tuple[Fence, WorkerMessage]:
    """The fence of a worker's message, and the message.

    Raises:
        MessageError: The bytes are not a valid message.
    """
    message = parse(pb.WorkerMessage(), data)
    kind = kind_of(message)
    return fence_from_pb(message.fence), _DECODERS[kind](message)


def _register(message: pb.WorkerMessage) -> Register:
    raw = message.register
    versions = read_versions(raw.versions)
    if not 1 <= raw.num_workers <= limits.MAX_WORKERS:
        raise MessageError(f"num_workers is {raw.num_workers}, not 1 to {limits.MAX_WORKERS}")
    return Register(
        node_id=read_node_id(raw.node_id, required=True),
        incarnation=read_incarnation(raw.incarnation, required=True),
        role=read_name(raw.role, "role", required=True),
        num_workers=raw.num_workers,
        wished_rank=raw.wished_rank if raw.HasField("wished_rank") else None,
        host=read_host(raw.host, required=True),
        pid=read_pid(raw.pid, lowest=1),
        endpoints=read_endpoints(raw.endpoints),
        versions=versions,
        script_digest=read_name(raw.script_digest, "script_digest"),
        num_threads=raw.num_threads,
        cpu_capability=read_name(raw.cpu_capability, "cpu_capability"),
        seed=raw.seed if raw.HasField("seed") else None,
        recovery=read_recovery(raw.recovery),
        resume=_resume(raw.resume) if raw.HasField("resume") else None,
        attempt=read_attempt(raw.attempt),
    )


def _resume(raw: pb.Resume) -> Resume:
    return Resume(
        job=read_name(raw.job, "job", required=True),
        generation=read_generation(raw.generation),
        rank=read_rank(raw.rank),
        num_departed=raw.num_departed,
    )


def _heartbeat(message: pb.WorkerMessage) -> Heartbeat:
    raw = message.heartbeat
    position = read_position(raw.position)
    if len(raw.watched) > limits.MAX_WATCHED:
        raise MessageError(f"{len(raw.watched)} ranks are watched")
    return Heartbeat(
        raw.progress,
        position,
        watched=tuple(read_rank(rank) for rank in raw.watched),
        location=location_from_pb(raw.location),
        wants_stop=raw.wants_stop,
    )


def _arrive(message: pb.WorkerMessage) -> Arrive:
    raw = message.arrive
    place = place_from_pb(raw.place)
    if place is Place.AGREEMENT and len(raw.digest) != _DIGEST_CHARS:
        raise MessageError("an agreement needs a SHA-256 digest of 64 characters")
    return Arrive(
        place=place,
        name=read_name(raw.name, "name", required=place is not Place.FINISH),
        digest=read_text(raw.digest, "digest", _DIGEST_CHARS),
        number=read_meeting(raw.number),
    )


def _text(message: pb.WorkerMessage) -> Text:
    raw = message.text
    if len(raw.chunk) > limits.TEXT_CHUNK_BYTES:
        raise MessageError(f"a chunk of text has {len(raw.chunk)} bytes")
    name = read_name(raw.name, "name", required=True)
    return Text(name=name, chunk=raw.chunk, last=raw.last)


def _rejoin(message: pb.WorkerMessage) -> Rejoin:
    raw = message.rejoin
    return Rejoin(read_generation(raw.generation), read_endpoints(raw.endpoints))


_DECODERS: Mapping[str, Callable[[pb.WorkerMessage], WorkerMessage]] = {
    "register": _register,
    "heartbeat": _heartbeat,
    "arrive": _arrive,
    "text": _text,
    "failed": lambda message: Failed(cause_from_pb(message.failed)),
    "ready": lambda message: Ready(read_generation(message.ready.generation)),
    "rejoin": _rejoin,
    "leave": lambda _: Leave(),
}
