"""A job's status as metrics, which its scheduler serves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from graphsplit.cluster.status.job_status import RUNNING, JobStatus, WorkerStatus
from graphsplit.metrics_port import COUNTER, GAUGE, Gauge

PHASES = ("forming", "planned", "running", "recovering", "draining", "finished", "failed")


def status_metrics(status: JobStatus) -> Iterator[Gauge]:
    """The metrics of a job's status."""
    job = (status.job,)
    yield Gauge("job_info", "The job that is served.", GAUGE, ("job",), ((job, 1.0),))
    yield Gauge(
        "phase",
        "1 for the phase that the job is in.",
        GAUGE,
        ("phase",),
        tuple(((phase,), float(phase == status.phase)) for phase in PHASES),
    )
    generation = float(status.generation)
    yield _one("generation", "The present generation, or the one to be formed next.", generation)
    yield _one("uptime_seconds", "Seconds since this scheduler began to serve.", status.seconds)
    yield _one("workers_expected", "Workers of a complete job.", float(status.num_workers))
    in_job = sum(worker.state == RUNNING for worker in status.workers)
    yield _one("workers_connected", "Workers that have a stream.", float(in_job))
    recoveries = float(status.num_recoveries)
    yield _one("recoveries", "Generations left because a worker was lost.", recoveries, COUNTER)
    refused = float(status.num_refused)
    yield _one("refused_connections", "Connections that were not let in.", refused, COUNTER)
    yield _each(
        status,
        "heartbeat_age_seconds",
        "Seconds since anything came from a worker.",
        lambda worker: worker.heard_s,
    )
    yield _each(
        status,
        "still_seconds",
        "Seconds since a worker made progress.",
        lambda worker: worker.still_s,
    )
    yield _each(
        status,
        "worker_step",
        "The step that a worker is in; 0 before the first.",
        lambda worker: 0.0 if worker.location.step is None else float(worker.location.step),
    )


def _one(name: str, text: str, value: float, kind: str = GAUGE) -> Gauge:
    return Gauge(name, text, kind, (), (((), value),))


def _each(status: JobStatus, name: str, text: str, value: Callable[[WorkerStatus], float]) -> Gauge:
    samples = tuple(((str(worker.rank),), value(worker)) for worker in status.workers)
    return Gauge(name, text, GAUGE, ("rank",), samples)
