"""Sums of gradients that begin outside the graph, where eager's order cannot be kept.

The gradients of a network's output come from the script first, and then from operations of the
network that use the output too. Where such an operation adds several terms in an order of its own,
and runs in another segment, nothing can enter its sum before them.
"""

from __future__ import annotations

from graphsplit.errors import PlacementError
from graphsplit.partition.plan import PartitionPlan


def refuse_unordered(plan: PartitionPlan) -> None:
    """Refuse a plan for a call in which the gradient of an output is such a sum.

    Raises:
        PlacementError: It is one; names the operation.
    """
    nodes = plan.placed.graph.nodes
    for value in sorted(plan.placed.graph.given_roots & _unordered(plan)):
        raise PlacementError(
            f"forward returns {nodes[value].name} ({nodes[value].target}), which another worker "
            f"uses several times in one operation: the order of its gradients is not known\n"
            f"  {nodes[value].source}\n"
            f"  Fix: return a copy, as in `return h.clone()`, or place both on one worker."
        )


def unordered_parameters(plan: PartitionPlan) -> frozenset[int]:
    """Parameters to whose gradients those of a later call cannot be added term by term."""
    nodes = plan.placed.graph.nodes
    return frozenset(value for value in _unordered(plan) if nodes[value].is_state)


def _unordered(plan: PartitionPlan) -> frozenset[int]:
    nodes = plan.placed.graph.nodes
    return frozenset(
        leaf.value
        for leaf in plan.contributions
        if len(leaf.uses) > 1 or any(leaf.value in nodes[p].repeated for p, _ in leaf.uses)
    )
