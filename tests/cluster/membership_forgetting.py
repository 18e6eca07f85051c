"""What of a scheduler is put aside between two events because nothing depends on it."""

from __future__ import annotations

from dataclasses import replace

from graphsplit.cluster.scheduler.job.image import JobImage
from graphsplit.cluster.scheduler.job.meetings import Meetings
from graphsplit.cluster.scheduler.job.roster import NO_NODE, Worker
from graphsplit.cluster.scheduler.job.state import JobPhase, JobState
from graphsplit.cluster.scheduler.job.suspicion import Suspicion
from graphsplit.cluster.wire.limits import LEAVE_TIMEOUT_S
from graphsplit.cluster.wire.messages import Register
from graphsplit.failure import FailureCause

_SOON_S = 100.0
_FORMER = FailureCause("lost", "some time ago")


def rewind(job: JobState) -> None:
    """The clock stands at 0 between two actions."""
    job.now = job.liveness.last_tick = job.generation.since = 0.0
    job.generation.next_report = _SOON_S
    job.ending.leave_deadline = LEAVE_TIMEOUT_S
    job.gathering.meeting.last_arrival = 0.0
    job.candidates.strangers = dict.fromkeys(job.candidates.strangers, 0.0)
    job.candidates.num_refused = 0
    job.effects = []
    for worker in job.roster:
        worker.last_seen = worker.last_change = 0.0


def forget(job: JobState) -> None:
    """Put aside what nothing depends on any more, so that what is equal from now on is equal.

    Each of these is looked at in no phase that is not named here, or only shown to people.
    """
    job.identity = replace(job.identity, generation=1)
    job.recovery.num_recoveries = 0
    job.liveness.absent.clear()
    if job.phase is not JobPhase.PLANNED:
        job.generation.ready.clear()
        job.generation.peers = ()
    if job.phase is not JobPhase.RECOVERING:
        job.generation.offering.clear()
        if job.recovery.cause is not None:
            job.recovery.cause = _FORMER
    if not job.is_healthy:
        job.liveness.suspicion = Suspicion()
        job.gathering.meeting = Meetings(range(job.rules.num_workers))
    job.candidates.spares = {
        node: _first_attempt(one) for node, one in job.candidates.spares.items()
    }
    for worker in [*job.recovery.former.values(), *job.roster]:
        worker.registration = _first_attempt(worker.registration)
        if worker.node != NO_NODE and (not worker.is_connected or _is_former(job, worker)):
            # Its stream has ended, and nothing more comes from there.
            job.roster._by_node.pop(worker.node, None)
            worker.node = NO_NODE


def without_attempts(image: JobImage) -> JobImage:
    """On which of its streams a worker registered does not matter to another scheduler."""
    members = {rank: _first_attempt(one) for rank, one in image.members.items()}
    return replace(image, members=members)


def _first_attempt(one: Register) -> Register:
    return replace(one, attempt=1)


def _is_former(job: JobState, worker: Worker) -> bool:
    return job.recovery.former.get(worker.rank) is worker
