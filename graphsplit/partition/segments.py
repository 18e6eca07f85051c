"""Cut a placed graph into segments: what one worker runs without waiting.

Every node gets a *level*: the greatest number of worker changes on any path to it::

    level(n) = max over what n reads or runs after of  level(p) + (1 if p is on another worker)

A segment is all operations of one worker on one level. Levels never fall along a path, so a path
that leaves (worker, level) by another worker can only come back on a higher level: segments are
convex and their quotient graph is acyclic, for every placement, in O(nodes + operands).

Two additions keep the bits of eager mode:

* Random operations run in program order, so each one runs after the one before it.
* Where autograd would sum the gradients of a value in an order that no sum of per-segment sums
  can give, the users on the producing worker are moved to a later segment (``split_uses``); see
  ``partition.gradient_sums``.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from graphsplit.capture.graph import CapturedGraph, Node, NodeKind
from graphsplit.capture.operations.opaque_call import OpaqueCall
from graphsplit.partition.pieces import exchanged
from graphsplit.placement.resolve import EVERYWHERE, PlacedGraph


@dataclass(frozen=True, slots=True)
class Segment:
    """Operations that one worker runs without waiting.

    Attributes:
        index: Position among all segments; ordered by level, then worker.
        worker: Where it runs.
        level: Its level. On each worker, forward runs by rising level.
        nodes: Positions of its operations, in program order.
    """

    index: int
    worker: int
    level: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Segmentation:
    """All segments of a graph.

    Attributes:
        segments: All segments, by index.
        segment_of: Segment of each operation, by node; -1 for state, inputs and constants.
        random_chain: Random operations in program order.
    """

    segments: tuple[Segment, ...]
    segment_of: tuple[int, ...]
    random_chain: tuple[int, ...]


def cut_into_segments(
    placed: PlacedGraph,
    *,
    split_uses: AbstractSet[int] = frozenset(),
    delays: AbstractSet[tuple[int, int]] = frozenset(),
) -> Segmentation:
    """Cut a placed graph into segments.

    Args:
        placed: The graph, every node with its worker.
        split_uses: Nodes whose users on the same worker must lie in a later segment.
        delays: Pairs of operations, of which the second must lie on a higher level.

    Returns:
        The segments, ordered by (level, worker).
    """
    nodes, workers = placed.graph.nodes, placed.workers
    rule = LevelRule(placed, split_uses, delays)
    levels = [0] * len(nodes)
    for position, node in enumerate(nodes):
        if node.kind is NodeKind.OPERATION:
            levels[position] = rule.level_of(position, levels)
    fixed = frozenset(rule.chain).union(*delays)
    _sink_sources(placed, levels, fixed, split_uses)
    members: dict[tuple[int, int], list[int]] = {}
    for position, node in enumerate(nodes):
        if node.kind is NodeKind.OPERATION:
            members.setdefault((levels[position], workers[position]), []).append(position)
    segments = tuple(
        Segment(index, worker, level, tuple(members[level, worker]))
        for index, (level, worker) in enumerate(sorted(members))
    )
    segment_of = [-1] * len(nodes)
    for segment in segments:
        for position in segment.nodes:
            segment_of[position] = segment.index
    return Segmentation(segments, tuple(segment_of), rule.chain)


class LevelRule:
    """Gives an operation its level, from those of the operations before it.

    Args:
        placed: The graph, every node with its worker.
        split_uses: Nodes whose users on the same worker must lie in a later segment.
        delays: Pairs of operations, of which the second must lie on a higher level.
    """

    def __init__(
        self,
        placed: PlacedGraph,
        split_uses: AbstractSet[int],
        delays: AbstractSet[tuple[int, int]],
    ) -> None:
        self.chain = tuple(p for p, node in enumerate(placed.graph.nodes) if node.is_random)
        self._nodes, self._workers = placed.graph.nodes, placed.workers
        self._split_uses = split_uses
        self._exchanged = exchanged(placed)
        self._after_random = dict(zip(self.chain[1:], self.chain, strict=False))
        self._lower: dict[int, list[int]] = {}
        for earlier, later in delays:
            self._lower.setdefault(later, []).append(earlier)

    def level_of(self, position: int, levels: Sequence[int]) -> int:
        """The lowest level that an operation may have."""
        node, workers = self._nodes[position], self._workers
        before = [*node.reads, *node.runs_after]
        if position in self._after_random:
            before.append(self._after_random[position])
        level = max((levels[p] + 1 for p in self._lower.get(position, ())), default=0)
        for earlier in before:
            worker = workers[earlier]
            if worker == EVERYWHERE:
                continue
            crossing = worker != workers[position] or earlier in self._split_uses
            crossing &= earlier not in self._exchanged  # borrowed before a step: see pieces.py
            level = max(level, levels[earlier] + crossing)
        return level


def _sink_sources(
    placed: PlacedGraph,
    levels: list[int],
    fixed: frozenset[int],
    split_uses: AbstractSet[int],
) -> None:
    """Let operations that depend on no activation run in the segment that uses them.

    A transposed weight or a mask has level 0, though its only users may lie on level 5 of the same
    worker: a segment, and a backward, of its own for nothing. What combines inputs with parameters
    is an activation and stays: a tower that runs beside another one must not wait for it.
    """
    nodes, workers = placed.graph.nodes, placed.workers
    users: list[list[int]] = [[] for _ in nodes]
    movable = [False] * len(nodes)
    pinned = set(fixed)
    from_input: list[bool] = []
    from_parameter: list[bool] = []
    for position, node in enumerate(nodes):
        from_input.append(node.kind is NodeKind.INPUT or any(from_input[r] for r in node.reads))
        from_parameter.append(
            node.kind is NodeKind.PARAMETER or any(from_parameter[r] for r in node.reads)
        )
        pinned.update(node.runs_after)
        if node.runs_after or node.changes_inputs or node.kind is not NodeKind.OPERATION:
            pinned.add(position)
        for operand in node.reads:
            users[operand].append(position)
        is_activation = from_input[position] and from_parameter[position]
        can_move = position not in pinned and not is_activation
        movable[position] = can_move and all(
            movable[r]
            or workers[r] == EVERYWHERE
            or (nodes[r].is_state and workers[r] == workers[position])
            for r in node.reads
        )
    for position in reversed(range(len(nodes))):
        if not movable[position] or position in pinned or not users[position]:
            continue
        latest = min(
            levels[user] - (workers[user] != workers[position] or position in split_uses)
            for user in users[position]
        )
        levels[position] = max(levels[position], latest)
    for position, node in enumerate(nodes):
        if node.with_producer:  # a tuple cannot travel, nor collect gradients, between segments
            levels[position] = levels[_producer(nodes, node)]


def _producer(nodes: Sequence[Node], element: Node) -> int:
    return next(operand for operand in element.reads if nodes[operand].meta is None)


def drawing_node(graph: CapturedGraph, segmentation: Segmentation) -> int | None:
    """The last operation of the one segment that draws for Python and NumPy; None if there is none.

    PyTorch's generator starts anew for each microbatch. Theirs run on through them, as in the plain
    loop that accumulates gradients: so one segment draws, microbatch after microbatch, and tells
    the others its state.

    Args:
        graph: The graph.
        segmentation: Its segments.
    """
    able = [p for p, node in enumerate(graph.nodes) if node.draws_from_process]
    seen = [p for p in able if _was_seen(graph, p)]
    found = seen or able
    is_one = len({segmentation.segment_of[p] for p in found}) == 1
    return found[-1] if is_one else None


def _was_seen(graph: CapturedGraph, position: int) -> bool:
    call = graph.fx_nodes[graph.nodes[position].name].target
    return isinstance(call, OpaqueCall) and call.reached.drew_from_process()
