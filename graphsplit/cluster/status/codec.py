"""A job's status, field by field, with its bounds; to bytes and back."""

from __future__ import annotations

from graphsplit._proto import cluster_pb2 as pb
from graphsplit.cluster.status.job_status import STATES, JobStatus, StatusRequest, WorkerStatus
from graphsplit.cluster.wire import limits
from graphsplit.cluster.wire.codec import (
    CAUSE,
    HOST,
    KNOWN_LOCATION,
    NAME,
    NEEDED_NAME,
    NODE_ID,
    PLACE_TEXT,
    POSITION,
    RANK,
)
from graphsplit.cluster.wire.fields import (
    ANY,
    Layout,
    choice,
    integer,
    optional,
    repeated,
    seconds,
)

_WORKER = Layout(
    WorkerStatus,
    pb.WorkerStatus,
    rank=RANK,
    node_id=NODE_ID,
    host=HOST,
    pid=ANY,
    state=choice(STATES, "state of a worker"),
    progress=ANY,
    position=POSITION,
    location=KNOWN_LOCATION,
    meets_at=PLACE_TEXT,
    heard_s=seconds(),
    still_s=seconds(),
)
JOB_STATUS = Layout(
    JobStatus,
    pb.JobStatus,
    job=NEEDED_NAME,
    phase=NEEDED_NAME,
    generation=ANY,
    num_workers=integer(0, limits.MAX_WORKERS),
    seconds=seconds(),
    workers=repeated(_WORKER.nested, limits.MAX_WORKERS, "worker"),
    cause=optional(CAUSE.nested),
    num_refused=ANY,
    num_recoveries=ANY,
    recovery=NAME,
)
REQUEST = Layout(StatusRequest, pb.StatusRequest)
