"""Pieces of what a replica runs, so that parameters come and gradients go beside computing.

A replica that runs all of a network would be one segment, which waits for every parameter that it
borrows, and gives all gradients at once. So its operations are cut into pieces by the bytes of the
parameters that they are the first to read::

    parameters    p0 arrives   p1 arrives   p2 arrives
    forward                    piece 0      piece 1      piece 2   ...
    backward      ...                       piece 2      piece 1      piece 0
    gradients                                            of piece 2   of piece 1   of piece 0

A cut is a pair of operations of which the second one is to lie on a higher level.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphsplit.capture.graph import NodeKind
from graphsplit.placement.resolve import PlacedGraph

LEAST_BYTES = 1 << 22  # smaller pieces cost 3 % more without a cable, and hide no more
MOST_PIECES = 8


@dataclass
class _Pieces:
    """A worker's pieces, as they are found.

    Attributes:
        least: Bytes from which on a piece is full.
        size: Bytes of the piece that is not full yet.
        first: The first operation of that piece.
        before: The first one of the piece before; -1 if there is none.
        seen: Parameters that have been read.
    """

    least: int
    size: int = 0
    first: int = -1
    before: int = -1
    seen: set[int] = field(default_factory=set)


def cuts_of(placed: PlacedGraph) -> frozenset[tuple[int, int]]:
    """The cuts between pieces, of the microbatches of one lane.

    Args:
        placed: The graph, every node with its worker.

    Returns:
        Pairs of operations, of which the second must lie on a higher level.
    """
    nodes, sizes = placed.graph.nodes, exchanged(placed)
    least = max(LEAST_BYTES, -(-sum(sizes.values()) // MOST_PIECES))
    found: dict[int, _Pieces] = {}
    cuts: set[tuple[int, int]] = set()
    for position, node in enumerate(nodes if sizes else ()):
        read = [operand for operand in node.reads if operand in sizes]
        if node.kind is not NodeKind.OPERATION or not read:
            continue
        pieces = found.setdefault(placed.workers[position], _Pieces(least))
        new = sum(sizes[operand] for operand in {*read} - pieces.seen)
        if new and pieces.size >= pieces.least:
            pieces.before, pieces.first, pieces.size = pieces.first, position, 0
        elif pieces.first < 0:
            pieces.first = position
        pieces.size += new
        pieces.seen.update(read)
        if pieces.before >= 0:
            cuts.add((pieces.before, position))
    return frozenset(cuts)


def exchanged(placed: PlacedGraph) -> dict[int, int]:
    """The parameters that replicas share out, each with its bytes."""
    graph = placed.graph
    return {
        position: node.meta.size_bytes
        for position, node in enumerate(graph.nodes if placed.exchanged else ())
        if node.kind is NodeKind.PARAMETER
        and node.meta is not None
        and placed.exchanged & {*graph.state_names.get(position, (node.target,))}
    }
