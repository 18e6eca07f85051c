"""Samples of processes for the soak: memory, threads and file descriptors. Linux."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

# A life is judged once it is long enough to tell growth from warming up.
WARM_UP_S = 60.0
JUDGED_S = 120.0
# Over the judged part of a life, whatever its length.
MOST_THREADS = 1.0
MOST_DESCRIPTORS = 2.0
MOST_MIB = 8.0
_MOST_POINTS = 240


@dataclass(frozen=True)
class Sample:
    """A process at one moment.

    Attributes:
        at_s: Seconds since the soak began.
        rss_mib: Resident memory.
        threads: How many there are.
        descriptors: Open files, sockets and pipes.
    """

    at_s: float
    rss_mib: float
    threads: int
    descriptors: int


@dataclass
class Life:
    """One process of the job, from its start to its end.

    Attributes:
        name: ``"launcher"``, ``"scheduler"`` or ``"worker 2"``.
        pid: Its process.
        began_s: Seconds since the soak began.
        ended: How it ended; empty while it lives.
        survived: How many losses of others it lived through.
        samples: Taken every few seconds.
    """

    name: str
    pid: int
    began_s: float
    ended: str = ""
    survived: int = 0
    samples: list[Sample] = field(default_factory=list)

    def judged(self) -> list[Sample]:
        """The samples after it was warm; none if it did not live long enough."""
        warm = [s for s in self.samples if s.at_s >= self.began_s + WARM_UP_S]
        is_long = len(warm) > 2 and warm[-1].at_s - warm[0].at_s >= JUDGED_S
        return warm if is_long else []

    def growth(self) -> dict[str, float]:
        """The growth of each figure over the judged part, by a slope that outliers do not move."""
        samples = self.judged()
        if not samples:
            return {}
        span_s = samples[-1].at_s - samples[0].at_s
        return {
            name: span_s * slope([(s.at_s, float(getattr(s, name))) for s in samples])
            for name in ("rss_mib", "threads", "descriptors")
        }

    @property
    def is_flat(self) -> bool:
        """Whether nothing grew beyond the bounds."""
        bounds = {
            "rss_mib": MOST_MIB,
            "threads": MOST_THREADS,
            "descriptors": MOST_DESCRIPTORS,
        }
        return all(grown <= bounds[name] for name, grown in self.growth().items())

    def summary(self) -> dict[str, Any]:
        """As it is written to JSON."""
        samples = self.judged() or self.samples
        found: dict[str, Any] = {
            "name": self.name,
            "seconds": round(self.samples[-1].at_s - self.began_s, 1) if self.samples else 0.0,
            "ended": self.ended,
            "survived": self.survived,
            "growth": {k: round(v, 2) for k, v in self.growth().items()},
            "is_flat": self.is_flat,
        }
        for name in ("rss_mib", "threads", "descriptors"):
            values = [getattr(s, name) for s in samples]
            if values:
                found[name] = {
                    "first": round(values[0], 1),
                    "median": round(statistics.median(values), 1),
                    "max": round(max(values), 1),
                    "last": round(values[-1], 1),
                }
        return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope of all pairs of points (Theil and Sen)."""
    few = points[:: -(-len(points) // _MOST_POINTS)]
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(few, 2) if x2 > x1]
    return statistics.median(slopes) if slopes else 0.0


def look(pid: int, at_s: float) -> Sample | None:
    """A process now; None if there is none any more."""
    try:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        if "VmRSS" not in status:
            return None
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    rss_mib = int(status["VmRSS"].split()[0]) / 1024
    return Sample(round(at_s, 1), round(rss_mib, 2), int(status["Threads"]), descriptors)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and of its children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> Iterator[tuple[str, int]]:
    """The processes of a job below its launcher, by name."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, found):
        try:
            content = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        variables = dict(entry.split(b"=", 1) for entry in content if b"=" in entry)
        role, number = variables.get(b"MS_ROLE"), variables.get(b"MS_NODE_ID", b"").decode()
        if role == b"MS_SCHED":
            yield "scheduler", child
        elif role == b"MS_WORKER":
            yield f"worker {number}", child
