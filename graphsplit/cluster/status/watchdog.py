"""Turns a stall into a report: who waits for whom, and who is at the end of every chain. Pure.

::

    nobody has made progress for 60 s
      worker 0 waits for worker 1: relu (conv1): worker 1 -> worker 0 (plan 0, edge 7)
        which waits for worker 2: step tickets: worker 2 -> worker 1
          which is at train.py:31, in load (between steps, after step 2)
"""

from __future__ import annotations

from collections.abc import Iterator

from graphsplit.cluster.status.job_status import FINISHED, RUNNING, JobStatus, WorkerStatus
from graphsplit.text import join_numbers

_MOST_CHAINS = 8
_MOST_LINKS = 16
_LONGEST_S = 20.0


class Watchdog:
    """Decides when a stall is worth a report: after a while, and then ever more rarely.

    Args:
        receive_timeout_s: How long a wait may last; the first report comes well before.
    """

    def __init__(self, receive_timeout_s: float) -> None:
        self._first_s = min(_LONGEST_S, receive_timeout_s / 5)
        self._next_s = self._first_s

    def is_due(self, still_s: float) -> bool:
        """Whether to report now that nobody has made progress for so long."""
        if still_s < self._first_s:
            self._next_s = self._first_s
        if still_s < self._next_s:
            return False
        self._next_s = 2 * still_s
        return True


def stall_report(status: JobStatus, still_s: float) -> str:
    """The report of a stall: who waits for whom, one chain after the other."""
    chains = list(_chains(status))
    lines = [f"nobody has made progress for {still_s:.0f} s"]
    for chain in chains[:_MOST_CHAINS]:
        lines += [f"{'  ' * (depth + 1)}{line}" for depth, line in enumerate(chain)]
    if len(chains) > _MOST_CHAINS:
        lines.append(f"  and {len(chains) - _MOST_CHAINS} more chains like these")
    return "\n".join(lines)


def _chains(status: JobStatus) -> Iterator[list[str]]:
    """Chains that begin where nobody waits; then those that are circles."""
    by_rank = {worker.rank: worker for worker in status.workers}
    awaited = {rank for worker in status.workers for rank in status.waits_for(worker)[:1]}
    told: set[int] = set()
    starts = [rank for rank in by_rank if rank not in awaited] + list(by_rank)
    for start in starts:
        if start not in told:
            yield _chain(status, by_rank, start, told)


def _chain(
    status: JobStatus, by_rank: dict[int, WorkerStatus], start: int, told: set[int]
) -> list[str]:
    """One chain from a worker on, up to one that does not wait, or was told of already."""
    lines: list[str] = []
    passed: list[int] = []
    rank, subject = start, f"worker {start}"
    while True:
        worker = by_rank.get(rank)
        if worker is None:
            return [*lines, f"{subject} is not there"]
        is_known = rank in told
        told.add(rank)
        passed.append(rank)
        waits_for = status.waits_for(worker)
        if not waits_for:
            return [*lines, f"{subject} {_place(worker)}"]
        lines.append(f"{subject} {_wait(worker, waits_for)}")
        if len(passed) > 1 and _is_at_other_end(worker, by_rank[passed[-2]]):
            return [*lines, "at the other end of the same channel: nothing has come through it"]
        if waits_for[0] in passed:
            return [*lines, f"worker {waits_for[0]}, in a circle: none of them can go on"]
        if (is_known and len(passed) > 1) or len(passed) == _MOST_LINKS:
            return [*lines, "as told above" if is_known else "and so on"]
        rank, subject = waits_for[0], "which"


def closed_circle(status: JobStatus, for_s: float) -> str:
    """Workers that wait for each other, so that none can go on, in words; empty if there are none.

    Each has said so for some time, in which no message came to it. A value of a plan may be under
    way between two hosts for long, and a snapshot beside its steps: a wait for one proves nothing.
    Nor do two that wait at the two ends of one channel: its connection is being made, for where no
    value is to be taken, there is room for one.
    """
    by_rank = {worker.rank: worker for worker in status.workers}
    blocked = {
        rank: [
            one
            for one in status.waits_for(worker)
            if one in by_rank and not _is_at_other_end(worker, by_rank[one])
        ]
        for rank, worker in by_rank.items()
        if worker.location.edge is None
        and not worker.location.awaits_all
        and worker.still_s - worker.heard_s >= for_s
    }
    for start in blocked:
        passed: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in passed:
            passed.append(rank)
            rank = next((one for one in blocked[rank] if blocked.get(one)), None)
        if rank is not None:
            circle = [by_rank[one] for one in passed[passed.index(rank) :]]
            return "; ".join(
                f"worker {one.rank} {_wait(one, status.waits_for(one))}{_at(one)}"
                for one in circle[:_MOST_CHAINS]
            )
    return ""


def _is_at_other_end(one: WorkerStatus, other: WorkerStatus) -> bool:
    here, there = one.location, other.location
    is_mutual = (here.waits_for, there.waits_for) == (other.rank, one.rank)
    return is_mutual and here.waits_what == there.waits_what


def _at(worker: WorkerStatus) -> str:
    return worker.location.source and f", at {worker.location.source}"


def standing_still(status: JobStatus, rank: int) -> int | None:
    """The worker at the end of the chain of waits that begins at one, if it waits for nobody."""
    by_rank = {worker.rank: worker for worker in status.workers}
    passed: list[int] = []
    while rank not in passed and rank in by_rank:
        passed.append(rank)
        waits_for = status.waits_for(by_rank[rank])
        if not waits_for:
            is_at_work = len(passed) > 1 and by_rank[rank].state == RUNNING
            return rank if is_at_work else None
        rank = waits_for[0]
    return None


def _wait(worker: WorkerStatus, waits_for: tuple[int, ...]) -> str:
    whom = f"worker{'s' if len(waits_for) > 1 else ''} {join_numbers(waits_for, most=8)}"
    what = worker.meets_at or worker.location.waits_what
    return f"waits for {whom}{what and f': {what}'}"


def _place(worker: WorkerStatus) -> str:
    if worker.state == FINISHED:
        return "has come to the end of its script"
    if worker.state != "running":
        return f"is {worker.state}"
    source, position = worker.location.source, worker.position
    if source:
        return f"is at {source}{position and f' ({position})'}"
    return f"is here: {position}" if position else "has not said where it is"


def waits_in_words(status: JobStatus, worker: WorkerStatus) -> str:
    """The wait of one worker in words; empty if it waits for nobody."""
    waits_for = status.waits_for(worker)
    return _wait(worker, waits_for) if waits_for else ""
