"""The status of a job, as one frozen value: for ``graphsplit status`` and for reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from graphsplit.cluster.wire import limits
from graphsplit.cluster.wire.fields import (
    Cause,
    Count,
    Host,
    Name,
    NeededName,
    NodeId,
    PidOrNone,
    Place,
    PlaceText,
    PositionText,
    Rank,
    Seconds,
)
from graphsplit.encoding.fields import AtMost, choice, integer
from graphsplit.root_cause import NOWHERE

RUNNING, AWAY, FINISHED, LOST = STATES = ("running", "away", "finished", "lost")


@dataclass(frozen=True)
class StatusRequest:
    """A visitor asks for the status."""


@dataclass(frozen=True)
class WorkerStatus:
    """One worker, as the scheduler knows it.

    Attributes:
        rank: Its rank; provisional until all have registered.
        node_id: Its name.
        host: Where it runs.
        pid: Its process there.
        state: ``"running"``, ``"away"`` (it has no stream, and may come back), ``"finished"`` or
            ``"lost"``.
        progress: Grows while it does its job.
        position: Where it is, in words.
        location: Where it is, in parts, and which peer it waits for.
        meets_at: Where it waits until all workers have arrived, in words.
        heard_s: Seconds since anything came from it.
        still_s: Seconds since it made progress.
        training: How training goes, in words: ``"epoch 2 of 5, loss 0.314, 12.3 steps/s"``.
    """

    rank: Rank
    node_id: NodeId
    host: Host
    pid: PidOrNone
    state: Annotated[str, choice(STATES, "state of a worker")] = RUNNING
    progress: Count = 0
    position: PositionText = ""
    location: Place = NOWHERE
    meets_at: PlaceText = ""
    heard_s: Seconds = 0.0
    still_s: Seconds = 0.0
    training: PlaceText = ""


@dataclass(frozen=True)
class JobStatus:
    """A job, as its scheduler knows it.

    Attributes:
        job: The job's id.
        phase: How far it has come: ``"forming"``, ``"running"``, ...
        generation: The present generation, or the one to be formed next.
        num_workers: How many workers it has when all are in.
        seconds: Since this scheduler began to serve.
        workers: The workers that are in, by rank.
        cause: Why it has failed, or what it recovers from.
        num_refused: Connections that were refused.
        num_recoveries: How often this scheduler left a generation because a worker was lost.
        recovery: The policy for lost workers.
    """

    job: NeededName
    phase: NeededName
    generation: Count
    num_workers: Annotated[int, integer(0, limits.MAX_WORKERS)]
    seconds: Seconds = 0.0
    workers: Annotated[tuple[WorkerStatus, ...], AtMost(limits.MAX_WORKERS)] = ()
    cause: Cause | None = None
    num_refused: Count = 0
    num_recoveries: Count = 0
    recovery: Name = "fail_fast"

    @property
    def missing(self) -> list[int]:
        """The ranks that nobody holds."""
        held = {worker.rank for worker in self.workers}
        return [rank for rank in range(self.num_workers) if rank not in held]

    def waits_for(self, worker: WorkerStatus) -> tuple[int, ...]:
        """The ranks that a worker waits for: one peer, or all who have yet to arrive."""
        if worker.meets_at:
            return tuple(one.rank for one in self.workers if not one.meets_at)
        here = worker.location
        if here.awaits_all:
            return tuple(one.rank for one in self.workers if not one.location.awaits_all)
        return () if here.waits_for is None else (here.waits_for,)
