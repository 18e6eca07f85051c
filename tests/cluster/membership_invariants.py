"""What must hold in every world, whatever went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphsplit.cluster.scheduler.job.events import Effect, Send
from graphsplit.cluster.scheduler.job.state import JobPhase, JobState
from graphsplit.cluster.wire.messages import Abort, Accepted, Formed
from graphsplit.failure import FailureCause


class BrokenInvariant(AssertionError):
    """A world that must not be."""


def check_told(cause: FailureCause) -> None:
    """No worker, and no scheduler, ends because the protocol itself went wrong."""
    is_given_up = "not expected" in cause.message or "is ending" in cause.message
    if cause.kind in ("disagreement", "refused") and not is_given_up:
        raise BrokenInvariant(f"the protocol itself failed: {cause.message}")


def check_all_are_told(effects: list[Effect], job: JobState, *, has_failed: bool) -> None:
    """Whoever is there when the job fails is told why, and so is whoever is back later.

    Args:
        effects: What the scheduler does.
        job: The job after that.
        has_failed: Whether it had failed already.
    """
    if job.phase is not JobPhase.FAILED:
        return
    sent = [(one.node, type(one.message)) for one in effects if isinstance(one, Send)]
    there = {node for node, kind in sent if kind is Accepted}
    if not has_failed:
        there |= {worker.node for worker in job.roster.in_order if worker.is_connected}
    untold = there - {node for node, kind in sent if kind is Abort}
    if untold:
        raise BrokenInvariant(f"the job has failed, and {untold} are not told why")


def check_plan(incarnation: str, endpoints: Mapping[str, str], formed: Formed) -> None:
    """Whoever holds a rank is the one that everybody was told to have it, and is found there."""
    peer = formed.peers[formed.rank]
    if (peer.incarnation, peer.endpoints) != (incarnation, endpoints):
        raise BrokenInvariant(f"{incarnation}, at {endpoints}, was told that it is {peer}")


@dataclass(frozen=True)
class Standing:
    """What one slot claims.

    Attributes:
        incarnation: The process that is there.
        plan: The generation that it takes part in, if it is ready or runs.
        outcome: What has become of it.
    """

    incarnation: str
    plan: Formed | None
    outcome: str


def check_standings(standings: Sequence[Standing], *, has_failed: bool) -> None:
    """Raise if not all of these can be true. ``has_failed``: what the scheduler says of the job."""
    if has_failed and any(one.outcome == "finished" for one in standings):
        raise BrokenInvariant("a worker has finished, and the job has failed")
    plans: dict[int, Formed] = {}
    held: dict[tuple[int, int], str] = {}
    for one in standings:
        if one.plan is None:
            continue
        place = (one.plan.generation, one.plan.rank)
        if place in held:
            raise BrokenInvariant(f"{held[place]} and {one.incarnation} hold {place}")
        held[place] = one.incarnation
        known = plans.setdefault(one.plan.generation, one.plan)
        if known.peers != one.plan.peers:
            raise BrokenInvariant(f"two plans of one generation: {known} and {one.plan}")
