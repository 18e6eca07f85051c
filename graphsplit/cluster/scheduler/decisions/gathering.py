"""Meetings of all workers: they arrive, are let go together, or disagree. See ``Meeting``."""

from __future__ import annotations

from graphsplit.cluster.scheduler.decisions import ending
from graphsplit.cluster.scheduler.job import causes
from graphsplit.cluster.scheduler.job.divergence import call_of_some, describe_divergence
from graphsplit.cluster.scheduler.job.meetings import Dispute
from graphsplit.cluster.scheduler.job.roster import Worker
from graphsplit.cluster.scheduler.job.state import JobPhase, JobState
from graphsplit.cluster.wire.limits import TEXT_TIMEOUT_S
from graphsplit.cluster.wire.messages import Arrive, Departed, MeetingKind, Text, TextWanted
from graphsplit.failure import FailureCause


def arrive(job: JobState, worker: Worker, arrival: Arrive, *, is_present: bool) -> None:
    """A worker waits at its next meeting, or says so again."""
    if job.phase is JobPhase.DRAINING and arrival.kind is MeetingKind.FINISH:
        _let_go(job, worker, arrival)
    if not job.is_healthy or not is_present:
        return
    meeting = job.gathering.meeting
    waits_at = meeting.waits_at(worker.rank)
    if job.phase is JobPhase.RUNNING and arrival.number <= meeting.num_departed:
        _let_go(job, worker, arrival)
        return
    if arrival == waits_at:
        return
    number = meeting.num_departed + 1
    if job.phase is not JobPhase.RUNNING or waits_at is not None or arrival.number != number:
        ending.protest(job, worker.node, f"arrived at {arrival.meeting_name} out of turn")
        return
    apart = meeting.arrive(worker.rank, arrival, job.now)
    if apart is not None:
        call = worker.calls.within
        if call is not None:
            calls_of = {one.rank: one.calls for one in job.roster}
            apart = describe_divergence(call_of_some(call, calls_of), calls_of)
        ending.fail(job, FailureCause("disagreement", apart))
        return
    worker.last_change = job.now  # what the others said of their waits may be older than this
    worker.is_finished = arrival.kind is MeetingKind.FINISH
    if not meeting.is_complete:
        return
    ranks = meeting.differing() if arrival.kind is MeetingKind.AGREEMENT else None
    if ranks is None:
        _depart(job, arrival)
    else:
        _start_dispute(job, arrival.name, ranks)


def _depart(job: JobState, arrival: Arrive) -> None:
    job.gathering.meeting.dissolve()
    job.recovery.num_unexplained = 0
    if arrival.kind is MeetingKind.FINISH:
        ending.finish(job, arrival)
    job.broadcast(Departed(arrival.kind, arrival.name, arrival.number))


def _let_go(job: JobState, worker: Worker, arrival: Arrive) -> None:
    """The others are gone from there already; this worker missed the news."""
    job.send(worker, Departed(arrival.kind, arrival.name, arrival.number))


def catch_up(job: JobState, num_departed: int) -> None:
    """A worker knows of more departures than this scheduler, which was away."""
    meeting = job.gathering.meeting
    for worker in job.workers_of(set(meeting.catch_up(num_departed))):
        arrival = meeting.waits_at(worker.rank)
        assert arrival is not None
        meeting.leave(worker.rank)
        _let_go(job, worker, arrival)


def _start_dispute(job: JobState, name: str, ranks: tuple[int, int]) -> None:
    job.gathering.dispute = Dispute(name, ranks, job.now)
    for worker in job.roster:
        if worker.rank in ranks:
            job.send(worker, TextWanted(name))


def add_text(job: JobState, worker: Worker, text: Text, *, is_present: bool) -> None:
    """A worker shows its text of an agreement; when both are there, the job fails with them."""
    if not job.is_healthy or not is_present:
        return
    dispute = job.gathering.dispute
    if dispute is None:
        ending.protest(job, worker.node, "sent a text that nobody asked for")
        return
    wrong = dispute.add(worker.rank, text)
    if wrong is not None:
        ending.protest(job, worker.node, wrong)
    elif dispute.is_complete:
        ending.fail(job, FailureCause("disagreement", dispute.describe()))


def tick(job: JobState) -> None:
    """Texts are not waited for for ever, and neither are workers that make no progress."""
    dispute, meeting = job.gathering.dispute, job.gathering.meeting
    if dispute is not None:
        if job.now - dispute.since >= TEXT_TIMEOUT_S:
            ending.fail(job, FailureCause("disagreement", dispute.describe()))
        return
    arrival = meeting.open_meeting
    # At the end of the job some may have much left to do; they are alive, or they are lost.
    if arrival is None or arrival.kind is MeetingKind.FINISH:
        return
    timeout_s = job.rules.receive_timeout_s
    missing = job.workers_of(set(meeting.missing))
    latest = max([meeting.last_arrival, *(one.last_change for one in missing)])
    if job.now - latest > timeout_s:
        ending.fail(job, causes.stalled(missing, arrival, timeout_s))
