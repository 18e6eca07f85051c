"""How much memory a value may reach: a bound that both ends know before anything is sent.

A view reaches no further than what it is a view of. Its own strides are not known for certain: the
results of some operations have others than capture was told (``batch_norm`` of a permuted tensor).

A gradient has the shape of its value, but not always its strides. The backward of ``cat`` hands
every operand a window onto one wide gradient, that of ``stack`` and ``view_as_complex`` hands out
every n-th element. Strides are kept, because sums over other strides have other bits. Such a window
lies in a gradient of some value that the same segment makes, or in one that came to it, or it is
the real part of a complex gradient of its own shape.
"""

from __future__ import annotations

from collections.abc import Iterable

from graphsplit.capture.graph import NodeKind
from graphsplit.capture.operations.effects import aliased_operands
from graphsplit.partition.plan import EdgeKind, PartitionPlan, SumTerm


def value_spans(plan: PartitionPlan) -> dict[int, int]:
    """For each forward edge whose value is a view, the most bytes that the value may reach."""
    graph = plan.placed.graph
    fx_nodes = graph.fx_nodes
    reach: list[int] = []
    views: set[int] = set()
    for position, node in enumerate(graph.nodes):
        own = 0 if node.meta is None else max(node.meta.size_bytes, node.meta.span_bytes)
        if node.kind is NodeKind.OPERATION and aliased_operands(fx_nodes[node.name]):
            views.add(position)
            own = max([own, *(reach[operand] for operand in node.reads)])
        reach.append(own)
    return {
        edge.index: reach[edge.value]
        for edge in plan.edges
        if edge.kind is EdgeKind.VALUE and edge.value in views
    }


def gradient_spans(plan: PartitionPlan) -> dict[int, int]:
    """For each gradient edge, the most bytes that its gradient may reach, gaps included."""
    nodes = plan.placed.graph.nodes
    reach = [0] * len(plan.segments)

    def reach_of(terms: Iterable[SumTerm]) -> int:
        found = 0
        for term in terms:
            edge = plan.edges[term.edge] if term.edge is not None else None
            parts = edge.contributions if edge is not None else (term.contribution or 0,)
            found = max([found, *(reach[plan.contributions[c].segment] for c in parts)])
        return found

    for segment in sorted(plan.segments, key=lambda s: -s.level):
        io = plan.io[segment.index]
        metas = (nodes[p].meta for p in (*segment.nodes, *io.values))
        sizes = [max(m.size_bytes, m.span_bytes) for m in metas if m is not None]
        sizes += [reach_of(plan.gradient_sums.get(root, ())) for root in io.roots]
        sizes += [reach_of(plan.seeds.get(leaf, ())) for leaf in io.leaves]
        reach[segment.index] = max(sizes, default=0)
    return {
        edge.index: max(
            2 * edge.meta.size_bytes,
            edge.meta.span_bytes,
            *(reach[plan.contributions[c].segment] for c in edge.contributions),
        )
        for edge in plan.edges
        if edge.kind is EdgeKind.GRADIENT
    }
