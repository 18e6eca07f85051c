"""Liveness: a worker is heard from, stands still, falls silent, reports a failure, is lost."""

from __future__ import annotations

from dataclasses import replace

from graphsplit.cluster.scheduler.decisions import ending, recovery, view
from graphsplit.cluster.scheduler.job import causes
from graphsplit.cluster.scheduler.job.divergence import describe_divergence, diverging_call
from graphsplit.cluster.scheduler.job.events import Drop, ToldByLauncher
from graphsplit.cluster.scheduler.job.roster import Worker
from graphsplit.cluster.scheduler.job.state import JobPhase, JobState
from graphsplit.cluster.status.watchdog import closed_circle
from graphsplit.cluster.wire.limits import FROZEN_AFTER_S
from graphsplit.cluster.wire.messages import NO_CALLS, Failed, FailureNoted, Heartbeat, Progress
from graphsplit.failure import FailureCause

_CIRCLE_S = 8.0


def note_progress(job: JobState, worker: Worker, beat: Heartbeat, *, is_present: bool) -> None:
    """A worker says where it is, and may ask how far others are."""
    if is_present:
        progress = max(worker.progress, beat.progress)
        here, before = beat.location, worker.location
        waits = (here.waits_for, here.waits_what) != (before.waits_for, before.waits_what)
        if waits or (progress, beat.position) != (worker.progress, worker.position):
            worker.last_change = job.now  # a wait that has begun proves nothing yet
        worker.progress, worker.position = progress, beat.position
        worker.location, worker.calls = beat.location, beat.calls
        worker.training = beat.training
        _compare_calls(job, worker)
    if beat.wants_stop:
        ending.stop_soon(job, f"worker {worker.rank} was asked to end")
    if beat.watched and job.phase is JobPhase.RUNNING:
        places = enumerate(job.roster.in_order)  # workers count those who are there
        known = {place: _progress(job, one) for place, one in places if place in beat.watched}
        job.send(worker, Progress(known))


def _progress(job: JobState, worker: Worker) -> int:
    """How far a worker is, with those whom it waits for: as long as they go on, so will it."""
    by_rank = {one.rank: one for one in job.roster}
    total, passed = worker.progress, {worker.rank}
    rank = worker.location.waits_for
    while rank in by_rank and rank not in passed and not by_rank[rank].is_finished:
        passed.add(rank)
        total += by_rank[rank].progress
        rank = by_rank[rank].location.waits_for
    if worker.location.awaits_all:
        total += sum(one.progress for one in job.roster if not one.is_finished)
    return total


def _compare_calls(job: JobState, worker: Worker) -> None:
    """End the job if two workers wait that have made different calls.

    Where any two differ, one of them differs from the first worker. One that was sent what it did
    not expect has failed anyway: the other may be at work, a call further on.
    """
    if job.phase is not JobPhase.RUNNING or not job.roster.is_full:
        return
    first = job.roster.in_order[0]
    others = job.roster.in_order if worker is first else (first,)
    for other in others:
        is_stuck = _waits(job, worker) and _waits(job, other)
        if not is_stuck and not (_is_at_odds(job, worker) or _is_at_odds(job, other)):
            continue
        call = diverging_call(worker.calls, other.calls)
        if call is not None:
            calls_of = {one.rank: one.calls for one in job.roster}
            ending.fail(job, FailureCause("disagreement", describe_divergence(call, calls_of)))
            return


def _waits(job: JobState, worker: Worker) -> bool:
    is_meeting = job.gathering.meeting.waits_at(worker.rank) is not None
    return is_meeting or _is_at_odds(job, worker) or worker.location.waits_for is not None


def _is_at_odds(job: JobState, worker: Worker) -> bool:
    return job.liveness.suspicion.has_odd_message(worker.rank)


def note_failure(job: JobState, worker: Worker, failed: Failed, *, is_present: bool) -> None:
    """A worker failed, or saw that another one did."""
    cause = failed.cause
    job.send(worker, FailureNoted())
    if not job.is_healthy:
        return
    if cause.is_retryable and not is_present:
        return  # what it saw of a membership that is over; see [Note: fences]
    # Who it was is what the registration says; only the worker knows the rest.
    known = worker.cause(cause.kind, cause.message, traceback=cause.traceback)
    position = cause.position or worker.position
    known = replace(known, position=position, location=cause.location)
    job.liveness.suspicion.report(known, job.now)
    if known.is_odd_message:
        if failed.calls != NO_CALLS:
            worker.calls = failed.calls  # at that message; the last heartbeat may be older
        _compare_calls(job, worker)


