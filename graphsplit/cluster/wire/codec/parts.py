"""What messages of both sides contain: the fence, places to meet, causes and their locations."""

from __future__ import annotations

from collections.abc import Mapping

from graphsplit._proto import cluster_pb2 as pb
from graphsplit.cluster.wire import limits
from graphsplit.cluster.wire.codec.readers import (
    MessageError,
    read_host,
    read_incarnation,
    read_lines,
    read_name,
    read_pid,
    read_position,
    read_rank,
    read_text,
)
from graphsplit.cluster.wire.messages import Fence, Place
from graphsplit.root_cause import NOWHERE, FailureCause, Location

_PLACES = {
    Place.BARRIER: pb.PLACE_BARRIER,
    Place.AGREEMENT: pb.PLACE_AGREEMENT,
    Place.FINISH: pb.PLACE_FINISH,
}
_PLACES_BACK: Mapping[int, Place] = {int(number): place for place, number in _PLACES.items()}
_KINDS = frozenset(
    {"exception", "lost", "refused", "disagreement", "interrupted", "scheduler_lost", "timeout"}
)
_NAMES_IN_LOCATIONS = ("instruction", "operation", "module", "source", "waits_what")


def fence_to_pb(fence: Fence) -> pb.Fence:
    """A fence as it travels."""
    return pb.Fence(
        job=fence.job,
        generation=fence.generation,
        incarnation=fence.incarnation,
        number=fence.number,
    )


def fence_from_pb(raw: pb.Fence) -> Fence:
    """A fence that arrived.

    Raises:
        MessageError: It breaks a bound.
    """
    return Fence(
        job=read_name(raw.job, "job"),
        generation=raw.generation,
        incarnation=read_incarnation(raw.incarnation),
        number=raw.number,
    )


def place_to_pb(place: Place) -> pb.Place:
    """A place to meet as it travels."""
    return _PLACES[place]


def place_from_pb(value: int) -> Place:
    """A place to meet that arrived.

    Raises:
        MessageError: There is none of this number.
    """
    place = _PLACES_BACK.get(value)
    if place is None:
        raise MessageError(f"the place {value} is not known")
    return place


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
        message=read_lines(raw.message, "message"),
        rank=raw.rank,
        host=read_host(raw.host),
        pid=read_pid(raw.pid, lowest=0),
        position=read_position(raw.position),
        traceback=read_text(raw.traceback, "traceback", limits.MAX_TRACEBACK_CHARS, lines=True),
        location=location_from_pb(raw.location),
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


def location_from_pb(raw: pb.Location) -> Location:
    """A location that arrived.

    Raises:
        MessageError: It breaks a bound.
    """
    names = {
        name: read_text(getattr(raw, name), name, limits.MAX_PLACE_CHARS)
        for name in _NAMES_IN_LOCATIONS
    }
    return Location(
        step=raw.step if raw.HasField("step") else None,
        microbatch=raw.microbatch if raw.HasField("microbatch") else None,
        edge=raw.edge if raw.HasField("edge") else None,
        waits_for=read_rank(raw.waits_for) if raw.HasField("waits_for") else None,
        **names,
    )
