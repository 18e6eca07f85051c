"""Which of several failures is the root cause. Pure.

A failure rarely comes alone: a worker that is killed breaks its peers' links, and a worker that
raises closes its stream. The strongest explanation within a short grace wins; among equals, the
first::

    strength   what is known
    3          a worker reported what it did itself: an exception, Ctrl-C; or the workers
               disagree. Final at once.
    2          a worker's stream broke, or it fell silent. Withdrawn if it comes back in time. Final
               after ``GRACE_S``.
    1          a worker reported what it saw of others: a peer is gone, a deadline passed, a message
               is not what was expected. Final after ``SEEN_GRACE_S``: workers tell at once what
               they see, and others know better; and not while somebody is falling silent.
"""

from __future__ import annotations

from graphsplit.cluster.wire.limits import GRACE_S, ODD_GRACE_S, SEEN_GRACE_S
from graphsplit.failure import FailureCause

_SEEN, _LOST, _DID = 1, 2, 3
_GRACE_S = {_SEEN: SEEN_GRACE_S, _LOST: GRACE_S, _DID: 0.0}


class Suspicion:
    """Collects explanations; ``due`` hands out the root cause when the grace is over."""

    def __init__(self) -> None:
        self._known: list[tuple[int, FailureCause]] = []
        self._deadline = 0.0

    def report(self, cause: FailureCause, now: float) -> None:
        """A worker reported a failure."""
        is_seen = cause.is_retryable or cause.is_odd_message
        self._add(_SEEN if is_seen else _DID, cause, now)

    def has_odd_message(self, rank: int) -> bool:
        """Whether a worker reported a message that it did not expect."""
        return any(known.rank == rank and known.is_odd_message for _, known in self._known)

    def observe_loss(self, cause: FailureCause, now: float) -> None:
        """The scheduler itself saw that a worker is gone."""
        self._add(_LOST, cause, now)

    def explain_loss(self, cause: FailureCause) -> None:
        """Somebody knows better how that worker was lost."""
        self._known = [
            (strength, cause if strength == _LOST and known.rank == cause.rank else known)
            for strength, known in self._known
        ]

    def withdraw_loss(self, rank: int) -> None:
        """That worker is back."""
        self._known = [
            (strength, cause)
            for strength, cause in self._known
            if strength != _LOST or cause.rank != rank
        ]

    def _add(self, strength: int, cause: FailureCause, now: float) -> None:
        deadline = now + (ODD_GRACE_S if cause.is_odd_message else _GRACE_S[strength])
        self._deadline = min(self._deadline, deadline) if self._known else deadline
        self._known.append((strength, cause))

    @property
    def causes(self) -> list[FailureCause]:
        """All that was told."""
        return [cause for _, cause in self._known]

    @property
    def due_at(self) -> float | None:
        """When the grace is over; None while nobody is suspected."""
        return self._deadline if self._known else None

    def due(self, now: float, *, is_somebody_falling_silent: bool) -> FailureCause | None:
        """The root cause, once nothing better is to be expected; else None."""
        if not self._known or now < self._deadline:
            return None
        strength, cause = max(self._known, key=lambda known: known[0])
        return None if strength == _SEEN and is_somebody_falling_silent else cause
