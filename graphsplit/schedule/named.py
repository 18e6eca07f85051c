"""The schedules that have a name: rules of which each is played through on any graph.

``gpipe`` (Huang et al., arXiv:1811.06965): all microbatches forward, then all backward, in the
order of the microbatches, so that gradients accumulate in that order::

    worker 0   F0 F1             B0 B1
    worker 1      F0 F1       B0 B1
    worker 2         F0 F1 B0 B1

``1f1b`` (PipeDream-Flush, Narayanan et al., arXiv:2006.09503): backward as soon as it can run, the
earliest microbatch first, and few microbatches under way::

    worker 0   F0 F1 F2    B0 F3 B1 F4 B2 ...        3 microbatches under way
    worker 1      F0 F1 B0 F2 B1 F3 B2 ...           2
    worker 2         F0 B0 F1 B1 F2 B2 ...           1

``interleaved_1f1b`` (Narayanan et al., arXiv:2104.04473): where the computation comes back to
workers, each has several *chunks* (its segments, by level). In 1F1B the first microbatch has to go
all the way before the others follow; here microbatches go in groups of as many as there are
workers, chunk by chunk. That makes the idle time at both ends shorter, for more messages and more
microbatches under way. With two workers and two chunks (F and f)::

    worker 0   F0 F1 f0 f1 F2    b0 F3 b1 f2 B0 f3 B1 ...
    worker 1      F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 ...

``zero_bubble`` (ZB-H1, Qi et al., arXiv:2401.10241): as 1F1B, but the backward of a segment that
can be split (``partition.splitting``) is run in two parts: I makes what earlier workers wait for, W
the gradients of large weights, whenever nothing else can run. As many microbatches are under way as
with 1F1B, and no worker keeps the weight gradients of more waiting than the first worker has under
way. With one microbatch, weight gradients wait until the values that others wait for are sent::

    worker 0   F0 F1 F2       I0 F3 W0 I1 ...
    worker 1      F0 F1    I0 F2 I1 W0 ...
    worker 2         F0 I0 F1 I1 W0 F2 ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction
from graphsplit.schedule.play import Preference, WarmUp, play

Orders = tuple[Sequence[Instruction], ...]
ZERO_BUBBLE = Preference(warm_up=WarmUp.BY_LEVEL, splits=True)
RULES: Mapping[str, Preference] = MappingProxyType(
    {
        "1f1b": Preference(backward_first=True, warm_up=WarmUp.BY_LEVEL),
        "zero_bubble": ZERO_BUBBLE,
        "interleaved_1f1b": Preference(warm_up=WarmUp.BY_CHUNK, in_groups=True),
        "gpipe": Preference(forward_first=True, warm_up=WarmUp.NONE),
    }
)

NAMED: Mapping[str, Callable[[PartitionPlan, int], Orders]] = MappingProxyType(
    {name: partial(play, rule=rule) for name, rule in RULES.items()}
)
gpipe, one_forward_one_backward = NAMED["gpipe"], NAMED["1f1b"]
