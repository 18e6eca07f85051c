"""In which order the gradients of one value are summed, across segments, to give eager's bits.

Floating-point addition is not associative. Eager autograd runs backward by falling sequence number,
so the gradients of a value's uses are added latest use first, one after the other::

    forward      a = f(v)    b = g(v)    c = h(v)            uses of v in program order: a, b, c
    backward     total = (grad_c + grad_b) + grad_a          a left fold, latest use first

Cut into segments, each segment that uses ``v`` holds its own *leaf* copies of it; what a leaf
collects is one *contribution*. The producer folds the contributions in the same order. One leaf may
serve several uses only where they are the first terms of the fold: ``(x + (c + b)) + a`` is not
``((x + c) + b) + a``.

Uses in the producing segment itself need no leaf if autograd's own order comes out the same. The
fold of all contributions enters that segment's backward first, then the segment's own uses are
added, latest first. That equals eager's order if all contributions are later than all own uses, or
if exactly one own use comes first and exactly one contribution second, because a + b = b + a.
Otherwise the own uses must move to a later segment, where they get leaves like all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from graphsplit.capture.graph import Node, NodeKind
from graphsplit.partition.segments import Segmentation
from graphsplit.placement.resolve import PlacedGraph

Use = tuple[int, int]  # (position of the operation, index of its operand)


@dataclass(frozen=True)
class Contribution:
    """The gradient that one leaf collects.

    Attributes:
        index: Position among all contributions.
        value: The node whose gradient it is part of.
        segment: The segment that holds the leaf.
        uses: The operands that read the leaf, in program order.
    """

    index: int
    value: int
    segment: int
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class GradientOrder:
    """Every contribution, and for each value the order of its fold.

    Attributes:
        contributions: All contributions, by index.
        folds: For each value that has contributions, their indices in the order of the fold.
        conflicts: Values whose uses on the producing worker must move to a later segment.
    """

    contributions: tuple[Contribution, ...]
    folds: dict[int, tuple[int, ...]]
    conflicts: frozenset[int]


def order_gradients(placed: PlacedGraph, segmentation: Segmentation) -> GradientOrder:
    """Find the leaves that every segment needs, and the order in which producers fold."""
    nodes = placed.graph.nodes
    uses = _differentiable_uses(nodes)
    contributions: list[Contribution] = []
    folds: dict[int, tuple[int, ...]] = {}
    conflicts: set[int] = set()
    segment_of = segmentation.segment_of
    for value, its_uses in uses.items():
        home = _home(placed, segmentation, value, its_uses)
        pieces = _pieces(its_uses, segment_of, home)
        if all(segment == home for segment, _ in pieces):
            continue
        if not _autograd_keeps_order([segment == home for segment, _ in pieces]):
            conflicts.add(value)
            continue
        fold: list[int] = []
        for segment, piece in pieces:
            if segment != home:
                fold.append(len(contributions))
                ordered = tuple(sorted(piece))
                contributions.append(Contribution(fold[-1], value, segment, ordered))
        folds[value] = tuple(fold)
    return GradientOrder(tuple(contributions), folds, frozenset(conflicts))


def _differentiable_uses(nodes: Sequence[Node]) -> dict[int, list[Use]]:
    """Uses of each value that carry a gradient, in the order in which eager adds them."""
    uses: dict[int, list[Use]] = {}
    for position in reversed(range(len(nodes))):
        node = nodes[position]
        if node.requires_grad and node.kind is NodeKind.OPERATION:
            for index, operand in enumerate(node.reads):
                if nodes[operand].requires_grad:
                    uses.setdefault(operand, []).append((position, index))
    return uses


def _home(placed: PlacedGraph, segmentation: Segmentation, value: int, uses: list[Use]) -> int:
    """The segment in which uses need no leaf; -1 if there is none.

    For an operation's value, the segment that makes it. A parameter is itself a leaf: it needs no
    other one if a single segment uses it, on its owner.
    """
    if placed.graph.nodes[value].kind is NodeKind.OPERATION:
        return segmentation.segment_of[value]
    segments = {segmentation.segment_of[position] for position, _ in uses}
    home = segments.pop()
    is_owner = segmentation.segments[home].worker == placed.workers[value]
    return home if not segments and is_owner else -1


def _pieces(
    uses: list[Use], segment_of: Sequence[int], home: int
) -> list[tuple[int, tuple[Use, ...]]]:
    """Group uses into the terms of the fold: only the first term may have several uses."""
    pieces: list[tuple[int, tuple[Use, ...]]] = []
    for segment, group in groupby(uses, key=lambda use: segment_of[use[0]]):
        run = tuple(group)
        if not pieces and segment != home:
            pieces.append((segment, run))
        else:
            pieces.extend((segment, (use,)) for use in run)
    return pieces


def _autograd_keeps_order(is_own: list[bool]) -> bool:
    """Whether adding the fold of all contributions first, then own uses, is eager's order."""
    if True not in is_own:
        return True
    first_own = is_own.index(True)
    if all(is_own[first_own:]):
        return True
    return is_own[:2] == [True, False] and all(is_own[2:])
