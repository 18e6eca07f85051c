"""The cores of one host, shared evenly by the workers that compute on it.

While more cores are asked for than there are, all computations go on at the same, lower speed
(processor sharing). So the host has a clock of its own that runs at that speed, and each
computation ends when this clock has advanced by the seconds that it needs: no computation is
touched when another one begins or ends.
"""

from __future__ import annotations

import heapq
import math


class Processors:
    """One host.

    Args:
        cores: How many cores it has.
        threads: How many cores each computation keeps busy.
    """

    def __init__(self, cores: float, threads: int = 1) -> None:
        self._cores = cores
        self._threads = min(threads, cores)
        self._ends: list[tuple[float, int]] = []  # by the host's clock, and who
        self._clock = 0.0
        self._now = 0.0

    def _speed(self) -> float:
        asked = len(self._ends) * self._threads
        return 1.0 if asked <= self._cores else self._cores / asked

    def _advance(self, now: float) -> None:
        self._clock += (now - self._now) * self._speed()
        self._now = now

    def start(self, now: float, worker: int, seconds: float) -> None:
        """A worker begins to compute what takes a core so long."""
        self._advance(now)
        if not self._ends:
            self._clock = now  # sums of small numbers stay exact
        heapq.heappush(self._ends, (self._clock + seconds, worker))

    def next_end(self) -> float:
        """When a computation ends next if no other one begins; infinite if there is none."""
        if not self._ends:
            return math.inf
        return self._now + max(0.0, self._ends[0][0] - self._clock) / self._speed()

    def finish(self, now: float) -> int:
        """The computation that ends now; returns who ran it."""
        self._advance(now)
        end, worker = heapq.heappop(self._ends)
        self._clock = max(self._clock, end)
        return worker
