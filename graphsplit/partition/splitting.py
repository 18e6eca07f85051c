"""Which weight gradients can wait, so that the gradients others wait for come first.

The backward of a linear layer or a convolution makes the gradient of its input, for which earlier
layers wait, and that of its weight, for which only the optimizer waits::

    BACKWARD          gradient of x, of weight, of bias       for every layer of a segment
    BACKWARD_INPUT    gradient of x
    BACKWARD_WEIGHT   gradient of weight, of bias

Which operations fall apart follows from the plan alone, so it is the same on all workers. Apart are
operations that are worth it (``least_work``) and whose weights are used

* nowhere else: then autograd's one term is the parameter's whole gradient, or
* in other segments too, but here only by this operation, through a leaf of its own: then the term
  is sent or summed as ever, only later.

Where eager's order of a sum needs more than that (several uses in one segment, sums that begin in
another segment), an operation stays whole, and so do those that backward runs again. A segment of
which nobody awaits a gradient, and one without such operations, has a ``BACKWARD`` in one piece.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

from graphsplit.capture.graph import Node, NodeKind
from graphsplit.partition.plan import BackwardSplit, PartitionPlan, WeightUse

# Additions and multiplications below which computing apart costs more than waiting. The extra work
# is some 100 microseconds; these take a core about six times as long, convolutions being slower.
_LEAST_WORK, _LEAST_CONVOLUTION = 20_000_000, 5_000_000

_SPLITTING = (
    "aten.linear.",
    "aten.addmm.",
    "aten.mm.",
    "aten.matmul.",
    "aten.conv1d.",
    "aten.conv2d.",
    "aten.conv3d.",
    "aten.convolution.",
    "aten.conv_transpose1d.",
    "aten.conv_transpose2d.",
    "aten.conv_transpose3d.",
)


def with_splits(plan: PartitionPlan) -> PartitionPlan:
    """Add to a plan which segments' backward may be run in two parts."""
    if not plan.placed.graph.has_gradients:
        return plan
    return dataclasses.replace(plan, splits=_Finder(plan).run())


class _Finder:
    """Looks at every operation once."""

    def __init__(self, plan: PartitionPlan) -> None:
        self.plan = plan
        self.nodes = plan.placed.graph.nodes
        # How often each value is used with a gradient, and the leaf of each use that has one.
        self.num_uses: Counter[int] = Counter()
        for node in self.nodes:
            if node.requires_grad and node.kind is NodeKind.OPERATION:
                self.num_uses.update(r for r in node.reads if self.nodes[r].requires_grad)
        self.leaf_of = {use: c for c in plan.contributions for use in c.uses}
        self.seeded = {c.value for c in plan.contributions if c.seed}
        groups = itertools.chain.from_iterable(plan.recomputed.values())
        self.recomputed = {position for group in groups for position in group.positions}

    def run(self) -> dict[int, BackwardSplit]:
        found: dict[int, BackwardSplit] = {}
        for segment, io in zip(self.plan.segments, self.plan.io, strict=True):
            values = (self.plan.contributions[leaf].value for leaf in io.leaves)
            if all(self.nodes[value].is_state for value in values):
                continue  # nobody waits for a gradient of it
            uses = tuple(use for p in segment.nodes if (use := self._use(p)) is not None)
            if uses:
                found[segment.index] = BackwardSplit(uses)
        return found

    def _use(self, position: int) -> WeightUse | None:
        """How an operation falls apart; None if it does not."""
        node = self.nodes[position]
        if not node.target.startswith(_SPLITTING) or not node.requires_grad or node.meta is None:
            return None
        if node.repeated or len(set(node.reads)) < len(node.reads) or position in self.recomputed:
            return None
        leaves: dict[int, int] = {}
        for index, operand in enumerate(node.reads):
            leaf = self._leaf(position, index, operand)
            if leaf is not None:
                leaves[index] = leaf
        work = sum(work_of(node, self.nodes[node.reads[index]]) for index in leaves)
        if work < least_work(node.target) or len(leaves) == len(node.reads):
            return None
        return WeightUse(position, tuple(leaves), tuple(leaves.values()), work)

    def _leaf(self, position: int, index: int, operand: int) -> int | None:
        """The leaf of a weight whose gradient can wait, -1 if it needs none; None if it cannot."""
        node = self.nodes[operand]
        if node.kind is not NodeKind.PARAMETER or not node.requires_grad:
            return None
        contribution = self.leaf_of.get((position, index))
        if contribution is None:
            return -1 if self.num_uses[operand] == 1 else None
        is_only_use = len(contribution.uses) == 1 and operand not in self.seeded
        return contribution.index if is_only_use else None


def least_work(target: str) -> int:
    """The additions and multiplications from which on an operation's weight gradients may wait."""
    return _LEAST_CONVOLUTION if target.startswith("aten.conv") else _LEAST_WORK


def work_of(node: Node, weight: Node) -> int:
    """Additions and multiplications of one weight's gradient: as many as its forward takes.

    0 where the operation is none of those whose weight gradients can be computed apart.
    """
    if not node.target.startswith(_SPLITTING):
        return 0
    if weight.meta is None or node.meta is None:
        return 0
    shape = weight.meta.shape
    if len(shape) < 2:
        return 0
    is_transposed = node.target.startswith(("aten.mm.", "aten.matmul.", "aten.addmm."))
    num_outputs = shape[-1] if is_transposed else shape[0]
    return 2 * node.meta.num_elements * (weight.meta.num_elements // max(1, num_outputs))
