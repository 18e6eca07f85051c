"""Foresee which uses will have to be split because others are.

Splitting the uses of one value moves operations to later segments, and may so bring the gradients
of another value out of order. Cut, look and cut again finds that out one value after the other::

    v1 .. vn      made first, all in one segment
    p2 = v2 + q1        q2 = f(v2)        q1 moves, so p2 does, so the uses of v2 are split,
    p3 = v3 + q2        q3 = f(v3)        so q2 moves, so p3 does, so the uses of v3 are split ...

In a network of a thousand such layers that takes a thousand rounds over the whole graph. Here only
what moved is looked at again. It decides on levels alone, before operations that depend on no
activation are moved to their users: what it finds is split in good time, not for certain by need.
"""

from __future__ import annotations

import heapq
from collections.abc import Set as AbstractSet

from graphsplit.capture.graph import NodeKind
from graphsplit.partition.segments import LevelRule
from graphsplit.placement.resolve import PlacedGraph


def foresee_splits(
    placed: PlacedGraph, split_uses: AbstractSet[int], delays: AbstractSet[tuple[int, int]]
) -> frozenset[int]:
    """Values whose uses on the producing worker will have to lie in a later segment.

    Args:
        placed: The graph, every node with its worker.
        split_uses: Those known already; part of the result.
        delays: Pairs of operations, of which the second must lie on a higher level.
    """
    sweep = _Sweep(placed, split_uses, delays)
    sweep.run()
    return frozenset(sweep.split_uses)


class _Sweep:
    """Settles levels in program order, going back to what a new split moves."""

    def __init__(
        self,
        placed: PlacedGraph,
        split_uses: AbstractSet[int],
        delays: AbstractSet[tuple[int, int]],
    ) -> None:
        self.nodes, self.workers = placed.graph.nodes, placed.workers
        self.split_uses = set(split_uses)
        self.rule = LevelRule(placed, self.split_uses, delays)
        self.levels = [0] * len(self.nodes)
        self.followers: list[set[int]] = [set() for _ in self.nodes]  # who waits for each node
        self.users: list[set[int]] = [set() for _ in self.nodes]  # whose gradients are its own
        for position, node in enumerate(self.nodes):
            for before in (*node.reads, *node.runs_after):
                self.followers[before].add(position)
            if node.requires_grad:
                for operand in node.reads:
                    if self.nodes[operand].requires_grad:
                        self.users[operand].add(position)
        for before, after in (*delays, *zip(self.rule.chain, self.rule.chain[1:], strict=False)):
            self.followers[before].add(after)
        # For each value, its first use in another segment than the one that makes it.
        self.first_away: dict[int, int] = {}
        self.waiting = [p for p, n in enumerate(self.nodes) if n.kind is NodeKind.OPERATION]
        self.is_waiting = set(self.waiting)

    def run(self) -> None:
        while self.waiting:
            position = heapq.heappop(self.waiting)
            self.is_waiting.discard(position)
            level = self.rule.level_of(position, self.levels)
            if level != self.levels[position]:
                self.levels[position] = level
                self._look_again(self.followers[position])
            if self.nodes[position].requires_grad:
                for value in set(self.nodes[position].reads):
                    self._look_at_use(position, value)

    def _look_again(self, positions: AbstractSet[int]) -> None:
        for position in positions - self.is_waiting:
            heapq.heappush(self.waiting, position)
        self.is_waiting |= positions

    def _look_at_use(self, position: int, value: int) -> None:
        """A use where the value is made must not come after one that is elsewhere."""
        made = self.nodes[value]
        if made.kind is not NodeKind.OPERATION or not made.requires_grad or made.meta is None:
            return
        first_away = self.first_away.get(value, len(self.nodes))
        is_same_worker = self.workers[position] == self.workers[value]
        if not is_same_worker or self.levels[position] != self.levels[value]:
            if position < first_away:
                self.first_away[value] = position
                self._look_again(self.users[value] - {position})
        elif position > first_away and value not in self.split_uses:
            self.split_uses.add(value)
            self._look_again(self.users[value])
