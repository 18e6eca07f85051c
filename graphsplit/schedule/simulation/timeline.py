"""A step as it passes on each worker: predicted by the simulator, or measured by the profiler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import BACKWARD, Instruction, Opcode
from graphsplit.schedule.costs import Costs
from graphsplit.schedule.saved_memory import saved_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction in time, in seconds from the begin of the step.

    Attributes:
        instruction: What was run; None for what a worker does between two programs.
        begin_s: When the worker came to it.
        start_s: When it no longer waited: for a value, or for room in a channel.
        end_s: When it was done.
    """

    instruction: Instruction | None
    begin_s: float
    start_s: float
    end_s: float

    @property
    def wait_s(self) -> float:
        """How long it waited."""
        return self.start_s - self.begin_s

    @property
    def busy_s(self) -> float:
        """How long it took, without the wait."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """One step on all workers.

    Attributes:
        workers: For each worker its spans, in order.
        step_s: How long a step takes, from the end of the one before to its own.
        peak_bytes: The most memory that each worker's activations and messages take at once.
    """

    workers: tuple[tuple[Span, ...], ...]
    step_s: float
    peak_bytes: tuple[int, ...] = ()

    def busy_s(self, worker: int) -> float:
        """How long a worker is busy in a step."""
        return sum(span.busy_s for span in self.workers[worker])

    def idle_s(self, worker: int) -> float:
        """How long a worker has nothing to do in a step."""
        return max(0.0, self.step_s - self.busy_s(worker))

    def idle_share(self, worker: int) -> float:
        """The part of a step in which a worker has nothing to do, 0 to 1."""
        return self.idle_s(worker) / self.step_s if self.step_s > 0 else 0.0


def messages(timeline: Timeline) -> list[tuple[int, Span, int, Span]]:
    """Each message's sender and send, receiver and receive, where both are in the timeline."""
    sends: dict[tuple[int, int], tuple[int, Span]] = {}
    for worker, spans in enumerate(timeline.workers):
        for span in spans:
            if span.instruction is not None and span.instruction.opcode is Opcode.SEND:
                sends[span.instruction.operand, span.instruction.microbatch] = (worker, span)
    found = []
    for worker, spans in enumerate(timeline.workers):
        for span in spans:
            if span.instruction is not None and span.instruction.opcode is Opcode.RECEIVE:
                sent = sends.get((span.instruction.operand, span.instruction.microbatch))
                if sent is not None:
                    found.append((*sent, worker, span))
    return found


_Change = tuple[float, int]  # when, and how many bytes more


def peak_bytes(
    plan: PartitionPlan, workers: Sequence[Sequence[Span]], costs: Costs
) -> tuple[int, ...]:
    """The most bytes that activations and messages take at once, on each worker.

    A segment's activations are there from its forward to the end of its backward. A message counts
    at its receiver, from the begin of its send until it was received.
    """
    sizes = costs.activations or saved_bytes(plan)
    changes: list[list[_Change]] = [[] for _ in workers]
    for worker, spans in enumerate(workers):
        changes[worker] += _activations(spans, sizes)
        for span in spans:
            if span.instruction is None or span.instruction.opcode not in (
                Opcode.SEND,
                Opcode.RECEIVE,
            ):
                continue
            edge = plan.edges[span.instruction.operand]
            if span.instruction.opcode is Opcode.SEND:
                changes[edge.destination].append((span.start_s, edge.meta.size_bytes))
            else:
                changes[worker].append((span.end_s, -edge.meta.size_bytes))
    return tuple(_peak(found) for found in changes)


def _activations(spans: Sequence[Span], sizes: Mapping[int, int]) -> Iterable[_Change]:
    released: dict[tuple[int, int], float] = {}
    made: list[tuple[tuple[int, int], float, float]] = []
    for span in spans:
        if span.instruction is None:
            continue
        key = (span.instruction.operand, span.instruction.microbatch)
        if span.instruction.opcode is Opcode.FORWARD:
            made.append((key, span.start_s, span.end_s))
        elif span.instruction.opcode in BACKWARD:
            # The last of these that a segment runs for a microbatch lets its activations go.
            released[key] = span.end_s
    for key, start, end in made:
        size = sizes.get(key[0], 0)
        yield start, size
        yield released.get(key, end), -size


def _peak(changes: list[_Change]) -> int:
    most = held = 0
    for _, change in sorted(changes):  # what is let go at a moment, before what is made then
        held += change
        most = max(most, held)
    return most
