"""Which of several failures is the root cause. Pure.

A failure rarely comes alone: a worker that is killed breaks its peers' links, and a worker that
raises closes its stream. The strongest explanation within a short grace wins; among equals, the
first::

    strength   what is known
    3          a worker reported what it did itself: an exception, Ctrl-C; or the workers
               disagree. Final at once.
    2          a worker's stream broke, or it fell silent.
    1          a worker reported what it saw of others: a peer is gone, a deadline passed.
"""

from __future__ import annotations

from graphsplit.cluster.limits import GRACE_S
from graphsplit.failure import FailureCause

SECOND_HAND_KINDS = frozenset({"lost", "timeout", "scheduler_lost"})


class Suspicion:
    """Collects explanations; ``due`` hands out the root cause when the grace is over."""

    def __init__(self) -> None:
        self._cause: FailureCause | None = None
        self._strength = 0
        self._deadline = 0.0

    def report(self, cause: FailureCause, now: float) -> None:
        """A worker reported a failure."""
        is_second_hand = cause.kind in SECOND_HAND_KINDS
        self._add(cause, strength=1 if is_second_hand else 3, now=now)

    def observe_loss(self, cause: FailureCause, now: float) -> None:
        """The scheduler itself saw that a worker is gone."""
        self._add(cause, strength=2, now=now)

    def _add(self, cause: FailureCause, *, strength: int, now: float) -> None:
        if self._cause is None:
            self._deadline = now + GRACE_S
        if strength > self._strength:
            self._cause, self._strength = cause, strength
        if self._strength == 3:
            self._deadline = now

    def due(self, now: float) -> FailureCause | None:
        """The root cause, once nothing better is to be expected; else None."""
        return self._cause if self._cause is not None and now >= self._deadline else None
