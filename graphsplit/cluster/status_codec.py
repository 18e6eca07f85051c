"""A job's status to bytes and back, checked like everything that arrives."""

from __future__ import annotations

import math

from google.protobuf.message import DecodeError

from graphsplit._proto import cluster_pb2 as pb
from graphsplit.cluster import limits
from graphsplit.cluster.codec import (
    MessageError,
    cause_from_pb,
    cause_to_pb,
    checked_string,
    location_from_pb,
    location_to_pb,
    refuse_unknown_fields,
)
from graphsplit.cluster.status import STATES, JobStatus, WorkerStatus


def encode_request() -> bytes:
    """What a visitor asks."""
    return pb.StatusRequest().SerializeToString()


def check_request(data: bytes) -> None:
    """Look at what a visitor asks.

    Raises:
        MessageError: It is not what can be asked.
    """
    request = pb.StatusRequest()
    try:
        request.ParseFromString(data)
    except DecodeError as error:
        raise MessageError("the bytes are not a message of this protocol") from error
    refuse_unknown_fields(request)


def encode_status(status: JobStatus) -> bytes:
    """The bytes of a status, which is our own and trusted here."""
    out = pb.JobStatus(
        job=status.job,
        phase=status.phase,
        generation=status.generation,
        num_workers=status.num_workers,
        seconds=status.seconds,
        workers=[_worker_to_pb(worker) for worker in status.workers],
        cause=None if status.cause is None else cause_to_pb(status.cause),
        num_refused=status.num_refused,
        num_recoveries=status.num_recoveries,
        recovery=status.recovery,
    )
    return out.SerializeToString()


def _worker_to_pb(worker: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        rank=worker.rank,
        node_id=worker.node_id,
        host=worker.host,
        pid=worker.pid,
        state=worker.state,
        progress=worker.progress,
        position=worker.position,
        location=location_to_pb(worker.location),
        meets_at=worker.meets_at,
        heard_s=worker.heard_s,
        still_s=worker.still_s,
    )


def decode_status(data: bytes) -> JobStatus:
    """A status from bytes that may come from anybody.

    Raises:
        MessageError: They are not a valid one.
    """
    raw = pb.JobStatus()
    try:
        raw.ParseFromString(data)
    except DecodeError as error:
        raise MessageError("the bytes are not a message of this protocol") from error
    refuse_unknown_fields(raw)
    if raw.num_workers > limits.MAX_WORKERS or len(raw.workers) > limits.MAX_WORKERS:
        raise MessageError(f"{max(raw.num_workers, len(raw.workers))} workers")
    return JobStatus(
        job=checked_string(raw.job, "job", limits.MAX_NAME_CHARS, required=True),
        phase=checked_string(raw.phase, "phase", limits.MAX_NAME_CHARS, required=True),
        generation=raw.generation,
        num_workers=raw.num_workers,
        seconds=_seconds(raw.seconds),
        workers=tuple(_worker(worker) for worker in raw.workers),
        cause=cause_from_pb(raw.cause) if raw.HasField("cause") else None,
        num_refused=raw.num_refused,
        num_recoveries=raw.num_recoveries,
        recovery=checked_string(raw.recovery, "recovery", limits.MAX_NAME_CHARS),
    )


def _worker(raw: pb.WorkerStatus) -> WorkerStatus:
    if raw.state not in STATES:
        raise MessageError("the state of a worker is not known")
    if raw.rank >= limits.MAX_WORKERS:
        raise MessageError(f"rank is {raw.rank}, not 0 to {limits.MAX_WORKERS - 1}")
    return WorkerStatus(
        rank=raw.rank,
        node_id=checked_string(raw.node_id, "node_id", limits.MAX_NODE_ID_CHARS),
        host=checked_string(raw.host, "host", limits.MAX_HOST_CHARS),
        pid=raw.pid,
        state=raw.state,
        progress=raw.progress,
        position=checked_string(raw.position, "position", limits.MAX_POSITION_CHARS, lines=True),
        location=location_from_pb(raw.location),
        meets_at=checked_string(raw.meets_at, "meets_at", limits.MAX_PLACE_CHARS),
        heard_s=_seconds(raw.heard_s),
        still_s=_seconds(raw.still_s),
    )


def _seconds(value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise MessageError(f"{value} seconds")
    return value
