"""A job's status as a table for people, and as an object for programs. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from graphsplit.cluster.status.job_status import JobStatus, WorkerStatus
from graphsplit.cluster.status.watchdog import waits_in_words
from graphsplit.text import align, join_numbers

_HEADS = ("rank", "process", "state", "progress", "heard", "where it is")


def status_table(status: JobStatus) -> str:
    """A headline, a line for each worker, and why the job has failed if it has."""
    count = len(status.workers)
    lines = [
        f"job {status.job[:8]}: {status.phase}, generation {status.generation}, "
        f"{count} of {status.num_workers} workers, up {_duration(status.seconds)}"
    ]
    training = next((worker.training for worker in status.workers if worker.training), "")
    if training:
        lines.append(f"training: {training}")
    if status.num_recoveries or status.num_refused:
        lines.append(
            f"recoveries: {status.num_recoveries}, connections refused: {status.num_refused}"
        )
    if status.workers:
        rows = [_row(status, worker) for worker in status.workers]
        lines += ["", *align([_HEADS, *rows])]
    if status.missing:
        lines += ["", f"nobody yet for ranks {join_numbers(status.missing)}"]
    if status.cause is not None:
        verb = "recovers from" if status.phase == "recovering" else "root cause"
        lines += ["", f"{verb}: {status.cause.summary()}"]
    return "\n".join(lines)


def _row(status: JobStatus, worker: WorkerStatus) -> tuple[str, ...]:
    waits = waits_in_words(status, worker)
    places = (worker.position, waits or worker.location.source)
    return (
        str(worker.rank),
        f"{worker.host}:{worker.pid}",
        worker.state,
        str(worker.progress),
        f"{worker.heard_s:.1f} s ago",
        "; ".join(filter(None, places)) or "-",
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def status_object(status: JobStatus) -> dict[str, Any]:
    """Everything, in JSON's types. A traceback is left out: logs have it."""
    found = asdict(status)
    for worker, one in zip(found["workers"], status.workers, strict=True):
        worker["waits_for"] = list(status.waits_for(one))
    found["missing"] = status.missing
    if status.cause is not None:
        del found["cause"]["traceback"]
        found["cause"]["is_retryable"] = status.cause.is_retryable
    return found
