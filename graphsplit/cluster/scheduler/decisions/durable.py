"""The durable part of the job's state, and how the job goes on from it."""

from __future__ import annotations

from graphsplit.cluster.scheduler.job.events import Exit, Persist
from graphsplit.cluster.scheduler.job.image import JobImage
from graphsplit.cluster.scheduler.job.roster import NO_NODE, Worker
from graphsplit.cluster.scheduler.job.rules import JobIdentity, JobRules
from graphsplit.cluster.scheduler.job.state import Generation, JobPhase, JobState
from graphsplit.failure import FailureCause

_ENDED = "ended"


def persist(job: JobState) -> None:
    """Write down where the job stands, before anybody is told of it."""
    if not job.rules.keeps_journal or job.seed is None:
        return
    recovers = job.phase is JobPhase.RECOVERING
    image = JobImage(
        job=job.identity.job,
        seed=job.seed,
        num_workers=job.rules.num_workers,
        recovery=job.rules.recovery,
        phase=_ENDED if job.is_over else job.phase.value,
        generation=job.generation.number,
        members={worker.rank: worker.registration for worker in job.roster},
        cause=job.recovery.cause if recovers else job.ending.exit.cause,
    )
    job.effects.append(Persist(image))


def restored(
    rules: JobRules, image: JobImage, now: float, following: JobIdentity | None = None
) -> JobState:
    """The job that another scheduler wrote down; its workers are expected to come back.

    A job that is started again as a whole may have lost its scheduler with all workers: then new
    processes come instead, and begin the following one.
    """
    job = JobState(rules, JobIdentity(image.job, image.seed, image.generation), now)
    job.seed = image.seed
    job.following = following if rules.restarts else None
    for rank, one in sorted(image.members.items()):
        away = Worker(NO_NODE, one, last_seen=now, last_change=now, is_connected=False)
        job.roster.fill(away, rank)
    job.gather_anew()
    job.recovery.cause = image.cause
    if image.phase == "planned":
        # Nobody has run in it; who knows of it gives it up.
        job.phase, job.generation = JobPhase.RECOVERING, Generation.begun(image.generation + 1, now)
        job.recovery.cause = FailureCause("lost", "the scheduler was lost and is back")
    elif image.phase == _ENDED:
        raise ValueError("a job that has ended cannot be restored")
    else:
        job.phase = JobPhase(image.phase)
    if job.phase is JobPhase.FAILED and image.cause is not None:
        job.ending.exit = Exit(rules.failure_status(image.cause), image.cause)
    # Workers that try again only now and then must hear how it ended.
    job.ending.leave_deadline = now + rules.node_timeout_s
    return job
