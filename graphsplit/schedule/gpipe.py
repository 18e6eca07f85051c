"""GPipe: all microbatches forward, then all backward (Huang et al., arXiv:1811.06965).

With three workers in a row and two microbatches::

    worker 0   F0 F1             B0 B1
    worker 1      F0 F1       B0 B1
    worker 2         F0 F1 B0 B1

Backward runs in the order of the microbatches, so that gradients accumulate in that order.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction, Opcode


def gpipe(plan: PartitionPlan, worker: int, num_microbatches: int) -> Sequence[Instruction]:
    """The compute of one worker: segments by rising level, then back by falling level."""
    segments = [segment.index for segment in plan.segments_of(worker)]
    compute = [
        Instruction(Opcode.FORWARD, segment, microbatch)
        for microbatch in range(num_microbatches)
        for segment in segments
    ]
    if plan.placed.graph.has_gradients:
        compute += [
            Instruction(Opcode.BACKWARD, segment, microbatch)
            for microbatch in range(num_microbatches)
            for segment in reversed(segments)
            if plan.io[segment].roots or plan.io[segment].leaves
        ]
    return compute
