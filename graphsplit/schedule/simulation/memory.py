"""How much memory a step takes at most: activations, and values under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import BACKWARD, Opcode
from graphsplit.schedule.costs import Costs
from graphsplit.schedule.saved_memory import saved_bytes
from graphsplit.schedule.simulation.timeline import Span

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
