"""Interleaved 1F1B for workers of several segments (Narayanan et al., arXiv:2104.04473).

Where the computation comes back to workers, each has several *chunks* (its segments, by level). In
1F1B the first microbatch has to go all the way before the others follow; here microbatches go in
groups of as many as there are workers, chunk by chunk. With two workers and two chunks (F and f)::

    worker 0   F0 F1 f0 f1 F2    b0 F3 b1 f2 B0 f3 B1 ...
    worker 1      F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 ...

That makes the idle time at both ends shorter, for more messages and more microbatches under way.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction
from graphsplit.schedule.play import Rule, play
from graphsplit.schedule.warm_up import WarmUp

RULE = Rule(warm_up=WarmUp.BY_CHUNK, in_groups=True)


def interleaved_1f1b(
    plan: PartitionPlan, num_microbatches: int
) -> tuple[Sequence[Instruction], ...]:
    """The compute of all workers, each in the order to run it."""
    return play(plan, num_microbatches, RULE)
