"""Which edges a worker's computations wait for and feed, looked up once for the whole plan."""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.partition.plan import Edge, EdgeKind, PartitionPlan


class PlanTraffic:
    """The edges of a plan by those who need them. Edges stand in the order of their indices.

    Attributes:
        incoming: What each worker receives.
        outgoing: What each worker sends.
        awaited: For each segment, the edges it cannot run forward without.
        made: For each segment, the edges whose values it makes: forward values and generator
            states.
        modified: For each segment that is the last to modify borrowed state, that state's edges.
        carrier: For each contribution that is sent, the gradient edge that carries it.
    """

    def __init__(self, plan: PartitionPlan) -> None:
        segment_of = plan.segmentation.segment_of
        self.incoming: list[list[Edge]] = [[] for _ in range(plan.num_workers)]
        self.outgoing: list[list[Edge]] = [[] for _ in range(plan.num_workers)]
        self.made: list[list[Edge]] = [[] for _ in plan.segments]
        self.carrier: dict[int, Edge] = {}
        for edge in plan.edges:
            self.incoming[edge.destination].append(edge)
            self.outgoing[edge.source].append(edge)
            if edge.kind is EdgeKind.GRADIENT:
                self.carrier.update(dict.fromkeys(edge.contributions, edge))
            elif edge.kind is not EdgeKind.REDUCTION and segment_of[edge.value] >= 0:
                self.made[segment_of[edge.value]].append(edge)
        self.awaited = _awaited(plan)
        self.modified = _modified(plan)


def _awaited(plan: PartitionPlan) -> list[Sequence[Edge]]:
    segment_of = plan.segmentation.segment_of
    values: dict[tuple[int, int], Edge] = {}
    states: dict[tuple[int, int], list[Edge]] = {}  # by the segment that drew, and destination
    for edge in plan.edges:
        if edge.kind is EdgeKind.VALUE:
            values.update(((value, edge.destination), edge) for value in edge.values)
        elif edge.kind is EdgeKind.GENERATOR:
            states.setdefault((segment_of[edge.value], edge.destination), []).append(edge)
    drew_before = _previous_random_segment(plan)
    found: list[Sequence[Edge]] = []
    for segment, io in zip(plan.segments, plan.io, strict=True):
        reads = {*io.values, *(plan.contributions[c].value for c in io.leaves)}
        edges = [values[v, segment.worker] for v in reads if (v, segment.worker) in values]
        edges += states.get((drew_before.get(segment.index, -1), segment.worker), [])
        found.append(sorted(edges, key=lambda edge: edge.index))
    return found


def _previous_random_segment(plan: PartitionPlan) -> dict[int, int]:
    """For each segment that draws, the segment that drew last before it."""
    segment_of = plan.segmentation.segment_of
    hops = ((segment_of[before], segment_of[after]) for before, after in plan.random_hops)
    return {later: earlier for earlier, later in hops if earlier != later}


def _modified(plan: PartitionPlan) -> list[list[Edge]]:
    nodes, segment_of = plan.placed.graph.nodes, plan.segmentation.segment_of
    last: dict[int, int] = {}  # segments are numbered by rising level
    for position, node in enumerate(nodes):
        if node.changes_inputs:
            for shared, _ in node.shares_modified:
                last[shared] = max(last.get(shared, -1), segment_of[position])
    found: list[list[Edge]] = [[] for _ in plan.segments]
    for edge in plan.edges:
        is_borrowed = edge.kind is EdgeKind.VALUE and nodes[edge.value].is_state
        if is_borrowed and not edge.per_step:
            found[last[edge.value]].append(edge)
    return found
