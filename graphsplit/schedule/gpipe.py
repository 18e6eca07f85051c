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
from graphsplit.program.instruction import Instruction
from graphsplit.schedule.play import Rule, play
from graphsplit.schedule.warm_up import WarmUp

RULE = Rule(forward_first=True, warm_up=WarmUp.NONE)


def gpipe(plan: PartitionPlan, num_microbatches: int) -> tuple[Sequence[Instruction], ...]:
    """The compute of all workers, each in the order to run it."""
    return play(plan, num_microbatches, RULE)
