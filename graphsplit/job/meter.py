"""One worker's counts for its metrics: steps and their times, traffic, and waiting."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, TypeVar

from graphsplit.metrics_port import metric
from graphsplit.transport.metered import MeteredTraffic, PeerTraffic

_Part = TypeVar("_Part")

BOUNDS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
"""Upper bounds of the histogram of step times."""


class StepTimes:
    """A histogram of the seconds that steps took."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        """A step took so long."""
        self.total_s += seconds
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """For each bound, how many steps took no longer."""
        return [*zip([*map(str, BOUNDS_S), "+Inf"], accumulate(self._counts), strict=True)]


class Meter:
    """Counts for one worker. Written by the computing thread, read by those that serve metrics.

    Attributes:
        traffic: What is sent and received.
    """

    def __init__(self) -> None:
        self.traffic = MeteredTraffic()
        self._steps: dict[str, StepTimes] = {}

    def timed(self, mode: str, parts: Iterator[_Part]) -> Iterator[_Part]:
        """Count all parts together as one step, if it comes to its end."""
        start = time.perf_counter()
        yield from parts
        times = self._steps.get(mode)
        if times is None:
            times = self._steps[mode] = StepTimes()
        times.add(time.perf_counter() - start)

    def metrics(self, generation: int) -> Iterator[Any]:
        """Everything, as it is now, of prometheus-client."""
        from prometheus_client.core import HistogramMetricFamily

        steps = HistogramMetricFamily(
            "graphsplit_step_seconds", "Seconds that steps took on this worker.", labels=["mode"]
        )
        for mode, times in dict(self._steps).items():
            steps.add_metric([mode], times.buckets(), times.total_s)
        yield steps
        peers = self.traffic.peers()
        for name, text, value in _TRAFFIC:
            values = {str(peer): value(one) for peer, one in peers.items()}
            yield metric(name, text, values, label="peer", is_counter=True)
        yield metric("generation", "The generation that this worker is part of.", generation)


_TRAFFIC: tuple[tuple[str, str, Callable[[PeerTraffic], float]], ...] = (
    ("sent_bytes", "Bytes of values sent to a worker.", lambda one: one.sent_bytes),
    ("sent_messages", "Values sent to a worker.", lambda one: one.sent),
    ("received_bytes", "Bytes of values received from a worker.", lambda one: one.received_bytes),
    ("received_messages", "Values received from a worker.", lambda one: one.received),
    (
        "send_seconds",
        "Seconds spent in sending to a worker: copying, and waiting for room.",
        lambda one: one.send_s,
    ),
    (
        "waiting_seconds",
        "Seconds spent in receiving from a worker: waiting, and taking over.",
        lambda one: one.receive_s,
    ),
)
