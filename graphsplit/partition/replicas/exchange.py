"""Exchange once per step: ``accumulate_by="microbatch"`` of a Model.

The plans of a step's batches keep the parts that ``partition.replicas.blocks`` sends::

    batch 0     forward and backward     parts kept
    batch 1     forward and backward     parts added to those of batch 0
    batch 2     forward and backward     parts added, and sent in blocks to the parameters' owners

The last batch may have fewer microbatches than others had. Then it keeps its parts too, and a plan
ends the step that computes nothing, and has a place for each microbatch::

    exchange    blocks of parts          to the parameters' owners, who step
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from graphsplit.partition.plan import Edge, EdgeKind, PartitionPlan, SumTerm
from graphsplit.partition.segments import Segmentation


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
