"""Small parameters whose blocks of gradients are added, and travel, together: one message for many.

Those of one owner whose parts the same segments make have them at the same time, so none waits for
another. Each is added by itself: the bits stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import torch

from graphsplit.partition.plan import BlockSums, PartitionPlan
from graphsplit.partition.replicas.exchange import with_edges
from graphsplit.tensor_meta import TensorMeta

_MOST_OF_ONE = 64 << 10  # bytes; larger ones go from memory to memory
_MOST_TOGETHER = 1 << 20


def bundled(plan: PartitionPlan) -> PartitionPlan:
    """Let blocks of small parameters that are made and sent alike be one block."""
    bundles: dict[Hashable, list[list[int]]] = {}
    for value in plan.blocks:
        alike = bundles.setdefault(_way(plan, value), [])
        if not alike or _bytes(plan, [*alike[-1], value]) > _MOST_TOGETHER:
            alike.append([])
        alike[-1].append(value)
    found = [members for alike in bundles.values() for members in alike]
    if len(found) == len(plan.blocks):
        return plan
    edges, blocks, gone = list(plan.edges), dict[int, BlockSums](), set[int]()
    sums = dict(plan.gradient_sums)
    for first, *others in sorted(found):
        members = (first, *others)
        lanes = range(0, len(plan.placed.graph.nodes), plan.num_values)
        terms = {value: sums.pop(value) for other in others for value in (s + other for s in lanes)}
        blocks[first] = dataclasses.replace(plan.blocks[first], members=members, terms=terms)
        size = _bytes(plan, members) + len(members)
        for index in blocks[first].edges if others else ():
            if index is not None:
                meta = TensorMeta(torch.uint8, (size,), (1,))
                edges[index] = dataclasses.replace(edges[index], meta=meta)
        gone |= {edge for one in others for edge in plan.blocks[one].edges if edge is not None}
    plan = dataclasses.replace(plan, edges=tuple(edges), blocks=blocks, gradient_sums=sums)
    return with_edges(plan, lambda edge: edge.index not in gone)


def _way(plan: PartitionPlan, value: int) -> Hashable:
    """Equal for parameters whose blocks can be one; a large one is alone."""
    if _bytes(plan, [value]) > _MOST_OF_ONE:
        return value
    block = plan.blocks[value]
    ends = [
        None if e is None else (plan.edges[e].source, plan.edges[e].destination)
        for e in block.edges
    ]
    makers = [
        frozenset(
            plan.contributions[term.contribution].segment
            for term in plan.gradient_sums[value + lane * plan.num_values]
            if term.contribution is not None
        )
        for lane in range(len(block.workers))
    ]
    return plan.placed.workers[value], block.workers, tuple(ends), tuple(makers)


def _bytes(plan: PartitionPlan, values: list[int] | tuple[int, ...]) -> int:
    metas = (plan.placed.graph.nodes[value].meta for value in values)
    return sum(meta.size_bytes for meta in metas if meta is not None)
