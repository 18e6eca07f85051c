"""An admission limiter: how many strangers may wait at once, and how often they may fail. Pure.

A stranger is a stream that has not registered. Members of the job are not counted here, so nothing
in this file slows down a job that runs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from graphsplit.security.rates import LineLimiter, TokenBucket

# Mistakes and restarts of honest workers stay far below these; guessing a token does not.
_FAILURES, _FAILURES_PER_S = 32.0, 4.0
_MAX_ADDRESSES = 1024


class AdmissionLimiter:
    """Decides, before anything of a stream is read, whether it may be looked at now.

    Takes a fixed amount of memory, whoever comes and however often.

    Args:
        num_workers: How many workers the job has: they may all come at once, from one machine.
        now: Seconds of any clock that does not run backwards.

    Attributes:
        lines: Limits what is printed for refusals.
    """

    def __init__(self, num_workers: int, now: float) -> None:
        self._max_waiting = 2 * num_workers + 16
        self._max_of_address = num_workers + 8
        self._waiting: Counter[str] = Counter()
        self._failures: OrderedDict[str, TokenBucket] = OrderedDict()
        self.lines = LineLimiter(now)

    def enter(self, address: str, now: float) -> str | None:
        """A stream was opened. Returns why it must come back later, or None and counts it."""
        if self._waiting.total() >= self._max_waiting:
            return "too many connections wait to register; try again later"
        if self._waiting[address] >= self._max_of_address:
            return f"too many connections of {address} wait to register; try again later"
        failures = self._failures.get(address)
        if failures is not None and failures.refill(now) < 1:
            return f"too many attempts of {address} failed; try again later"
        self._waiting[address] += 1
        return None

    def leave(self, address: str, now: float, *, has_failed: bool) -> None:
        """A stranger is one no longer: it has registered, was refused, or went away."""
        self._waiting[address] -= 1
        if self._waiting[address] <= 0:
            del self._waiting[address]
        if not has_failed:
            return
        failures = self._failures.pop(address, None)
        if failures is None:
            failures = TokenBucket.full(_FAILURES, _FAILURES_PER_S, now)
        failures.take(now)
        self._failures[address] = failures
        if len(self._failures) > _MAX_ADDRESSES:
            self._failures.popitem(last=False)
