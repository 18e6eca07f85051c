"""One plan of several lanes: runs of microbatches in which every operation has one worker.

Each lane was partitioned by itself. Here their plans become one, in which the second lane's copy of
node ``p`` of ``n`` is node ``n + p``, and segments, edges and contributions are numbered through. A
microbatch runs the segments of its own lane alone. Parameters have a copy in each lane too, of
one tensor on one worker; so the gradient of a microbatch is a sum of its lane, and what all lanes
add to the parameter is added in the order of the microbatches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from graphsplit.capture.graph import CapturedGraph, Node
from graphsplit.errors import PlacementError
from graphsplit.partition.gradient_sums import Contribution
from graphsplit.partition.plan import (
    BackwardSplit,
    Edge,
    PartitionPlan,
    RecomputedGroup,
    SegmentIO,
    SumTerm,
    WeightUse,
)
from graphsplit.partition.segments import Segment, Segmentation
from graphsplit.placement.resolve import PlacedGraph

T = TypeVar("T")


def merge_lanes(plans: Sequence[PartitionPlan], lanes: Sequence[range]) -> PartitionPlan:
    """The plan of a step whose microbatches run in lanes.

    Args:
        plans: The plan of each lane; all of one graph.
        lanes: The microbatches of each lane.

    Raises:
        PlacementError: The graph was rewritten differently for some lane.
    """
    first, *others = plans
    if not others:
        return first
    if any(plan.placed.graph.nodes != first.placed.graph.nodes for plan in others):
        raise PlacementError(
            "replicas would run other operations than each other: what shares memory, or the "
            "branches of a torch.cond, are placed apart on some of them\n"
            "  Fix: place these operations with the replicated module, not by gs.place."
        )
    shifts = [_Shift(0, 0, 0, 0)]
    for plan in plans[:-1]:
        shifts.append(shifts[-1].past(plan))
    pairs = list(zip(plans, shifts, strict=True))
    segmentation = Segmentation(
        _chain(map(s.segment, p.segments) for p, s in pairs),
        _chain((s.segment_of(i) for i in p.segmentation.segment_of) for p, s in pairs),
        _chain(s.values(p.segmentation.random_chain) for p, s in pairs),
    )
    return PartitionPlan(
        placed=_placed(plans, shifts),
        segmentation=segmentation,
        io=_chain(map(s.io, p.io) for p, s in pairs),
        edges=_chain(map(s.edge, p.edges) for p, s in pairs),
        contributions=_chain(map(s.contribution, p.contributions) for p, s in pairs),
        gradient_sums={
            s.value + v: s.terms(t) for p, s in pairs for v, t in p.gradient_sums.items()
        },
        seeds={s.leaf + c: s.terms(t) for p, s in pairs for c, t in p.seeds.items()},
        home=first.home,
        is_microbatched=first.is_microbatched,
        splits={s.index + i: s.split(one) for p, s in pairs for i, one in p.splits.items()},
        recomputed={
            s.index + i: tuple(map(s.group, groups))
            for p, s in pairs
            for i, groups in p.recomputed.items()
        },
        run_twice=frozenset(s.value + v for p, s in pairs for v in p.run_twice),
        lanes=tuple(lanes),
    )


def _placed(plans: Sequence[PartitionPlan], shifts: Sequence[_Shift]) -> PlacedGraph:
    pairs = [(plan.placed, shift) for plan, shift in zip(plans, shifts, strict=True)]
    first: CapturedGraph = plans[0].placed.graph
    graph = dataclasses.replace(
        first,
        nodes=_chain(map(s.node, p.graph.nodes) for p, s in pairs),
        state_names={s.value + v: n for p, s in pairs for v, n in p.graph.state_names.items()},
    )
    return PlacedGraph(
        graph,
        _chain(p.workers for p, _ in pairs),
        _chain(p.reasons for p, _ in pairs),
        plans[0].num_workers,
        plans[0].placed.notes,
    )


def _chain(parts: Iterable[Iterable[T]]) -> tuple[T, ...]:
    return tuple(itertools.chain.from_iterable(parts))


@dataclass(frozen=True)
class _Shift:
    """By how much the numbers of a lane are moved.

    Attributes:
        value: Those of nodes.
        index: Those of segments.
        number: Those of edges.
        leaf: Those of contributions.
    """

    value: int
    index: int
    number: int
    leaf: int

    def past(self, plan: PartitionPlan) -> _Shift:
        """The shift of the lane after a plan's."""
        return _Shift(
            self.value + len(plan.placed.graph.nodes),
            self.index + len(plan.segments),
            self.number + len(plan.edges),
            self.leaf + len(plan.contributions),
        )

    def values(self, values: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.value + value for value in values)

    def leaves(self, leaves: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.leaf + leaf for leaf in leaves)

    def segment_of(self, index: int) -> int:
        return index if index < 0 else self.index + index

    def node(self, node: Node) -> Node:
        if not self.value:
            return node
        return dataclasses.replace(
            node,
            reads=self.values(node.reads),
            runs_after=self.values(node.runs_after),
            repeated=self.values(node.repeated),
            shares_modified=tuple((self.value + v, own) for v, own in node.shares_modified),
        )

    def segment(self, one: Segment) -> Segment:
        return Segment(self.index + one.index, one.worker, one.level, self.values(one.nodes))

    def io(self, one: SegmentIO) -> SegmentIO:
        return SegmentIO(
            self.values(one.values),
            self.leaves(one.leaves),
            self.values(one.parameters),
            self.values(one.outputs),
            self.values(one.roots),
            one.is_random,
        )

    def edge(self, one: Edge) -> Edge:
        return dataclasses.replace(
            one,
            index=self.number + one.index,
            value=self.value + one.value,
            contributions=self.leaves(one.contributions),
        )

    def contribution(self, one: Contribution) -> Contribution:
        return Contribution(
            self.leaf + one.index,
            self.value + one.value,
            self.index + one.segment,
            tuple((self.value + position, operand) for position, operand in one.uses),
            self.leaves(one.seed),
        )

    def terms(self, terms: Iterable[SumTerm]) -> tuple[SumTerm, ...]:
        return tuple(
            SumTerm(edge=self.number + term.edge)
            if term.edge is not None
            else SumTerm(contribution=self.leaf + (term.contribution or 0))
            for term in terms
        )

    def split(self, one: BackwardSplit) -> BackwardSplit:
        return BackwardSplit(
            tuple(
                WeightUse(
                    self.value + use.position,
                    use.operands,
                    tuple(leaf if leaf < 0 else self.leaf + leaf for leaf in use.leaves),
                    use.work,
                )
                for use in one.uses
            )
        )

    def group(self, one: RecomputedGroup) -> RecomputedGroup:
        return RecomputedGroup(self.values(one.positions), one.repeats_writes)
