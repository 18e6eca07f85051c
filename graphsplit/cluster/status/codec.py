"""A job's status to bytes and back, checked like everything that arrives."""

from __future__ import annotations

from graphsplit._proto import cluster_pb2 as pb
from graphsplit.cluster.status.job_status import STATES, JobStatus, WorkerStatus
from graphsplit.cluster.wire import limits
from graphsplit.cluster.wire.codec.parts import (
    cause_from_pb,
    cause_to_pb,
    location_from_pb,
    location_to_pb,
)
from graphsplit.cluster.wire.codec.readers import (
    MessageError,
    parse,
    read_host,
    read_name,
    read_node_id,
    read_position,
    read_rank,
    read_seconds,
    read_text,
)


def encode_request() -> bytes:
    """What a visitor asks."""
    return pb.StatusRequest().SerializeToString()


def check_request(data: bytes) -> None:
    """Look at what a visitor asks.

    Raises:
        MessageError: It is not what can be asked.
    """
    parse(pb.StatusRequest(), data)


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
    raw = parse(pb.JobStatus(), data)
    if raw.num_workers > limits.MAX_WORKERS or len(raw.workers) > limits.MAX_WORKERS:
        raise MessageError(f"{max(raw.num_workers, len(raw.workers))} workers")
    return JobStatus(
        job=read_name(raw.job, "job", required=True),
        phase=read_name(raw.phase, "phase", required=True),
        generation=raw.generation,
        num_workers=raw.num_workers,
        seconds=read_seconds(raw.seconds),
        workers=tuple(_worker(worker) for worker in raw.workers),
        cause=cause_from_pb(raw.cause) if raw.HasField("cause") else None,
        num_refused=raw.num_refused,
        num_recoveries=raw.num_recoveries,
        recovery=read_name(raw.recovery, "recovery"),
    )


def _worker(raw: pb.WorkerStatus) -> WorkerStatus:
    if raw.state not in STATES:
        raise MessageError("the state of a worker is not known")
    return WorkerStatus(
        rank=read_rank(raw.rank),
        node_id=read_node_id(raw.node_id),
        host=read_host(raw.host),
        pid=raw.pid,
        state=raw.state,
        progress=raw.progress,
        position=read_position(raw.position),
        location=location_from_pb(raw.location),
        meets_at=read_text(raw.meets_at, "meets_at", limits.MAX_PLACE_CHARS),
        heard_s=read_seconds(raw.heard_s),
        still_s=read_seconds(raw.still_s),
    )
