"""How a generation is left because a worker was lost, and who takes part in the next one."""

from __future__ import annotations

from dataclasses import replace

from graphsplit.cluster.scheduler.decisions import durable, generations
from graphsplit.cluster.scheduler.job.events import Drop
from graphsplit.cluster.scheduler.job.roster import Worker
from graphsplit.cluster.scheduler.job.state import Generation, JobPhase, JobState
from graphsplit.cluster.scheduler.job.suspicion import Suspicion
from graphsplit.cluster.wire.limits import MAX_UNEXPLAINED_RECOVERIES
from graphsplit.cluster.wire.messages import NO_CALLS, Recovering, Rejoin
from graphsplit.failure import FailureCause
from graphsplit.root_cause import JOINED


def can_recover(job: JobState, cause: FailureCause) -> bool:
    """Whether the job may go on in another generation after this."""
    return (
        job.rules.lets_rejoin
        and cause.kind == "lost"
        and job.phase is not JobPhase.FORMING
        and job.recovery.num_unexplained < MAX_UNEXPLAINED_RECOVERIES
        and (
            any(not worker.is_lost for worker in job.roster)
            if job.rules.goes_on
            else not any(worker.is_gone for worker in job.roster)
        )
    )


def take_in(job: JobState) -> None:
    """Where the job has gone on without some: let those who have come since take part."""
    if job.rules.goes_on and job.phase is JobPhase.RUNNING:
        new = generations.who_fills(job)
        if new is not None:
            recover(job, FailureCause(JOINED, f"{new.who} has come, and is to take part"))


def recover(job: JobState, cause: FailureCause) -> None:
    """Go on without those who are lost; their ranks are vacant."""
    recovery = job.recovery
    lost = [worker for worker in job.roster if worker.is_lost]
    for worker in lost:
        job.roster.remove(worker)
        if not worker.is_leaving:  # who says so is not frozen, and may begin its script anew
            job.liveness.absent[worker.registration.incarnation] = worker
        recovery.former[worker.rank] = worker
        job.generation.offering.discard(worker.registration.incarnation)
        if worker.is_connected:
            job.effects.append(Drop(worker.node))
    job.liveness.suspicion = Suspicion()
    is_first = job.phase is not JobPhase.RECOVERING
    if not lost:
        recovery.num_unexplained += cause.kind != JOINED
    elif is_first:  # later on, those who begin anew are lost on purpose, and explain nothing
        recovery.num_unexplained = 0
    if is_first:
        recovery.num_recoveries += 1
        _leave_generation(job, cause)
    durable.persist(job)
    if is_first:
        job.log(
            f"recovering to generation {job.generation.number} from {cause.describe()}",
            event="recovering",
            level="warning",
        )
        job.broadcast(Recovering(job.generation.number, cause))
    generations.fill(job)


def _leave_generation(job: JobState, cause: FailureCause) -> None:
    job.phase = JobPhase.RECOVERING
    job.generation = Generation.begun(job.generation.number + 1, job.now)
    job.recovery.cause = cause
    job.gather_anew()
    for worker in job.roster:
        worker.is_finished = False
        worker.progress = 0
        worker.calls = NO_CALLS


def repeat_recovering(job: JobState, worker: Worker) -> None:
    """A worker may have missed that its generation is over."""
    assert job.recovery.cause is not None
    job.send(worker, Recovering(job.generation.number, job.recovery.cause))


def note_offer(job: JobState, worker: Worker, offer: Rejoin) -> None:
    """A worker has left its generation, and can be reached elsewhere in the next one."""
    if job.phase is not JobPhase.RECOVERING or offer.generation != job.generation.number:
        return
    worker.registration = replace(worker.registration, endpoints=offer.endpoints)
    job.generation.offering.add(worker.registration.incarnation)
    generations.fill(job)
