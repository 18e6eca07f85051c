"""How the job ends: it finishes, fails, or is stopped in order; then everybody leaves."""

from __future__ import annotations

from graphsplit.cluster.scheduler.decisions import durable, view
from graphsplit.cluster.scheduler.job import causes
from graphsplit.cluster.scheduler.job.events import Exit, Interrupted, TellLauncher
from graphsplit.cluster.scheduler.job.roster import Worker
from graphsplit.cluster.scheduler.job.state import JobPhase, JobState
from graphsplit.cluster.status.watchdog import standing_still
from graphsplit.cluster.wire.limits import LEAVE_TIMEOUT_S
from graphsplit.cluster.wire.messages import STOPPED, Abort, Arrive, StopSoon
from graphsplit.errors import STOPPED_STATUS
from graphsplit.failure import FailureCause
from graphsplit.launcher_line import GivenUp, Over
from graphsplit.text import join_numbers


def finish(job: JobState, arrival: Arrive) -> None:
    """All workers have come to the end of their scripts."""
    stopped = arrival.name == STOPPED
    job.ending.exit = Exit(STOPPED_STATUS if stopped else 0)
    end = "stopped in order" if stopped else "finished"
    job.log(f"all workers have {end}", event=arrival.name or "finished")
    job.phase = JobPhase.DRAINING
    job.effects.append(TellLauncher(Over(tuple(job.roster.vacant))))
    job.ending.leave_deadline = job.now + LEAVE_TIMEOUT_S
    durable.persist(job)


def fail(job: JobState, cause: FailureCause, *, status: int | None = None) -> None:
    """The job has failed for good: all are told why, and are to leave."""
    if cause.kind == "timeout" and job.phase is JobPhase.RUNNING:
        view.log_stall(job, level="error")
        cause = _of_who_stands_still(job, cause)
    ending = job.ending
    if job.phase is JobPhase.FORMING and cause.kind in ("lost", "exception"):
        # The others are on their way: they are to hear of it, and not to look for nobody.
        is_known = any(one.is_process(cause.host, cause.pid) for one in job.roster)
        ending.num_to_come = job.rules.num_workers - len(job.roster) - (not is_known)
    job.phase = JobPhase.FAILED
    ending.leave_deadline = job.now + LEAVE_TIMEOUT_S
    ending.exit = Exit(job.rules.failure_status(cause) if status is None else status, cause)
    told = cause.heard() if cause.is_told_by_worker else cause.story()
    job.log(f"the job failed: {told}", event="failed", level="error")
    durable.persist(job)
    job.broadcast(Abort(cause))
    for node in job.candidates.spares:
        job.tell(node, Abort(cause))
    for worker in job.roster:
        if worker.is_lost and worker.is_connected:  # frozen: it will not leave by itself
            give_up(job, worker, causes.unheard(job.rules.silence_s), is_final=True)


def note_end(job: JobState, host: str, pid: int) -> None:
    """A process has ended: if it was still to come, it is not awaited any more."""
    is_known = any(one.is_process(host, pid) for one in job.roster)
    if job.phase is JobPhase.FAILED and not is_known and (host, pid) not in job.ending.latecomers:
        job.ending.num_to_come -= 1


def _of_who_stands_still(job: JobState, cause: FailureCause) -> FailureCause:
    """Who waited in vain is not to blame, but the worker that all wait for, where there is one."""
    rank = standing_still(view.status(job, job.now), cause.rank)
    worker = next((one for one in job.roster if one.rank == rank), None)
    if worker is None:
        return cause
    return causes.stands_still(worker, cause, job.rules.receive_timeout_s)


def protest(job: JobState, node: int, what: str) -> None:
    """A node broke the protocol: a stranger is refused, a worker ends the job."""
    worker = job.roster.get(node)
    if worker is None:
        if node in job.candidates.strangers or node in job.candidates.spares:
            job.refuse(node, what)
    elif job.is_healthy:
        fail(job, worker.cause("refused", f"the scheduler refused it: it {what}"))


def interrupt(job: JobState, event: Interrupted) -> None:
    """The scheduler itself got a signal: it stops the job in order if it may, or ends it."""
    if not job.is_healthy:
        # Told twice, or told while everyone is leaving anyway: do not wait any more.
        end(job)
        return
    has_begun = any(one.location.step is not None for one in job.roster)
    may_wait = event.signal_name == "SIGTERM" and has_begun
    if may_wait and stop_soon(job, "the scheduler got SIGTERM"):
        return
    message = f"the job was interrupted by {event.signal_name}"
    fail(job, FailureCause("interrupted", message), status=128 + event.signal_number)


def stop_soon(job: JobState, why: str) -> bool:
    """Have all workers end in order. False if they are told already, or not there to be told.

    Workers repeat their wish by every heartbeat, until the job runs.
    """
    if job.ending.is_stopping or job.phase is not JobPhase.RUNNING:
        return False
    job.ending.is_stopping = True
    job.log(f"{why}: all workers leave when their step is done", event="stopping")
    job.broadcast(StopSoon())
    return True


def repeat_stop(job: JobState, worker: Worker) -> None:
    """A worker may have missed that all are to end in order."""
    if job.ending.is_stopping:
        job.send(worker, StopSoon())


def give_up(job: JobState, worker: Worker, why: str, *, is_final: bool = False) -> None:
    """Have whoever started a worker's process end it."""
    note = GivenUp(worker.rank, worker.registration.pid, why, is_final)
    job.effects.append(TellLauncher(note))


def end_if_all_left(job: JobState) -> None:
    """The scheduler may go when nobody is left to be told how the job ended."""
    is_awaited = job.ending.num_to_come > 0 or any(_is_expected(job, one) for one in job.roster)
    if not job.is_healthy and not is_awaited:
        end(job)


def tick(job: JobState) -> None:
    """Nobody waits for ever until all have left."""
    if job.now < job.ending.leave_deadline:
        return
    left = [worker for worker in job.roster if _is_expected(job, worker)]
    for worker in left:
        give_up(job, worker, causes.LINGERED, is_final=True)
    if left:
        ranks = join_numbers(worker.rank for worker in left)
        line = f"workers {ranks} did not leave in {LEAVE_TIMEOUT_S:g} s"
        job.log(line, event="lingering", level="warning")
    end(job)


def _is_expected(job: JobState, worker: Worker) -> bool:
    """Whether this worker has yet to hear how the job ended, or to leave."""
    if worker.is_lost:
        return False
    is_away = not worker.is_leaving and job.rules.workers_reconnect
    return worker.is_connected or is_away


def end(job: JobState) -> None:
    """The scheduler goes, whoever is still there."""
    for node in [*job.candidates.strangers, *job.candidates.spares]:
        job.refuse(node, "the job is ending")
    job.is_over = True
    if job.phase is JobPhase.DRAINING:
        job.phase = JobPhase.FINISHED
    durable.persist(job)
    job.effects.append(job.ending.exit)
