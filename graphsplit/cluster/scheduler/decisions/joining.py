"""How a process joins the job: it registers, and is enlisted, refused, or waits for a rank."""

from __future__ import annotations

from graphsplit.cluster.scheduler.decisions import ending, generations, recovery, returning
from graphsplit.cluster.scheduler.job.events import Drop
from graphsplit.cluster.scheduler.job.formation import misfit, refusal
from graphsplit.cluster.scheduler.job.roster import Worker
from graphsplit.cluster.scheduler.job.rules import JobIdentity
from graphsplit.cluster.scheduler.job.state import JobPhase, JobState
from graphsplit.cluster.wire.limits import REGISTER_TIMEOUT_S
from graphsplit.cluster.wire.messages import Abort, Register
from graphsplit.failure import FailureCause


def register(job: JobState, node: int, new: Register) -> None:
    """The first message on a stream: who it is, and where it stands in the job."""
    if job.roster.get(node) is not None or node in job.candidates.spares:
        ending.protest(job, node, "registered twice")
        return
    known = job.roster.of(new.incarnation)
    if job.following is not None and new.resume is None and known is None:
        _perhaps_begin_following(job, job.following)
    cause = job.ending.exit.cause
    if new.attempt < job.candidates.attempts.get(new.incarnation, 0):
        job.refuse(node, "it has opened another stream since", new)
    elif new.resume is not None:
        returning.resume(job, node, new, new.resume)
    elif job.phase is JobPhase.FAILED and cause is not None:
        _tell_latecomer(job, node, new, cause)
    elif not job.is_healthy:
        job.refuse(node, "the job is ending", new)
    elif known is not None and job.rules.workers_reconnect:
        returning.come_again(job, known, node, new)
    elif job.phase is JobPhase.FORMING:
        _enlist(job, node, new)
    else:
        _offer_place(job, node, new)


def _perhaps_begin_following(job: JobState, following: JobIdentity) -> None:
    """New processes have come to a scheduler that is back: did anybody of its job as well?"""
    job.following = None
    if not any(worker.is_connected for worker in job.roster):
        job.log(
            "nobody of the job in the journal is here, and new workers are: another one begins",
            event="following",
        )
        job.begin(following, job.now)


def _tell_latecomer(job: JobState, node: int, new: Register, cause: FailureCause) -> None:
    job.candidates.strangers.pop(node, None)
    job.ending.num_to_come -= 1
    job.ending.latecomers.add((new.host, new.pid))
    job.accept(node, new)
    job.tell(node, Abort(cause))


def _enlist(job: JobState, node: int, new: Register) -> None:
    reason = refusal(new, job.roster.holders(new), rules=job.rules)
    if reason is not None:
        job.refuse(node, reason, new)
        return
    job.candidates.strangers.pop(node, None)
    job.liveness.absent.pop(new.incarnation, None)
    job.roster.add(Worker(node, new, last_seen=job.now, last_change=job.now))
    job.log(f"{new.who} registered", event="registered")
    job.accept(node, new)
    if job.roster.is_full:
        generations.plan(job)


def _offer_place(job: JobState, node: int, new: Register) -> None:
    """A new worker while all ranks were given out: it waits until one is free, if it may."""
    _forget_former_stream(job, new)
    reason = _spare_refusal(job, new)
    if reason is not None:
        job.refuse(node, reason, new)
        return
    job.candidates.strangers.pop(node, None)
    job.candidates.spares[node] = new
    job.accept(node, new)
    job.log(f"{new.who} registered, and waits for a rank that is free", event="spare_registered")
    if job.phase is JobPhase.RECOVERING:
        generations.fill(job)
    recovery.take_in(job)


def _forget_former_stream(job: JobState, new: Register) -> None:
    """A process that waits for a rank lost its stream, and is back before its end was noticed."""
    spares = job.candidates.spares
    for node in [node for node, one in spares.items() if one.incarnation == new.incarnation]:
        del spares[node]
        job.effects.append(Drop(node))


def _spare_refusal(job: JobState, new: Register) -> str | None:
    holders, rules = job.roster.holders(new), job.rules
    may_wait = job.rules.lets_rejoin
    reason = (
        misfit(new, holders.first, rules=rules) if may_wait else refusal(new, holders, rules=rules)
    )
    if reason is None and any(new.node_id == one.node_id for one in job.candidates.spares.values()):
        reason = f"another process with the name {new.node_id!r} waits already"
    return reason


def tick(job: JobState) -> None:
    """Refuse streams that were opened and did not register in time."""
    for node, since in list(job.candidates.strangers.items()):
        if job.now - since >= REGISTER_TIMEOUT_S:
            job.refuse(node, f"it did not register within {REGISTER_TIMEOUT_S:g} s")
