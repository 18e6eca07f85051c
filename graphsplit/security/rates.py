"""Limits on what strangers cause: events at a rate, and lines of a log. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_LOG_LINES, _LOG_LINES_PER_S = 20.0, 0.5


@dataclass
class TokenBucket:
    """A limit on events that may come in bursts, and over long times at a rate."""

    capacity: float
    per_s: float
    left: float
    since: float

    @classmethod
    def full(cls, capacity: float, per_s: float, now: float) -> TokenBucket:
        """A full bucket."""
        return cls(capacity, per_s, capacity, now)

    def refill(self, now: float) -> float:
        """Add the tokens of the time since the last call, and return how many there are."""
        self.left = min(self.capacity, self.left + (now - self.since) * self.per_s)
        self.since = now
        return self.left

    def take(self, now: float) -> bool:
        """Take a token; False if none is left."""
        if self.refill(now) < 1:
            return False
        self.left -= 1
        return True


class LineLimiter:
    """Decides which lines are printed where strangers cause them, and counts the others.

    Args:
        now: Seconds of any clock that does not run backwards.
    """

    def __init__(self, now: float) -> None:
        self._bucket = TokenBucket.full(_LOG_LINES, _LOG_LINES_PER_S, now)
        self._num_unlogged = 0

    def logged(self, line: str, now: float) -> str | None:
        """The line to print, or None if there are too many of them."""
        if not self._bucket.take(now):
            self._num_unlogged += 1
            return None
        unlogged, self._num_unlogged = self._num_unlogged, 0
        return f"{line} (and {unlogged} more before it)" if unlogged else line
