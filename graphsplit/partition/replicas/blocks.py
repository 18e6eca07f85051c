"""Blocks of parts of a gradient, which a replica adds before it sends them.

The tree by which ``"pairs"`` are added is that of the parts' numbers. A block of 2 ** k parts that
begins at a multiple of its size is one node of it, so whoever has its parts may add them::

    lane 0, worker 0   parts 0 1 2     blocks (0 1) 2
    lane 1, worker 1   parts 3 4 5     blocks 3 (4 5)
    owner              ((0 1) + (2 + 3)) + (4 5)

A worker holds one gradient for each digit of a block, and sends one for each block. Parts that are
added to the left are blocks of one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

import torch

from graphsplit.capture.graph import NodeKind
from graphsplit.partition.gradient_sums import rounded_by
from graphsplit.partition.plan import BlockSums, EdgeKind, PartitionPlan, SumTerm


def with_blocks(
    plan: PartitionPlan,
    parts: range,
    *,
    in_pairs: bool = True,
    by_microbatch: bool = False,
    dtype: torch.dtype | None = None,
    hooked: Collection[str] = (),
) -> PartitionPlan:
    """Let parts of gradients be added where they are made, in blocks.

    Args:
        plan: The plan, all lanes together.
        parts: Its microbatches, by their numbers in the batch.
        in_pairs: Whether parts are added in pairs.
        by_microbatch: Whether a step's batches are added part by part, by who makes the parts: then
            blocks are made where all microbatches have the same workers, too.
        dtype: To what parts and their sums are rounded; None: they are left as they are.
        hooked: Names of parameters whose hooks are to see each part: their owner adds them.
    """
    sums, edges, blocks = dict(plan.gradient_sums), list(plan.edges), {}
    lanes = plan.lanes or ((range(len(parts)),) if by_microbatch else ())
    largest = len(parts) if in_pairs else 1
    plan = dataclasses.replace(plan, gradient_dtype=dtype)
    for value in plan.gradient_sums:
        node = plan.placed.graph.nodes[value]
        names = plan.placed.graph.state_names.get(value, (node.target,))
        is_ours = node.kind is NodeKind.PARAMETER and not {*names} & {*hooked}
        if not lanes or not is_ours or plan.lane_of(value):
            continue
        in_lanes = [value + lane * plan.num_values for lane in range(len(lanes))]
        makers = [_maker(plan, one) for one in in_lanes]
        if None in makers:
            continue
        carriers: list[int | None] = []
        for one in in_lanes:
            first = sums[one][0].edge
            carriers.append(first)
            if first is not None:
                made = edges[first].contributions
                edges[first] = dataclasses.replace(
                    edges[first],
                    kind=EdgeKind.BLOCK,
                    meta=plan.block_meta(value),
                    contributions=(),
                )
                sums[one] = tuple(SumTerm(contribution=c) for c in made)
        found = (_blocks(lane, parts.start, largest) for lane in lanes)
        ends = {end: size for of_lane in found for end, size in of_lane}
        blocks[value] = BlockSums(
            tuple(m for m in makers if m is not None), tuple(carriers), ends, (value,)
        )
    return dataclasses.replace(plan, gradient_sums=sums, edges=tuple(edges), blocks=blocks)


def _maker(plan: PartitionPlan, value: int) -> int | None:
    """The worker that makes all terms of a sum; None if several do."""
    terms = plan.gradient_sums[value]
    workers = {
        plan.edges[term.edge].source
        if term.edge is not None
        else plan.segments[plan.contributions[term.contribution or 0].segment].worker
        for term in terms
    }
    is_one = len(workers) == 1 and (terms[0].edge is None or len(terms) == 1)
    return workers.pop() if is_one else None


def _blocks(lane: range, start: int, largest: int) -> Iterator[tuple[int, int]]:
    """The last microbatch and the size of each block of a lane, in order."""
    at = lane.start
    while at < lane.stop:
        number, size = start + at, 1
        while number % (2 * size) == 0 and at + 2 * size <= lane.stop and size < largest:
            size *= 2
        at += size
        yield at - 1, size


def distances(ends: Sequence[int]) -> set[int]:
    """How far successive block ends are from each other."""
    return {later - earlier for earlier, later in itertools.pairwise(ends)}


def sent_per_step(plan: PartitionPlan) -> dict[int, tuple[int, int]]:
    """Bytes of gradients of parameters that each worker sends: by ``"left"``, and by ``"pairs"``.

    Args:
        plan: The plan of a step's first microbatches, in whichever order.
    """
    found: dict[int, tuple[int, int]] = {}
    for edge in plan.edges:
        is_block = edge.kind is EdgeKind.BLOCK
        is_sent = is_block or edge.kind is EdgeKind.GRADIENT
        if plan.lanes and is_sent and plan.placed.graph.nodes[edge.value].is_state:
            lane = plan.lanes[plan.lane_of(edge.value)]
            part = size = edge.meta.size_bytes
            block = plan.blocks_of(edge.value) if is_block else None
            if block is not None:
                values = plan.members_of(edge.value)
                part = sum(_part_bytes(plan, block, value) for value in values)
                size = sum(plan.block_meta(value).size_bytes for value in values)
            can_add = is_block or _maker(plan, edge.value) is not None
            left, pairs = found.get(edge.source, (0, 0))
            num_sent = sum(1 for _ in _blocks(lane, 0, len(lane))) if can_add else len(lane)
            found[edge.source] = left + part * len(lane), pairs + size * num_sent
    return found


def _part_bytes(plan: PartitionPlan, block: BlockSums, value: int) -> int:
    """The bytes of one part of a parameter's gradient, were it sent by itself."""
    meta = plan.placed.graph.nodes[value].meta
    assert meta is not None
    terms = block.terms.get(value) or plan.gradient_sums.get(value, ())
    made = [plan.contributions[t.contribution] for t in terms if t.contribution is not None]
    return meta.num_elements * (rounded_by(plan.placed.graph.nodes, made) or meta.dtype).itemsize
