"""How a generation is formed: vacant ranks are filled, it is planned, all are ready, it runs."""

from __future__ import annotations

from graphsplit.cluster.scheduler.decisions import durable, ending
from graphsplit.cluster.scheduler.job import causes
from graphsplit.cluster.scheduler.job.formation import bit_warnings, choose_seed, missing_ranks
from graphsplit.cluster.scheduler.job.roster import Worker
from graphsplit.cluster.scheduler.job.state import JobPhase, JobState
from graphsplit.cluster.wire.limits import FORMING_REPORT_INTERVAL_S
from graphsplit.cluster.wire.messages import Formed, Ready, Register, Started
from graphsplit.failure import FailureCause
from graphsplit.text import forming_line, join_numbers


def fill(job: JobState) -> None:
    """Give vacant ranks to those who wait for one; plan when all are there."""
    vacant = [] if job.roster.is_full else job.roster.vacant
    for rank in vacant:
        node = _spare_for(job.candidates.spares, rank)
        if node is None:
            continue
        new = job.candidates.spares.pop(node)
        worker = Worker(node, new, last_seen=job.now, last_change=job.now)
        job.roster.fill(worker, rank)
        job.generation.offering.add(new.incarnation)
        job.recovery.former.pop(rank, None)
        _forget_former_life(job, worker)
        job.log(f"{new.who} takes rank {rank}", event="rank")
    waits_for_nobody = job.roster.is_full or (job.rules.goes_on and len(job.roster) > 0)
    if waits_for_nobody and len(job.generation.offering) == len(job.roster):
        plan(job)


def who_fills(job: JobState) -> Register | None:
    """The process that waits for a rank that is vacant, if any does."""
    spares = job.candidates.spares
    nodes = (_spare_for(spares, rank) for rank in job.roster.vacant)
    return next((spares[node] for node in nodes if node is not None), None)


def _forget_former_life(job: JobState, worker: Worker) -> None:
    """A process that has started its script anew is no frozen one, which could be replaced."""
    absent, one = job.liveness.absent, worker.registration
    for incarnation in [n for n, w in absent.items() if w.is_process(one.host, one.pid)]:
        del absent[incarnation]


def _spare_for(spares: dict[int, Register], rank: int) -> int | None:
    """Whoever wishes this rank comes before those who take any."""
    nodes = sorted(spares, key=lambda node: spares[node].wished_rank is None)
    return next((node for node in nodes if spares[node].wished_rank in (rank, None)), None)


def plan(job: JobState) -> None:
    """All are there: ranks are final, and every worker is told who the others are."""
    generation = job.generation
    job.roster.seal()
    job.phase = JobPhase.PLANNED
    generation.ready.clear()
    job.gather_anew()
    if job.roster.is_full:
        job.recovery.former.clear()
        job.liveness.absent.clear()
    by_rank = job.roster.registrations
    if job.seed is None:
        job.seed = choose_seed(by_rank, job.identity.seed)
    durable.persist(job)
    generation.peers = tuple(worker.peer() for worker in job.roster)
    generation.warnings = bit_warnings(by_rank)
    for worker in job.roster:
        # A rank is decided just now: from here on, silence and progress are counted.
        worker.last_change = job.now
        tell_plan(job, worker)
    took_s = job.now - generation.since
    if job.roster.is_full:
        told = f"all {len(job.roster)} workers registered after {took_s:.1f} s"
    else:
        away = f"without workers {join_numbers(job.roster.vacant)}, after {took_s:.1f} s"
        told = f"going on with {len(job.roster)} of {job.rules.num_workers} workers, {away}"
    job.log(told, event="formed")
    for one in job.roster:
        job.log(f"rank {one.rank}: {one.registration.who}", event="rank")
    for warning in generation.warnings:
        job.log("warning: " + warning, event="warning", level="warning")


def tell_plan(job: JobState, worker: Worker) -> None:
    """Tell a worker its place among those who are there, and who the others are."""
    assert job.seed is not None, "seeds are chosen when ranks are"
    formed = Formed(
        rank=job.roster.in_order.index(worker),
        job=job.identity.job,
        generation=job.generation.number,
        seed=job.seed,
        peers=job.generation.peers,
        warnings=job.generation.warnings,
    )
    job.send(worker, formed)


def note_ready(job: JobState, worker: Worker, message: Ready) -> None:
    """A worker knows the plan; when all do, the generation runs."""
    generation = job.generation
    if job.phase is not JobPhase.PLANNED or message.generation != generation.number:
        return
    generation.ready.add(worker.registration.incarnation)
    if len(generation.ready) == len(job.roster):
        job.phase = JobPhase.RUNNING
        durable.persist(job)
        job.broadcast(Started(generation.number))
        for one in job.roster:
            ending.repeat_stop(job, one)


def tick(job: JobState) -> None:
    """Not all workers are there, or ready: say so now and then, and not for ever."""
    generation = job.generation
    is_late = job.now - generation.since >= job.rules.topo_timeout_s
    if not is_late and job.now < generation.next_report:
        return
    generation.next_report += FORMING_REPORT_INTERVAL_S
    if job.recovery.cause is not None:
        _tick_recovering(job, job.recovery.cause, is_late=is_late)
        return
    missing = missing_ranks(job.roster.registrations, job.rules.num_workers)
    line = forming_line(job.rules.num_workers, missing)
    if is_late:
        cause = causes.incomplete(job.rules.topo_timeout_s, line, job.candidates.num_refused)
        ending.fail(job, cause)
    else:
        job.log(line, event="incomplete")


def _tick_recovering(job: JobState, cause: FailureCause, *, is_late: bool) -> None:
    vacant = job.roster.vacant
    offering = job.generation.offering
    slow = [one.rank for one in job.roster if one.registration.incarnation not in offering]
    if is_late:
        ending.fail(job, causes.unrecovered(cause, job.rules.topo_timeout_s, vacant, slow))
        return
    job.log(
        f"generation {job.generation.number}: nobody yet for ranks "
        f"{join_numbers(vacant) or 'none'}; "
        f"not ready to go on: workers {join_numbers(slow) or 'none'}",
        event="incomplete",
    )
