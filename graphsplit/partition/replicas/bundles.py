"""Small parameters that travel together: one message for many, there and back.

Those that a worker borrows of one owner, and that the same segment needs first, go there as one.
Their blocks of gradients are added, and travel back, as one where the same segments make the parts:
they are there at the same time, so none waits for another. Each is added by itself: the bits stay.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from graphsplit.partition.plan import BlockSums, Edge, EdgeKind, PartitionPlan, SumTerm
from graphsplit.partition.segments import Segmentation
from graphsplit.tensor_meta import ALIGNMENT, CPU, TensorMeta

_MOST_OF_ONE = 64 << 10  # bytes; larger ones go from memory to memory
_MOST_TOGETHER = 1 << 20


def borrowed_together(plan: PartitionPlan) -> PartitionPlan:
    """Let small parameters and buffers that replicas borrow alike be one message."""
    if not plan.lanes:
        return plan
    first_use: dict[tuple[int, int], int] = {}
    for segment, io in zip(plan.segments, plan.io, strict=True):
        for value in (*io.values, *(plan.contributions[c].value for c in io.leaves)):
            first_use.setdefault((value, segment.worker), segment.index)
    alike: dict[Hashable, list[list[int]]] = {}
    for edge in plan.edges:
        if _can_go_with_others(plan, edge):
            use = first_use.get((edge.value, edge.destination))
            way = edge.source, edge.destination, edge.meta.dtype, use
            found = alike.setdefault(way, [])
            together = [plan.edges[index].value for index in found[-1]] if found else []
            if not found or _bytes(plan, [*together, edge.value]) > _MOST_TOGETHER:
                found.append([])
            found[-1].append(edge.index)
    edges, gone = list(plan.edges), set[int]()
    for first, *others in itertools.chain.from_iterable(alike.values()):
        if others:
            members = tuple(plan.edges[index].value for index in (first, *others))
            size = places_of(plan, members)[-1].stop
            meta = TensorMeta(plan.edges[first].meta.dtype, (size,), (1,))
            edges[first] = dataclasses.replace(edges[first], meta=meta, members=members)
            gone.update(others)
    plan = dataclasses.replace(plan, edges=tuple(edges))
    return with_edges(plan, lambda edge: edge.index not in gone)


def _can_go_with_others(plan: PartitionPlan, edge: Edge) -> bool:
    """Whether an edge carries something small that its worker borrows for the whole step."""
    value = plan.in_first_lane(edge.value)
    is_output = any(output.node == value for output in plan.placed.graph.outputs)
    is_small = 0 < edge.meta.size_bytes <= _MOST_OF_ONE
    is_rounded = edge.meta != plan.placed.graph.nodes[edge.value].meta
    return edge.per_step and is_small and not (is_output or is_rounded) and edge.meta.device == CPU


def places_of(plan: PartitionPlan, members: Sequence[int]) -> list[range]:
    """Where each of some tensors of one dtype may lie in their message, in elements.

    The message says first, in a byte each, where they begin between two multiples of 64 bytes.
    """
    found, end = [], len(members)
    for member in members:
        meta = plan.placed.graph.nodes[member].meta
        assert meta is not None
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + meta.span_bytes + ALIGNMENT - meta.dtype.itemsize
        found.append(range(begin // meta.dtype.itemsize, end // meta.dtype.itemsize))
    return found


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
        size = sum(plan.block_meta(member).size_bytes for member in members) + len(members)
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


# Exchange once per step: ``accumulate_by="microbatch"`` of a Model.
#
# The plans of a step's batches keep the parts that ``partition.replicas.blocks`` sends::
#
#     batch 0     forward and backward     parts kept
#     batch 1     forward and backward     parts added to those of batch 0
#     batch 2     forward and backward     parts added, and sent in blocks to the parameters' owners
#
# The last batch may have fewer microbatches than others had. Then it keeps its parts too, and a
# plan ends the step that computes nothing, and has a place for each microbatch::
#
#     exchange    blocks of parts          to the parameters' owners, who step


def without_exchange(plan: PartitionPlan) -> PartitionPlan:
    """The plan of a batch after which the step goes on: parts stay where they are made."""
    return with_edges(plan, lambda edge: edge.kind is not EdgeKind.BLOCK)


def exchange_alone(plan: PartitionPlan) -> PartitionPlan:
    """The plan that ends a step: what a plan's blocks and its reduction send, and nothing else."""
    own = (EdgeKind.BLOCK, EdgeKind.REDUCTION)
    blocks = [v + n * plan.num_values for v, b in plan.blocks.items() for n in range(len(b.edges))]
    graph = plan.placed.graph
    nodes = tuple(dataclasses.replace(n, shares_modified=(), runs_after=()) for n in graph.nodes)
    bare = dataclasses.replace(
        plan,
        placed=dataclasses.replace(plan.placed, graph=dataclasses.replace(graph, nodes=nodes)),
        segmentation=Segmentation((), (-1,) * len(nodes), ()),
        io=(),
        contributions=(),
        gradient_sums=dict.fromkeys(blocks, ()),
        seeds={},
        splits={},
        recomputed={},
        run_twice=frozenset(),
        chains={},
    )
    return with_edges(bare, lambda edge: edge.kind in own)


def with_edges(plan: PartitionPlan, is_wanted: Callable[[Edge], bool]) -> PartitionPlan:
    """A plan with some of its edges, numbered anew; blocks have lost those that are gone."""
    wanted = [edge for edge in plan.edges if is_wanted(edge)]
    number = {edge.index: index for index, edge in enumerate(wanted)}

    def found(edges: Iterable[int | None]) -> tuple[int | None, ...]:
        return tuple(None if edge is None else number.get(edge) for edge in edges)

    def terms(old: Iterable[SumTerm]) -> tuple[SumTerm, ...]:
        return tuple(t if t.edge is None else SumTerm(edge=number[t.edge]) for t in old)

    return dataclasses.replace(
        plan,
        edges=tuple(dataclasses.replace(edge, index=number[edge.index]) for edge in wanted),
        gradient_sums={value: terms(old) for value, old in plan.gradient_sums.items()},
        seeds={leaf: terms(old) for leaf, old in plan.seeds.items()},
        chains={v: dataclasses.replace(c, edges=found(c.edges)) for v, c in plan.chains.items()},
        blocks={v: dataclasses.replace(b, edges=found(b.edges)) for v, b in plan.blocks.items()},
    )
