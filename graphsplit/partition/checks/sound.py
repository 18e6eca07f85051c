"""Check that a plan is sound, whatever made it; faults of users and our own are told apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphsplit.capture.graph import Node, NodeKind
from graphsplit.errors import InvariantError, PlacementError
from graphsplit.partition.plan import EdgeKind, PartitionPlan
from graphsplit.partition.shared_norms import check_reduction
from graphsplit.placement.resolve import EVERYWHERE

if TYPE_CHECKING:
    import networkx as nx


def segment_graph(plan: PartitionPlan) -> nx.DiGraph:
    """The graph of segments: an edge for every pair of which one waits for the other."""
    import networkx as nx  # only once something is wrong, or drawn: importing it takes a while

    graph = nx.DiGraph()
    for segment in plan.segments:
        graph.add_node(segment.index, worker=segment.worker, level=segment.level)
    graph.add_edges_from(_waits(plan))
    return graph


def _waits(plan: PartitionPlan) -> Iterator[tuple[int, int]]:
    """Pairs of segments of which the second waits for the first, some of them several times."""
    segment_of = plan.segmentation.segment_of
    nodes = plan.placed.graph.nodes
    chain = itertools.pairwise(plan.segmentation.random_chain)
    read = ((r, p) for p, node in enumerate(nodes) for r in (*node.reads, *node.runs_after))
    for before, after in itertools.chain(chain, read):
        first, second = segment_of[before], segment_of[after]
        if first >= 0 and first != second:
            yield first, second


def verify(plan: PartitionPlan) -> None:
    """Check a plan.

    Raises:
        PlacementError: Memory that is modified in place would be needed on several workers.
        InvariantError: A plan that graphsplit should never have made.
    """
    _check_nodes(plan)
    _check_segments(plan)
    _check_edges(plan)
    _check_in_place(plan)


def _check_nodes(plan: PartitionPlan) -> None:
    seen: set[int] = set()
    for segment in plan.segments:
        for position in segment.nodes:
            if position in seen:
                raise InvariantError(f"node {position} lies in two segments")
            if plan.placed.workers[position] != segment.worker:
                raise InvariantError(f"node {position} is astray")
            seen.add(position)
    for position, node in enumerate(plan.placed.graph.nodes):
        worker = plan.placed.workers[position]
        if node.kind is NodeKind.OPERATION and position not in seen:
            raise InvariantError(f"operation {node.name} lies in no segment")
        if not node.is_everywhere and not 0 <= worker < plan.num_workers:
            raise InvariantError(f"{node.name} has no worker")


def _check_segments(plan: PartitionPlan) -> None:
    """Whoever waits lies on a higher level, so nobody waits in a circle."""
    levels = [segment.level for segment in plan.segments]
    for first, second in _waits(plan):
        if levels[first] >= levels[second]:
            import networkx as nx

            graph = segment_graph(plan)
            if not nx.is_directed_acyclic_graph(graph):
                raise InvariantError(f"cycle: {nx.find_cycle(graph)}")
            raise InvariantError(f"segment {first} does not come before {second}")


def _check_edges(plan: PartitionPlan) -> None:
    values = [(e.value, e.destination) for e in plan.edges if e.kind is EdgeKind.VALUE]
    has_edge = set(values)
    if len(values) != len(has_edge):
        raise InvariantError("a value goes to one worker twice")
    workers, segment_of = plan.placed.workers, plan.segmentation.segment_of
    for position, node in enumerate(plan.placed.graph.nodes):
        for operand in node.reads:
            worker = workers[position]
            is_there = workers[operand] in (EVERYWHERE, worker)
            if not is_there and (operand, worker) not in has_edge:
                raise InvariantError(f"value {operand} does not reach worker {worker}")
    _check_generator_edges(plan)
    check_reduction(plan)
    _check_sums(plan)
    for contribution in plan.contributions:
        for position, operand in contribution.uses:
            if segment_of[position] != contribution.segment:
                raise InvariantError(f"a gradient of node {position} comes from another segment")
            if plan.placed.graph.nodes[position].reads[operand] != contribution.value:
                raise InvariantError(f"a gradient of node {position} is another value's")
        for seed in contribution.seed:
            before = plan.segments[plan.contributions[seed].segment].level
            if before <= plan.segments[contribution.segment].level:
                raise InvariantError("a seed comes too late")


def _check_generator_edges(plan: PartitionPlan) -> None:
    workers, chain = plan.placed.workers, plan.segmentation.random_chain
    expected = {(a, workers[b]) for a, b in itertools.pairwise(chain) if workers[a] != workers[b]}
    if chain and not plan.is_microbatched:  # after the step every worker has the last state
        expected |= {(chain[-1], w) for w in range(plan.num_workers) if w != workers[chain[-1]]}
    found = [(e.value, e.destination) for e in plan.edges if e.kind is EdgeKind.GENERATOR]
    if sorted(found) != sorted(expected):
        raise InvariantError("the generator's state goes astray")


def _check_sums(plan: PartitionPlan) -> None:
    """Every contribution is summed once, where its value lives."""
    sent = [c for e in plan.edges if e.kind is EdgeKind.GRADIENT for c in e.contributions]
    local = [
        t.contribution
        for terms in (*plan.gradient_sums.values(), *plan.seeds.values())
        for t in terms
        if t.contribution is not None
    ]
    if sorted(sent + local) != list(range(len(plan.contributions))):
        raise InvariantError("a gradient is lost")
    sums = [*plan.gradient_sums.items()]
    sums += [(plan.contributions[c].value, seed) for c, seed in plan.seeds.items()]
    terms = [(value, t.edge) for value, terms in sums for t in terms if t.edge is not None]
    edges = [(e.value, e.index) for e in plan.edges if e.kind is EdgeKind.GRADIENT]
    if sorted(terms) != sorted(edges):
        raise InvariantError("a gradient that arrives is not summed")


def _check_in_place(plan: PartitionPlan) -> None:
    """Memory that an operation modifies must not be needed in another segment as well.

    Parameters and buffers live on one worker for good, so there another segment may see the
    change, if it is on that worker.
    """
    nodes, workers = plan.placed.graph.nodes, plan.placed.workers
    segment_of = plan.segmentation.segment_of
    for position, node in enumerate(nodes):
        for shared, is_state in node.shares_modified:
            other = nodes[shared]
            if is_state:
                if workers[shared] != workers[position]:
                    raise PlacementError(_in_place_message(plan, node, other, position, shared))
            elif other.kind is NodeKind.OPERATION and segment_of[shared] != segment_of[position]:
                raise PlacementError(_in_place_message(plan, node, other, position, shared))


def _in_place_message(
    plan: PartitionPlan, node: Node, other: Node, position: int, shared: int
) -> str:
    workers = plan.placed.workers
    return (
        f"{node.name} ({node.target}) on worker {workers[position]} and {other.name} "
        f"({other.target}) on worker {workers[shared]} share memory that is modified in place, "
        f"with other work between them\n  {node.source or other.source}\n"
        f"  Fix: place both on one worker, or use the operation that returns a new tensor."
    )
