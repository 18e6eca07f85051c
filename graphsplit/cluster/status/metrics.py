"""A job's status as metrics, which its scheduler serves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from graphsplit.cluster.status.job_status import RUNNING, JobStatus, WorkerStatus
from graphsplit.metrics_port import metric

PHASES = ("forming", "planned", "running", "recovering", "draining", "finished", "failed")


def status_metrics(status: JobStatus) -> Iterator[Any]:
    """The metrics of a job's status, of prometheus-client."""
    yield metric("job_info", "The job that is served.", {status.job: 1.0}, label="job")
    phases = {phase: float(phase == status.phase) for phase in PHASES}
    yield metric("phase", "1 for the phase that the job is in.", phases, label="phase")
    yield metric(
        "generation", "The present generation, or the one to be formed next.", status.generation
    )
    yield metric("uptime_seconds", "Seconds since this scheduler began to serve.", status.seconds)
    yield metric("workers_expected", "Workers of a complete job.", status.num_workers)
    in_job = sum(worker.state == RUNNING for worker in status.workers)
    yield metric("workers_connected", "Workers that have a stream.", in_job)
    yield metric(
        "recoveries",
        "Generations left because a worker was lost.",
        status.num_recoveries,
        is_counter=True,
    )
    yield metric(
        "refused_connections",
        "Connections that were not let in.",
        status.num_refused,
        is_counter=True,
    )
    for name, text, value in _OF_WORKERS:
        values = {str(worker.rank): value(worker) for worker in status.workers}
        yield metric(name, text, values, label="rank")


_OF_WORKERS: tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...] = (
    (
        "heartbeat_age_seconds",
        "Seconds since anything came from a worker.",
        lambda worker: worker.heard_s,
    ),
    ("still_seconds", "Seconds since a worker made progress.", lambda worker: worker.still_s),
    (
        "worker_step",
        "The step that a worker is in; 0 before the first.",
        lambda worker: worker.location.step or 0,
    ),
)
