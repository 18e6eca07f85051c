"""Sparse gradients that would have to be sent: only dense ones travel."""

from __future__ import annotations

from graphsplit.capture.graph import CapturedGraph
from graphsplit.errors import PlacementError
from graphsplit.partition.gradient_sums import Contribution
from graphsplit.partition.plan import EdgeKind, PartitionPlan
from graphsplit.torch_ext.attributes import by_name, operator_schema
from graphsplit.torch_ext.private import OpOverload


def refuse_sent_sparse(plan: PartitionPlan) -> None:
    """Refuse a plan in which a sparse gradient leaves the worker that makes it.

    Raises:
        PlacementError: One would; names the parameter and the operation.
    """
    nodes = plan.placed.graph.nodes
    leaves: dict[int, list[Contribution]] = {}
    for leaf in plan.contributions:
        if nodes[value := plan.in_first_lane(leaf.value)].is_state:
            leaves.setdefault(value, []).append(leaf)
    sparse = {leaf.index for group in leaves.values() for leaf in group if _is_sparse(plan, leaf)}
    for edge in plan.edges if sparse else ():
        if edge.kind not in (EdgeKind.GRADIENT, EdgeKind.BLOCK):
            continue
        value = plan.in_first_lane(edge.value)
        own = leaves.get(value, [])
        summed = [leaf for leaf in own if leaf.index in edge.contributions] or own
        if summed and sparse.issuperset(leaf.index for leaf in summed):  # else the sum is dense
            user = nodes[plan.in_first_lane(summed[0].uses[0][0])]
            raise PlacementError(
                f"the gradient of {nodes[value].target} is sparse, and would have to be sent from "
                f"worker {edge.source} to worker {edge.destination}; only dense ones are\n"
                f"  {user.source}\n"
                f"  Fix: place all that uses it on one worker alone, or make the embedding with "
                f"sparse=False."
            )


def _is_sparse(plan: PartitionPlan, leaf: Contribution) -> bool:
    graph = plan.placed.graph
    return all(_makes_sparse(graph, plan.in_first_lane(position)) for position, _ in leaf.uses)


def _makes_sparse(graph: CapturedGraph, position: int) -> bool:
    """Whether an operation says that its gradient is sparse, as those of embeddings do."""
    node = graph.fx_nodes[graph.nodes[position].name]
    if not isinstance(node.target, OpOverload):
        return False
    given = by_name(operator_schema(node.target), node.args, node.kwargs)
    return given.get("sparse") is True
