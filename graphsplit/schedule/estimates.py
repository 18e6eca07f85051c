"""What computing and moving may cost, from the graph alone: before anything was measured.

They are the same on every worker, and good enough to tell a large segment from a small one.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from graphsplit.capture.graph import Node
from graphsplit.partition.plan import PartitionPlan
from graphsplit.partition.splitting import work_of
from graphsplit.schedule.costs import Costs, Link
from graphsplit.schedule.memory import activation_bytes

_WORK_PER_S = 3e10  # multiplications and additions of a core
_BYTES_PER_S = 8e9  # that operations read and write
_PER_OPERATION_S = 5e-6
LINK = Link(latency_s=30e-6, bytes_per_s=2e9)


def estimated_costs(plan: PartitionPlan) -> Costs:
    """Costs of every segment by its operations, the same link between all workers."""
    nodes = plan.placed.graph.nodes
    forward: dict[int, float] = {}
    whole: dict[int, float] = {}
    for segment in plan.segments:
        operations = [nodes[p] for p in segment.nodes]
        forward[segment.index] = sum(_seconds(nodes, node) for node in operations)
        whole[segment.index] = sum(2 * _seconds(nodes, n) for n in operations if n.requires_grad)
    pairs = itertools.permutations(range(plan.num_workers), 2)
    costs = Costs(
        forward,
        whole,
        {},
        activations=activation_bytes(plan),
        links=dict.fromkeys(pairs, LINK),
        source="estimated from the graph",
    )
    return with_weights_apart(plan, costs)


def with_weights_apart(plan: PartitionPlan, costs: Costs) -> Costs:
    """Say what the weight gradients that can be computed apart cost, where that is not known.

    Their share of a backward that was measured as a whole is estimated.
    """
    backward_input, backward_weight = dict(costs.backward_input), dict(costs.backward_weight)
    nodes = plan.placed.graph.nodes
    for index, split in plan.splits.items():
        if backward_weight.get(index, 0.0) > 0.0 or index not in backward_input:
            continue
        operations = (nodes[p] for p in plan.segments[index].nodes)
        whole = sum(2 * _seconds(nodes, node) for node in operations if node.requires_grad)
        share = sum(use.work for use in split.uses) / _WORK_PER_S / max(whole, 1e-9)
        both = backward_input[index]
        backward_weight[index] = both * min(share, 0.9)
        backward_input[index] = both - backward_weight[index]
    return replace(costs, backward_input=backward_input, backward_weight=backward_weight)


def _seconds(nodes: tuple[Node, ...], node: Node) -> float:
    """One operation's forward."""
    weights = (nodes[r] for r in node.reads if nodes[r].is_state)
    work = max((work_of(node, weight) for weight in weights), default=0)
    if not work and node.target.startswith(("aten.bmm.", "aten.matmul.", "aten.mm.")):
        first = nodes[node.reads[0]].meta if node.reads else None
        inner = first.shape[-1] if first is not None and first.shape else 1
        work = 2 * inner * (node.meta.num_elements if node.meta is not None else 0)
    metas = (nodes[r].meta for r in node.reads if not nodes[r].is_state)
    moved = sum(m.size_bytes for m in (*metas, node.meta) if m is not None)
    return _PER_OPERATION_S + max(work / _WORK_PER_S, moved / _BYTES_PER_S)
