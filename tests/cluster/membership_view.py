"""What one slot of a small cluster has to do with the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from membership_slot import NODES_PER_SLOT, slot_of

from graphsplit.cluster.scheduler.job.roster import Worker
from graphsplit.cluster.scheduler.job.state import JobPhase, JobState


@dataclass(frozen=True)
class View:
    """All of the scheduler that matters to what can happen at one slot.

    Attributes:
        is_there: Whether there is a scheduler.
        may_return: Whether there will be one if there is none.
        heard: The lives of this slot whose silence would have consequences.
        nodes: All nodes of this slot that the scheduler has a note of.
        attempts: The same of each life, by which of its streams it was.
    """

    is_there: bool
    may_return: bool
    heard: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    attempts: tuple[tuple[str, int], ...] = ()


def view_of(slot: int, job: JobState | None, *, may_return: bool) -> View:
    """What matters to one slot of a scheduler, if there is one."""
    if job is None:
        return View(False, may_return)
    candidates = job.candidates
    first = NODES_PER_SLOT * slot
    nodes = {
        *job.roster._by_node,
        *candidates.strangers,
        *candidates.spares,
        *(one.node for one in job.roster),
    }
    return View(
        True,
        may_return,
        heard=_heard(slot, job),
        nodes=tuple(sorted(one for one in nodes if first <= one < first + NODES_PER_SLOT)),
        attempts=tuple(
            sorted(one for one in candidates.attempts.items() if slot_of(one[0]) == slot)
        ),
    )


def _heard(slot: int, job: JobState) -> tuple[str, ...]:
    if not job.is_healthy or job.phase is JobPhase.FORMING:
        return ()
    return tuple(
        one.registration.incarnation
        for one in job.roster
        if slot_of(one.registration.incarnation) == slot and (one.is_connected or is_away(one))
    )


def is_away(worker: Worker) -> bool:
    """Whether it was there before the scheduler was, and has yet to come back."""
    return not (worker.is_connected or worker.is_lost)
