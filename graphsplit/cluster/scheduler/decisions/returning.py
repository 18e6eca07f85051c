"""How a known worker comes back on another stream, and is told what it may have missed."""

from __future__ import annotations

from dataclasses import replace

from graphsplit.cluster.scheduler.decisions import durable, ending, gathering, generations, recovery
from graphsplit.cluster.scheduler.job.events import Drop
from graphsplit.cluster.scheduler.job.roster import NO_NODE, Worker
from graphsplit.cluster.scheduler.job.state import JobPhase, JobState
from graphsplit.cluster.wire.messages import Abort, Register, Resume, Started


def come_again(job: JobState, worker: Worker, node: int, new: Register) -> None:
    """A worker that had not heard of any plan lost its stream, and registers again."""
    _attach(job, worker, node, new)
    if job.phase is JobPhase.PLANNED:
        generations.tell_plan(job, worker)
    elif job.phase is JobPhase.RECOVERING:
        job.generation.offering.add(new.incarnation)
        generations.fill(job)


def resume(job: JobState, node: int, new: Register, stands: Resume) -> None:
    """A worker that stands in a generation already lost its stream, and opens another one."""
    is_ours = stands.job == job.identity.job
    worker = (job.roster.of(new.incarnation) or _revived(job, new, stands)) if is_ours else None
    if worker is None:
        job.refuse(
            node,
            f"it was worker {stands.rank} of job {stands.job} in generation "
            f"{stands.generation}, and is not expected any more: the job went on without "
            f"it, or this scheduler serves another one",
            new,
        )
        return
    _attach(job, worker, node, new)
    cause = job.ending.exit.cause
    match job.phase:
        case JobPhase.PLANNED:
            generations.tell_plan(job, worker)
        case JobPhase.RUNNING:
            job.send(worker, Started(job.generation.number))
            ending.repeat_stop(job, worker)
            gathering.catch_up(job, stands.num_departed)
        case JobPhase.RECOVERING:
            recovery.repeat_recovering(job, worker)
        case JobPhase.FAILED if cause is not None:
            job.send(worker, Abort(cause))


def _revived(job: JobState, new: Register, stands: Resume) -> Worker | None:
    """The worker that was given up and is back before another one took its rank."""
    former, rank = job.recovery.former, stands.rank
    if job.rules.goes_on:  # it counted those who were there
        lives = ((n, one.registration.incarnation) for n, one in former.items())
        rank = next((n for n, incarnation in lives if incarnation == new.incarnation), -1)
    if job.phase is not JobPhase.RECOVERING or rank not in job.roster.vacant:
        return None
    lost = former.get(rank)
    if lost is None:  # a scheduler that was away does not know who had this rank
        lost = Worker(NO_NODE, replace(new, resume=None), last_seen=job.now, last_change=job.now)
    if lost.registration.incarnation != new.incarnation:
        return None
    former.pop(rank, None)
    job.liveness.absent.pop(new.incarnation, None)
    lost.node, lost.is_connected = NO_NODE, False
    job.roster.fill(lost, rank)
    durable.persist(job)
    return lost


def _attach(job: JobState, worker: Worker, node: int, new: Register) -> None:
    job.candidates.strangers.pop(node, None)
    if worker.is_connected:
        job.effects.append(Drop(worker.node))
    job.roster.attach(worker, node)
    # In planned, what the others were told must stay true.
    kept = worker.registration.endpoints if job.phase is JobPhase.PLANNED else new.endpoints
    worker.registration = replace(worker.registration, endpoints=kept)
    worker.last_seen = worker.last_change = job.now
    worker.is_lost = worker.is_leaving = False
    job.liveness.suspicion.withdraw_loss(worker.rank)
    job.log(f"worker {worker.rank} ({worker.registration.process}) is back", event="returned")
    job.accept(node, new)
