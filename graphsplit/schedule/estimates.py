"""Costs of computing and moving estimated from the graph alone, before anything was measured.

They are the same on every worker, and good enough to tell a large segment from a small one.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from graphsplit.capture.graph import Node
from graphsplit.partition.plan import PartitionPlan
from graphsplit.partition.splitting import work_of
from graphsplit.schedule.costs import Costs, LinkCost
from graphsplit.schedule.saved_memory import saved_bytes

_WORK_PER_S = 3e10  # multiplications and additions of a core
_BYTES_PER_S = 8e9  # that operations read and write
_PER_OPERATION_S = 5e-6
_APART_S = 100e-6  # what computing an operation's weight gradients apart takes in addition
# Processor time of graphsplit itself, as a profile of LeNet shows it: of a message at both of its
# ends, and between two steps (ticket, guards, loader, gradients that become zero).
SEND_S, RECEIVE_S, BETWEEN_S = 40e-6, 20e-6, 400e-6
LINK = LinkCost(latency_s=30e-6, bytes_per_s=2e9)


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
        activations=saved_bytes(plan),
        links=dict.fromkeys(pairs, LINK),
        source="estimated from the graph",
    )
    return with_weights_apart(plan, costs)


def with_weights_apart(plan: PartitionPlan, costs: Costs) -> Costs:
    """Say what both parts of a backward cost, and the whole, wherever it can be run in two parts.

    What was not measured is estimated: the share of the weight gradients, and what it takes to
    compute them apart. Where a few microbatches were all that was run in two parts, the whole is
    known better: the parts take no less than it and that.
    """
    first, second = dict(costs.backward_input), dict(costs.backward_weight)
    whole = dict(costs.backward_whole)
    nodes = plan.placed.graph.nodes
    for index, split in plan.splits.items():
        if index not in first:
            continue
        parts, apart = first[index] + second.get(index, 0.0), len(split.uses) * _APART_S
        if second.get(index, 0.0) > 0.0:
            share = second[index] / parts
            whole.setdefault(index, max(parts - apart, 0.9 * parts))
        else:
            operations = (nodes[p] for p in plan.segments[index].nodes)
            work = sum(2 * _seconds(nodes, node) for node in operations if node.requires_grad)
            share = min(sum(u.work for u in split.uses) / _WORK_PER_S / max(work, 1e-9), 0.9)
            whole.setdefault(index, parts)
        both = max(parts, whole[index] + min(apart, 0.1 * whole[index]))
        first[index], second[index] = both * (1 - share), both * share
    return replace(costs, backward_input=first, backward_weight=second, backward_whole=whole)


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