def disconnect(job: JobState, node: int) -> None:
    """A stream has ended."""
    job.candidates.strangers.pop(node, None)
    if (spare := job.candidates.spares.pop(node, None)) is not None:
        job.log(f"{spare.who} does not wait for a rank any more", event="spare_left")
    worker = job.roster.get(node)
    if worker is None or not worker.is_connected:
        return
    worker.is_connected = False
    if job.is_healthy:
        _lose(job, worker, causes.LEFT_EARLY if worker.is_leaving else causes.BROKEN)


def note_end(job: JobState, event: ToldByLauncher) -> None:
    """A process has ended for good. If it was one of ours, its stream may not tell us so."""
    host, note = event.host, event.note
    if not job.is_healthy:
        ending.note_end(job, host, note.pid)
        return
    worker = next((one for one in job.roster if one.is_process(host, note.pid)), None)
    cause = causes.ended(note.rank, host, note.pid, note.how, note.error)
    if job.phase is JobPhase.FORMING:
        ending.fail(job, cause)
    elif worker is not None:
        worker.is_gone = True
        how = causes.ended_process(note.how, note.error)
        if worker.is_lost and not worker.is_leaving:
            job.liveness.suspicion.explain_loss(worker.cause("lost", how))
        _lose(job, worker, how)
    elif job.rules.goes_on:
        return
    elif job.phase is JobPhase.RECOVERING and note.rank in job.roster.vacant:
        ending.fail(job, cause)


def _lose(job: JobState, worker: Worker, message: str) -> None:
    if worker.is_lost:
        return
    worker.is_lost = True
    cause = worker.cause("lost", message)
    if job.phase is JobPhase.FORMING and job.rules.lets_rejoin:
        job.log(cause.headline, event="worker_lost")
        job.roster.remove(worker)
        job.liveness.absent[worker.registration.incarnation] = worker
        job.effects.append(Drop(worker.node))
        return
    job.liveness.suspicion.observe_loss(cause, job.now)


def decide(job: JobState) -> None:
    """Once the root cause of a failure is known: recover from it, or fail."""
    if not job.is_healthy:
        return
    half_s = job.rules.silence_s / 2  # peers hear nothing either, and may notice a little sooner
    is_falling_silent = any(job.now - one.last_seen > half_s for one in job.roster)
    cause = job.liveness.suspicion.due(job.now, is_somebody_falling_silent=is_falling_silent)
    if cause is None:
        return
    told = [(one.rank, one.location) for one in [*job.roster, *job.liveness.suspicion.causes]]
    cause = causes.seen_by_others(cause, told)
    if recovery.can_recover(job, cause):
        recovery.recover(job, cause)
    else:
        ending.fail(job, cause)


def forgive_own_silence(job: JobState) -> None:
    """If this process was frozen, what the workers sent meanwhile is not read yet."""
    gap = job.now - job.liveness.last_tick
    job.liveness.last_tick = job.now
    if gap > FROZEN_AFTER_S:
        for worker in job.roster:
            worker.last_seen += gap
            worker.last_change += gap


def tick(job: JobState) -> None:
    """A worker that is silent for too long is lost; one that does not come back is given up."""
    silence_s = job.rules.silence_s
    for worker in list(job.roster):
        if job.now - worker.last_seen <= silence_s:
            continue
        was_here = worker.is_connected
        why = causes.silent(silence_s) if was_here else causes.did_not_return(silence_s)
        _lose(job, worker, why)
    absent = job.liveness.absent
    for incarnation, worker in list(absent.items()):
        # It may be frozen: whoever started it may replace it.
        if job.now - worker.last_seen > silence_s:
            del absent[incarnation]
            ending.give_up(job, worker, causes.unheard(silence_s))


def watch(job: JobState) -> None:
    """Report a stall now and then, before it ends the job; end a job that cannot go on.

    Its workers are in a circle, or wait for all though nobody has gone on for too long. A worker's
    wait is as it was a second ago, and a message takes its time; between two hosts a link that is
    down may hold it up, which is told as what it is: so no circle is told at once.
    """
    if job.phase is not JobPhase.RUNNING:
        return
    still_s = view.still_s(job)
    is_one_host = len({one.registration.host for one in job.roster}) == 1
    after_s = _CIRCLE_S if is_one_host else _CIRCLE_S + job.rules.silence_s
    if still_s >= after_s and (circle := closed_circle(view.status(job, job.now), after_s)):
        ending.fail(job, causes.in_circle(circle))
    elif still_s > job.rules.receive_timeout_s and (
        waiting := [one for one in job.roster if one.location.awaits_all]
    ):
        ending.fail(job, causes.nobody_goes_on(waiting, job.rules.receive_timeout_s))
    elif job.liveness.watchdog.is_due(still_s):
        view.log_stall(job, level="warning")
