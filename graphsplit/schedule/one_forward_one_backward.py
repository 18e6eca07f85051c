"""1F1B for any graph: backward as soon as it can run, and few microbatches under way.

On a straight pipeline this is the order of PipeDream-Flush (Narayanan et al., arXiv:2006.09503)::

    worker 0   F0 F1 F2    B0 F3 B1 F4 B2 ...        3 microbatches under way
    worker 1      F0 F1 B0 F2 B1 F3 B2 ...           2
    worker 2         F0 B0 F1 B1 F2 B2 ...           1

For other graphs the same rule is played through: a worker that is free runs a backward that can
run, the earliest microbatch first, else a forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction
from graphsplit.schedule.play import Rule, play
from graphsplit.schedule.warm_up import WarmUp

RULE = Rule(backward_first=True, warm_up=WarmUp.BY_LEVEL)


def one_forward_one_backward(
    plan: PartitionPlan, num_microbatches: int
) -> tuple[Sequence[Instruction], ...]:
    """The compute of all workers, each in the order to run it."""
    return play(plan, num_microbatches, RULE)
