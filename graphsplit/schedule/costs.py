"""What computing and moving costs, as policies, the simulator and the profiler know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """What moving a message from one worker to another costs.

    Attributes:
        latency_s: From the send of an empty message until its receiver goes on, in seconds.
        bytes_per_s: How many more bytes arrive each second.
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: int) -> float:
        """How long a message of this size takes."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Costs:
    """What one microbatch costs, in seconds and bytes.

    Attributes:
        forward: Seconds of each segment's forward, by segment.
        backward_input: Seconds of the part of its backward that others wait for.
        backward_weight: Seconds of the part that only the optimizer waits for; 0 where the two are
            not apart.
        activations: Bytes that a segment holds from its forward until its backward.
        links: What moving costs, by source and destination.
        optimizer: Seconds of each worker's optimizer step, by worker.
        source: Where these numbers come from, in words: ``"measured over 3 steps"``.
    """

    forward: Mapping[int, float]
    backward_input: Mapping[int, float]
    backward_weight: Mapping[int, float]
    activations: Mapping[int, int] = field(default_factory=dict)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    optimizer: Mapping[int, float] = field(default_factory=dict)
    source: str = ""
