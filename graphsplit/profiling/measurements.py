"""One worker's measurements, and what follows from them, as workers tell each other.

They travel as ``encoding.records`` has them. What does not fit the program that was measured is
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from graphsplit.encoding.fields import integer, string
from graphsplit.errors import FrameError
from graphsplit.job.group import read_record
from graphsplit.profiling.recorder import TimedRun
from graphsplit.program.lower import WorkerProgram
from graphsplit.schedule.costs import Costs, Count, LinkCost, Size
from graphsplit.schedule.simulation.timeline import Timeline

_MAX_NS = 1 << 62
Name = Annotated[str, string(256)]


@dataclass(frozen=True)
class Measurements:
    """One worker's measurements.

    Attributes:
        worker: Its rank.
        clock: Whose clock its times are of: equal for workers of one machine.
        host: Whose cores it shares: equal for workers that may use the same ones.
        cores: How many they are.
        num_threads: How many threads an operation uses.
        offset_ns: What to add to its times to get those of worker 0's clock.
        runs: Its runs of the program.
        activations: Bytes that each of its segments saves for backward.
        pings: What an empty message to a worker takes, and how many bytes a second follow.
        resident_bytes: The most memory that its process has held.
    """

    worker: int
    clock: Name
    host: Name
    cores: Count
    num_threads: Count
    offset_ns: Annotated[int, integer(-_MAX_NS, _MAX_NS)]
    runs: tuple[TimedRun, ...]
    activations: Mapping[int, Size] = field(default_factory=dict)
    pings: Mapping[int, LinkCost] = field(default_factory=dict)
    resident_bytes: Size = 0


def read_measurements(text: str, *, worker: int, num_instructions: int) -> Measurements:
    """Read what a worker sent.

    Args:
        text: The text.
        worker: The worker that sent it.
        num_instructions: How many instructions its program has.

    Raises:
        FrameError: It is malformed; names the field.
    """
    what = f"what worker {worker} measured"
    found = read_record(Measurements, text, what=what)
    if found.worker != worker:
        raise FrameError(f"{what}: worker is {found.worker}")
    for run in found.runs:
        for begin, ends in ((run.begin_ns, run.ends_ns), (run.begin_cpu_ns, run.ends_cpu_ns)):
            if len(ends) != num_instructions:
                raise FrameError(f"{what}: a run ends {len(ends)} of {num_instructions} times")
            if any(one > other for one, other in pairwise((begin, *ends))):
                raise FrameError(f"{what}: a run goes back in time")
    return found


@dataclass(frozen=True)
class Estimate:
    """Worker 0's conclusion from all workers' measurements.

    Attributes:
        costs: What computing and moving cost.
        timeline: A step as it was measured.
        resident_bytes: The most memory that each worker's process has held.
    """

    costs: Costs
    timeline: Timeline
    resident_bytes: tuple[Size, ...]


def read_estimate(text: str, programs: Sequence[WorkerProgram]) -> Estimate:
    """Read what worker 0 sent.

    Raises:
        FrameError: It is malformed; names the field.
    """
    what = "what worker 0 sent of all measurements"
    found = read_record(Estimate, text, what=what)
    if len(found.timeline.workers) != len(programs):
        raise FrameError(f"{what}: {len(found.timeline.workers)} workers are in the timeline")
    for spans, program in zip(found.timeline.workers, programs, strict=True):
        known = {None, *program.instructions}
        for span in spans:
            if span.instruction not in known or not span.begin_s <= span.start_s <= span.end_s:
                raise FrameError(f"{what}: the timeline has the span {span}")
    return found
