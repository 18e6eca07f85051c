"""In which order the gradients of one value are summed, across segments, to give eager's bits.

Floating-point addition is not associative. Eager autograd runs backward by falling sequence number,
so the gradients of a value's uses are added latest use first, one after the other::

    forward      a = f(v)    b = g(v)    c = h(v)            uses of v in program order: a, b, c
    backward     total = (grad_c + grad_b) + grad_a          from left to right, latest use first

Cut into segments, each segment that uses ``v`` holds its own *leaf* copies of it; what a leaf
collects is one *contribution*. The producer adds the contributions in the same order. One leaf may
serve several uses only where they are the first terms of the sum: ``(x + (c + b)) + a`` is not
``((x + c) + b) + a``.

Some operations use an operand several times inside, in an order of their own (``Node.repeated``).
Their terms cannot be taken apart. Where such a use is not first in the sum, the total of all
earlier terms travels to its segment, and enters that leaf's backward before the segment's own terms
do, as in eager. Contributions with such a *seed* wait for those that it is made of, so these must
lie on higher levels: ``delays`` asks for that.

Uses in the producing segment itself need no leaf if all contributions are later than all of them:
the sum of the contributions enters that segment's backward first, then autograd adds the own uses,
latest first. Otherwise the own uses must move to a later segment, where they get leaves like all
others. (That one own term followed by one contribution may be swapped, since a + b = b + a, is
true of the numbers only: the sum takes the strides of its first term, and sums over it then differ
in bits.)
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby

import torch

from graphsplit.capture.graph import Node, NodeKind
from graphsplit.partition.segments import Segmentation
from graphsplit.placement.resolve import PlacedGraph

Use = tuple[int, int]  # (position of the operation, index of its operand)


@dataclass(frozen=True, slots=True)
class Contribution:
    """The gradient that one leaf collects.

    Attributes:
        index: Position among all contributions.
        value: The node whose gradient it is part of.
        segment: The segment that holds the leaf.
        uses: The operands that read the leaf, in program order.
        seed: Contributions whose sum enters the leaf's backward first, and is part of this one.
    """

    index: int
    value: int
    segment: int
    uses: tuple[Use, ...]
    seed: tuple[int, ...] = ()


@dataclass(frozen=True)
class GradientOrder:
    """Every contribution, and for each value the order of its sum.

    Attributes:
        contributions: All contributions, by index.
        sums: For each value that has contributions, the indices of those that its producer adds,
            in order; what is part of another one's seed is not among them.
        conflicts: Values whose uses on the producing worker must move to a later segment.
        delays: Pairs of operations, of which the second must lie on a higher level.
    """

    contributions: tuple[Contribution, ...]
    sums: dict[int, tuple[int, ...]]
    conflicts: frozenset[int]
    delays: frozenset[tuple[int, int]]


def order_gradients(placed: PlacedGraph, segmentation: Segmentation) -> GradientOrder:
    """Find the leaves that every segment needs, and the order in which producers add."""
    nodes = placed.graph.nodes
    uses = differentiable_uses(nodes) if placed.graph.has_gradients else {}
    sums: dict[int, tuple[int, ...]] = {}
    conflicts: set[int] = set()
    contributions: list[Contribution] = []
    segment_of = segmentation.segment_of
    for value, its_uses in uses.items():
        home = _home(placed, segmentation, value, its_uses)
        repeated = frozenset(p for p, _ in its_uses if value in nodes[p].repeated)
        is_first = not placed.graph.has_terms_before(value)
        pieces = _pieces(its_uses, segment_of, home, repeated, is_first=is_first)
        if all(piece.segment == home for piece in pieces):
            continue
        if not _autograd_keeps_order([piece.segment == home for piece in pieces]):
            conflicts.add(value)
            continue
        order: tuple[int, ...] = ()
        for piece in pieces:
            if piece.segment == home:
                continue
            index = len(contributions)
            seed = order if piece.is_whole else ()
            contributions.append(
                Contribution(index, value, piece.segment, tuple(sorted(piece.uses)), seed)
            )
            order = (index,) if seed else (*order, index)
        sums[value] = order
    delays = _delays(contributions, segmentation)
    return GradientOrder(tuple(contributions), sums, frozenset(conflicts), delays)


def _delays(
    contributions: Sequence[Contribution], segmentation: Segmentation
) -> frozenset[tuple[int, int]]:
    """Operations to move so that every seed is made before it is needed."""
    delays: set[tuple[int, int]] = set()
    segments = segmentation.segments
    for contribution in contributions:
        for index in contribution.seed:
            later = contributions[index]
            if segments[later.segment].level <= segments[contribution.segment].level:
                delays.update(
                    (before, after)
                    for before, _ in contribution.uses
                    for after, _ in later.uses
                    if before < after
                )
    return frozenset(delays)


def differentiable_uses(nodes: Sequence[Node]) -> dict[int, list[Use]]:
    """Uses of each value that carry a gradient, in the order in which eager adds them."""
    uses: dict[int, list[Use]] = {}
    for position in reversed(range(len(nodes))):
        node = nodes[position]
        if node.requires_grad and node.kind is NodeKind.OPERATION:
            for index, operand in enumerate(node.reads):
                if nodes[operand].requires_grad:
                    uses.setdefault(operand, []).append((position, index))
    return uses


def rounded_by(nodes: Sequence[Node], contributions: Sequence[Contribution]) -> torch.dtype | None:
    """The dtype to which the backward of ``gs.wire`` has rounded a gradient, if it makes it all."""
    if len(contributions) != 1 or contributions[0].seed or len(contributions[0].uses) != 1:
        return None
    ((position, _),) = contributions[0].uses
    return nodes[position].wire


def _home(placed: PlacedGraph, segmentation: Segmentation, value: int, uses: list[Use]) -> int:
    """The segment in which uses need no leaf; -1 if there is none.

    For an operation's value, the segment that makes it. A parameter is itself a leaf: it needs no
    other one if a single segment uses it, on its owner, for all microbatches.
    """
    if placed.graph.nodes[value].kind is NodeKind.OPERATION:
        return segmentation.segment_of[value]
    if placed.graph.nodes[value].kind is NodeKind.INPUT or placed.in_lanes:
        return -1
    segments = {segmentation.segment_of[position] for position, _ in uses}
    home = segments.pop()
    is_owner = segmentation.segments[home].worker == placed.workers[value]
    return home if not segments and is_owner else -1


@dataclass(frozen=True, slots=True)
class _Piece:
    """Uses whose gradients are one term of the sum.

    Attributes:
        segment: Where they lie.
        uses: The uses, latest first.
        is_whole: Whether their terms come in an order that only autograd knows.
    """

    segment: int
    uses: tuple[Use, ...]
    is_whole: bool


def _pieces(
    uses: list[Use],
    segment_of: Sequence[int],
    home: int,
    repeated: AbstractSet[int],
    *,
    is_first: bool = True,
) -> list[_Piece]:
    """Group uses into the terms of the sum: only the first, and whole ones, have several uses.

    Args:
        uses: The uses, latest first.
        segment_of: The segment of each operation.
        home: The segment in which uses need no leaf.
        repeated: Operations that add several terms in an order of their own.
        is_first: Whether the sum begins with the latest use here.
    """
    pieces: list[_Piece] = []
    for segment, group in groupby(uses, key=lambda use: segment_of[use[0]]):
        run = tuple(group)
        is_whole = any(position in repeated for position, _ in run)
        if segment != home and ((is_first and not pieces) or is_whole):
            pieces.append(_Piece(segment, run, is_whole))
        else:
            pieces.extend(_Piece(segment, (use,), use[0] in repeated) for use in run)
    return pieces


def _autograd_keeps_order(is_own: Sequence[bool]) -> bool:
    """Whether adding the sum of all contributions first, then own uses, is eager's order."""
    return True not in is_own or all(is_own[is_own.index(True) :])
