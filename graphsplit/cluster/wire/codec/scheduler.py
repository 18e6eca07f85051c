"""What the scheduler says, to bytes and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from graphsplit._proto import cluster_pb2 as pb
from graphsplit.cluster.wire import limits
from graphsplit.cluster.wire.codec.parts import (
    cause_from_pb,
    cause_to_pb,
    fence_from_pb,
    fence_to_pb,
    place_from_pb,
    place_to_pb,
)
from graphsplit.cluster.wire.codec.readers import (
    MessageError,
    kind_of,
    parse,
    read_endpoints,
    read_generation,
    read_host,
    read_incarnation,
    read_lines,
    read_meeting,
    read_name,
    read_node_id,
    read_pid,
    read_recovery,
)
from graphsplit.cluster.wire.messages import (
    Abort,
    Accepted,
    Departed,
    FailureNoted,
    Fence,
    Formed,
    Peer,
    Progress,
    Recovering,
    Refused,
    SchedulerMessage,
    Started,
    StopSoon,
    TextWanted,
)

# Encoding. The dataclasses are our own, so their values are trusted here.


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
                place=place_to_pb(message.place), name=message.name, number=message.number
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


def encode_scheduler_fence(fence: Fence) -> bytes:
    """The fence of a scheduler's message: to be put behind the bytes of the message.

    So a message to many is encoded once.
    """
    return pb.SchedulerMessage(fence=fence_to_pb(fence)).SerializeToString()


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


# Decoding.


def decode_scheduler(data: bytes) -> SchedulerMessage:
    """A scheduler's message from bytes that may come from anybody, whatever its fence.

    Raises:
        MessageError: They are not a valid message.
    """
    return open_scheduler(data)[1]


def open_scheduler(data: bytes) -> tuple[Fence, SchedulerMessage]:
    """The fence of a scheduler's message, and the message.

    Raises:
        MessageError: The bytes are not a valid message.
    """
    message = parse(pb.SchedulerMessage(), data)
    kind = kind_of(message)
    return fence_from_pb(message.fence), _DECODERS[kind](message)


def _accepted(message: pb.SchedulerMessage) -> Accepted:
    raw = message.accepted
    return Accepted(
        job=read_name(raw.job, "job", required=True),
        recovery=read_recovery(raw.recovery),
        keeps_journal=raw.keeps_journal,
    )


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
        job=read_name(raw.job, "job", required=True),
        generation=read_generation(raw.generation),
        seed=raw.seed,
        peers=peers,
        warnings=tuple(read_lines(warning, "warning") for warning in raw.warnings),
    )


def _peer(raw: pb.Peer) -> Peer:
    return Peer(
        rank=raw.rank,
        node_id=read_node_id(raw.node_id, required=True),
        incarnation=read_incarnation(raw.incarnation, required=True),
        host=read_host(raw.host, required=True),
        pid=read_pid(raw.pid, lowest=1),
        endpoints=read_endpoints(raw.endpoints),
    )


def _recovering(message: pb.SchedulerMessage) -> Recovering:
    raw = message.recovering
    return Recovering(read_generation(raw.generation), cause_from_pb(raw.cause))


def _progress(message: pb.SchedulerMessage) -> Progress:
    if len(message.progress.values) > limits.MAX_WATCHED:
        raise MessageError(f"progress of {len(message.progress.values)} workers")
    return Progress(dict(message.progress.values))


def _departed(message: pb.SchedulerMessage) -> Departed:
    raw = message.departed
    return Departed(
        place=place_from_pb(raw.place),
        name=read_name(raw.name, "name"),
        number=read_meeting(raw.number),
    )


_DECODERS: Mapping[str, Callable[[pb.SchedulerMessage], SchedulerMessage]] = {
    "accepted": _accepted,
    "refused": lambda message: Refused(read_lines(message.refused.reason, "reason")),
    "formed": _formed,
    "started": lambda message: Started(read_generation(message.started.generation)),
    "recovering": _recovering,
    "stop_soon": lambda _: StopSoon(),
    "progress": _progress,
    "departed": _departed,
    "text_wanted": lambda message: TextWanted(read_name(message.text_wanted.name, "name")),
    "failure_noted": lambda _: FailureNoted(),
    "abort": lambda message: Abort(cause_from_pb(message.abort)),
}
