"""The job's status, for visitors, and for the report of a stall."""

from __future__ import annotations

from graphsplit.cluster.scheduler.job.roster import Worker
from graphsplit.cluster.scheduler.job.state import JobState
from graphsplit.cluster.status.job_status import JobStatus, WorkerStatus
from graphsplit.cluster.status.watchdog import stall_report


def status(job: JobState, now: float) -> JobStatus:
    """The job and all of its workers, at this moment."""
    return JobStatus(
        job=job.identity.job,
        phase=job.phase.value,
        generation=job.generation.number,
        num_workers=job.rules.num_workers,
        seconds=max(0.0, now - job.started),
        workers=tuple(
            _worker_status(job, one, now) for one in sorted(job.roster, key=lambda one: one.rank)
        ),
        cause=job.ending.exit.cause or job.recovery.cause,
        num_refused=job.candidates.num_refused,
        num_recoveries=job.recovery.num_recoveries,
        recovery=job.rules.recovery,
    )


def _worker_status(job: JobState, worker: Worker, now: float) -> WorkerStatus:
    arrival = job.gathering.meeting.waits_at(worker.rank)
    new = worker.registration
    return WorkerStatus(
        rank=worker.rank,
        node_id=new.node_id,
        host=new.host,
        pid=new.pid,
        state=worker.state,
        progress=worker.progress,
        position=worker.position,
        location=worker.location,
        meets_at="" if arrival is None else arrival.meeting_name,
        heard_s=max(0.0, now - worker.last_seen),
        still_s=max(0.0, now - worker.last_change),
        training=worker.training,
    )


def still_s(job: JobState) -> float:
    """How long nobody has made progress, of those who still have something to do."""
    changes = [one.last_change for one in job.roster if not one.is_finished]
    return job.now - max(changes, default=job.now)


def log_stall(job: JobState, *, level: str) -> None:
    """Report who waits for whom."""
    job.log(stall_report(status(job, job.now), still_s(job)), event="stalled", level=level)
