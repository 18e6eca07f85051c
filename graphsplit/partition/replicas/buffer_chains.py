"""Chains of buffers: each worker updates them by its microbatches, in the order of all.

The microbatches of a buffer's module may run on several workers. Each has kept what the updates
read, and makes them when it is its turn, beside its other work; then it sends the buffers on::

    worker 1, owner   F0 B0 F1 B1   FOLD0 FOLD1 SEND            RECEIVE
    worker 2          F2 B2 F3 B3                RECEIVE FOLD2 FOLD3 SEND

Buffers that go the same way go in one message.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch

from graphsplit.capture.graph import BufferUpdate, Node, NodeKind
from graphsplit.errors import PlacementError
from graphsplit.marks.annotations import Annotation
from graphsplit.partition.plan import BufferChain, Edge, EdgeKind, PartitionPlan
from graphsplit.placement.whole import nearest
from graphsplit.tensor_meta import TensorMeta

_Way = tuple[int, tuple[int, ...]]  # the owner, and the worker in each lane


def with_chains(plan: PartitionPlan, modules: Sequence[Mapping[str, Annotation]]) -> PartitionPlan:
    """Add to a plan who makes the buffer updates of its graph, and how the buffers get there.

    Args:
        plan: The plan, all lanes together.
        modules: For each lane: annotation of every placed module, by module path.

    Raises:
        PlacementError: What a fold reads is on several workers.
    """
    if not plan.placed.graph.buffer_updates:
        return plan
    names = {node.name: p for p, node in enumerate(plan.placed.graph.nodes[: plan.num_values])}
    arriving = {(e.value, e.destination) for e in plan.edges if e.kind is EdgeKind.VALUE}
    ways: dict[_Way, list[int]] = {}
    for index, fold in enumerate(plan.placed.graph.buffer_updates):
        ways.setdefault(_way(plan, fold, names, modules, arriving), []).append(index)
    edges, chains = list(plan.edges), {}
    for (owner, workers), updates in ways.items():
        found = (plan.placed.graph.buffer_updates[index].buffers for index in updates)
        buffers = tuple(dict.fromkeys(names[name] for group in found for name in group))
        hops: list[int | None] = []
        stops = [owner, *workers, owner]
        for lane, (source, destination) in enumerate(itertools.pairwise(stops)):
            hops.append(None if source == destination else len(edges))
            if source != destination:
                value = buffers[0] + min(lane, len(workers) - 1) * plan.num_values
                meta = _together([plan.placed.graph.nodes[b] for b in buffers])
                edge = Edge(len(edges), EdgeKind.BUFFERS, value, source, destination, meta)
                edges.append(dataclasses.replace(edge, per_step=True))
        chains[buffers[0]] = BufferChain(tuple(updates), buffers, owner, workers, tuple(hops))
    return dataclasses.replace(plan, edges=tuple(edges), chains=chains)


def _together(buffers: Sequence[Node]) -> TensorMeta:
    size = sum(node.meta.size_bytes for node in buffers if node.meta is not None)
    return TensorMeta(torch.uint8, (size,), (1,))


def _way(
    plan: PartitionPlan,
    fold: BufferUpdate,
    names: Mapping[str, int],
    modules: Sequence[Mapping[str, Annotation]],
    arriving: AbstractSet[tuple[int, int]],
) -> _Way:
    placed = plan.placed
    buffers = [names[name] for name in fold.buffers]
    owners = sorted({placed.workers[b] for b in buffers})
    if len(owners) > 1 or not {*fold.reads, *filter(None, [fold.beside])} <= names.keys():
        raise _apart(fold, owners)
    workers = []
    for lane, placed_modules in enumerate(modules):
        first, around = lane * plan.num_values, nearest(placed_modules, fold.module_path)
        if fold.beside is not None:
            worker = placed.workers[first + names[fold.beside]]
        else:
            worker = around[1].rank if around is not None else owners[0]
        for name in fold.reads:
            value = first + names[name]
            is_here = placed.workers[value] == worker or (value, worker) in arriving
            if placed.graph.nodes[value].kind is NodeKind.OPERATION and not is_here:
                raise _apart(fold, sorted({worker, placed.workers[value]}))
        workers.append(worker)
    return owners[0], tuple(workers)


def _apart(fold: BufferUpdate, workers: Sequence[int]) -> PlacementError:
    return PlacementError(
        f"replicas cannot run this network: what updates {' and '.join(fold.buffers)}, and what it "
        f"reads, are on workers {' and '.join(map(str, workers))}\n  {fold.source}\n"
        f"  Fix: place them with one module, on the same workers."
    )


def sources_of(plan: PartitionPlan, chain: BufferChain, lane: int) -> frozenset[int]:
    """The segments of a lane after whose forward its worker has all that a chain's updates read."""
    worker, first = chain.workers[lane], lane * plan.num_values
    kept = {value + first for value in kept_values(plan, chain)}
    found: set[int] = set()
    for segment in plan.segments:
        if segment.worker == worker:
            io = plan.io[segment.index]
            read = {*io.values, *(plan.contributions[c].value for c in io.leaves)}
            if kept & (read | set(io.outputs)):
                found.add(segment.index)
    return frozenset(found)


def kept_values(plan: PartitionPlan, chain: BufferChain) -> tuple[int, ...]:
    """The values that a chain's updates read, by their numbers in the first lane."""
    graph = plan.placed.graph
    wanted = {name for index in chain.updates for name in graph.buffer_updates[index].reads}
    nodes = graph.nodes[: plan.num_values]
    return tuple(p for p, node in enumerate(nodes) if node.name in wanted)
