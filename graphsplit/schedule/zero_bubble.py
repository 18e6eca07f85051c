"""ZB-H1: weight gradients fill the time in which 1F1B waits (Qi et al., arXiv:2401.10241).

As 1F1B, but the backward of a segment that can be split (``partition.splitting``) is run in two
parts: I makes what earlier workers wait for, W the gradients of large weights, whenever nothing
else can run. With three workers in a row::

    worker 0   F0 F1 F2       I0 F3 W0 I1 ...
    worker 1      F0 F1    I0 F2 I1 W0 ...
    worker 2         F0 I0 F1 I1 W0 F2 ...

As many microbatches are under way as with 1F1B, and no worker keeps the weight gradients of more
waiting than the first worker has under way. With one microbatch, weight gradients wait until after
the values that others wait for are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction
from graphsplit.schedule.play import Rule, play
from graphsplit.schedule.warm_up import WarmUp

RULE = Rule(warm_up=WarmUp.BY_LEVEL, splits=True)


def zero_bubble(plan: PartitionPlan, num_microbatches: int) -> tuple[Sequence[Instruction], ...]:
    """The compute of all workers, each in the order to run it."""
    return play(plan, num_microbatches, RULE)
