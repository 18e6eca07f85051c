"""An admission limiter: how many strangers may wait at once, and how often they may fail. Pure.

A stranger is a stream that has not registered. Members of the job are not counted here, so nothing
in this file slows down a job that runs.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from dataclasses import dataclass

from graphsplit.security.addresses import peer_host, read_address

# Mistakes and restarts of honest workers stay far below these; guessing a token does not.
_FAILURES, _FAILURES_PER_S = 32.0, 4.0
_LOG_LINES, _LOG_LINES_PER_S = 20.0, 0.5
_MAX_ADDRESSES = 1024


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

    @property
    def num_waiting(self) -> int:
        """How many strangers are being looked at."""
        return self._waiting.total()

    @property
    def num_addresses(self) -> int:
        """How many addresses it remembers."""
        return len(self._failures)

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


def address_of(peer: str) -> str:
    """The machine that gRPC's name of a peer stands for: ``ipv4:10.0.0.7:50012`` is ``10.0.0.7``.

    Of IPv6 only the network counts: one machine has as many addresses there as it likes.
    """
    address = read_address(peer_host(peer))
    if address is None:
        return peer[:64]
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))
