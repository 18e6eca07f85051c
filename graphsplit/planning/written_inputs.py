"""Inputs that forward or the loss writes to."""

from __future__ import annotations

from graphsplit.capture.graph import NodeKind
from graphsplit.capture.operations.memory_calls import GiveBackVersion
from graphsplit.partition.plan import PartitionPlan


def written_inputs(plan: PartitionPlan) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Which of the flattened inputs are written to, each with the workers that have the outcome."""
    graph, workers = plan.placed.graph, plan.placed.workers
    ranks: dict[int, set[int]] = {}
    for value, touching in graph.touching.items():
        writes = {workers[p] for p in touching if graph.nodes[p].changes_inputs}
        ranks.setdefault(value, set()).update(writes)
    for position, node in enumerate(graph.nodes):
        found = graph.fx_nodes.get(node.name)
        if found is not None and isinstance(found.target, GiveBackVersion):
            ranks.setdefault(node.reads[0], set()).add(workers[position])
    return tuple(
        (int(graph.nodes[value].target), tuple(sorted(ranks[value])))
        for value in sorted(ranks)
        if graph.nodes[value].kind is NodeKind.INPUT
    )
