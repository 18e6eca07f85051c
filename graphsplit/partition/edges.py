"""Partition a placed graph: cut it, and derive every edge from definitions and uses.

One edge per (value, receiving worker), whatever the number of uses there; one gradient edge back
for it, or several where eager's order of summing needs them apart; one edge per hop of the random
generator's state.
"""

from __future__ import annotations

import heapq
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import count, groupby, pairwise

import torch

from graphsplit.capture.graph import CapturedGraph, Mode, NodeKind
from graphsplit.errors import InvariantError, PlacementError
from graphsplit.partition.gradient_sums import (
    Contribution,
    GradientOrder,
    differentiable_uses,
    order_gradients,
    rounded_by,
)
from graphsplit.partition.pieces import cuts_of
from graphsplit.partition.plan import Edge, EdgeKind, PartitionPlan, SegmentIO, SumTerm
from graphsplit.partition.segments import LevelRule, Segmentation, cut_into_segments, drawing_node
from graphsplit.placement.resolve import EVERYWHERE, PlacedGraph
from graphsplit.tensor_meta import TensorMeta

# Rounds of cutting before splits are foreseen; nearly every graph needs fewer.
_PATIENCE = 8
GENERATOR_META = TensorMeta(torch.uint8, (torch.default_generator.get_state().numel(),), (1,))
# Python's and NumPy's, as ``job/process_generators.py`` writes them.
_PROCESS_BYTES = 2 * 2509
GENERATOR_BYTES = torch.default_generator.get_state().numel()
ALL_GENERATORS_BYTES = GENERATOR_BYTES + _PROCESS_BYTES
PROCESS_GENERATORS_META = TensorMeta(torch.uint8, (_PROCESS_BYTES,), (1,))
ALL_GENERATORS_META = TensorMeta(torch.uint8, (ALL_GENERATORS_BYTES,), (1,))


def partition(
    placed: PlacedGraph, *, is_microbatched: bool = False, home: int | None = None
) -> PartitionPlan:
    """Cut a placed graph into segments and derive what travels between workers.

    Args:
        placed: The graph, every node with its worker.
        is_microbatched: Whether the plan is for microbatches, which draw from generator states of
            their own.
        home: The worker that gets the outputs of an evaluation; None: the one that makes them.

    Returns:
        The plan; equal inputs give equal plans on every worker.

    Raises:
        PlacementError: A value that is no tensor, or memory that is modified in place, would
            have to cross between workers.
    """
    segmentation, gradients = segments_in_eager_order(placed)
    return _Partitioner(placed, segmentation, gradients, is_microbatched, home).run()


def segments_in_eager_order(placed: PlacedGraph) -> tuple[Segmentation, GradientOrder]:
    """Cut until every gradient can be summed in eager's order. Each round only adds splits."""
    split_uses: frozenset[int] = frozenset()
    delays = cuts_of(placed)
    for number in count():
        segmentation = cut_into_segments(placed, split_uses=split_uses, delays=delays)
        gradients = order_gradients(placed, segmentation)
        if gradients.conflicts <= split_uses and gradients.delays <= delays:
            break
        split_uses |= gradients.conflicts
        delays |= gradients.delays
        if number >= _PATIENCE:
            split_uses = foresee_splits(placed, split_uses, delays)
    return segmentation, gradients


def output_workers(graph: CapturedGraph, home: int, num_workers: int) -> tuple[int, ...]:
    """The workers that need a graph's outputs: that of the metrics, or all, or its own alone."""
    if graph.mode.keeps_outputs_home:
        return ()
    return (home,) if graph.mode is Mode.EVAL else tuple(range(num_workers))


class _Partitioner:
    """Collects edges and the inputs and outputs of segments."""

    def __init__(
        self,
        placed: PlacedGraph,
        segmentation: Segmentation,
        gradients: GradientOrder,
        is_microbatched: bool,
        home: int | None,
    ) -> None:
        self.placed = placed
        self.graph = placed.graph
        self.nodes = placed.graph.nodes
        self.workers = placed.workers
        self.segmentation = segmentation
        self.gradients = gradients
        self.uses = differentiable_uses(self.nodes)
        self.is_microbatched = is_microbatched
        self.edges: list[Edge] = []
        # To what those who read a value on a worker round it.
        self.read_as: dict[tuple[int, int], set[torch.dtype | None]] = {}
        self.home = self._home() if home is None else home
        num_segments = len(segmentation.segments)
        self.leaves: list[list[int]] = [[] for _ in range(num_segments)]
        for contribution in gradients.contributions:
            self.leaves[contribution.segment].append(contribution.index)

    def run(self) -> PartitionPlan:
        needed = self._needed_elsewhere()
        for value in sorted(needed):
            for worker in sorted(needed[value]):
                self._add_value_edge(value, worker)
        self._add_generator_edges()
        self._add_process_generator_edges()
        sums = {
            v: self._sum_terms(v, order, self._worker_of_sum(v))
            for v, order in sorted(self.gradients.sums.items())
        }
        seeds = {
            c.index: self._sum_terms(c.value, c.seed, self._worker_of(c))
            for c in self.gradients.contributions
            if c.seed
        }
        return PartitionPlan(
            placed=self.placed,
            segmentation=self.segmentation,
            io=self._segment_io(),
            edges=tuple(self.edges),
            contributions=self.gradients.contributions,
            gradient_sums=sums,
            seeds=seeds,
            home=self.home,
            is_microbatched=self.is_microbatched,
        )

    def _home(self) -> int:
        outputs = self.graph.outputs
        order = [*([outputs[self.graph.loss]] if self.graph.loss is not None else []), *outputs]
        for output in order:
            if output.node is not None and self.workers[output.node] != EVERYWHERE:
                return self.workers[output.node]
        return 0

    def _needed_elsewhere(self) -> dict[int, set[int]]:
        """For each value, the workers other than its own that use it."""
        needed: dict[int, set[int]] = {}
        for position, node in enumerate(self.nodes):
            for operand in node.reads:
                self._need(needed, operand, self.workers[position])
                self.read_as.setdefault((operand, self.workers[position]), set()).add(node.wire)
        for worker in output_workers(self.graph, self.home, self.placed.num_workers):
            for output in self.graph.outputs:
                if output.node is not None:
                    self._need(needed, output.node, worker)
                    self.read_as.setdefault((output.node, worker), set()).add(None)
        return needed

    def _need(self, needed: dict[int, set[int]], value: int, worker: int) -> None:
        if worker not in (EVERYWHERE, self.workers[value]) and self.workers[value] != EVERYWHERE:
            needed.setdefault(value, set()).add(worker)

    def _add_value_edge(self, value: int, worker: int) -> None:
        node = self.nodes[value]
        if node.meta is None:
            raise PlacementError(
                f"{node.name} ({node.target}) is no tensor, and would have to be sent from worker "
                f"{self.workers[value]} to worker {worker}\n  {node.source}\n"
                f"  Fix: place the operations that use it on worker {self.workers[value]} too."
            )
        # What all that use it there round, it may be rounded to before.
        dtypes = {node.wire} if node.wire is not None else self.read_as[value, worker]
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
        self.edges.append(
            Edge(
                len(self.edges),
                EdgeKind.VALUE,
                value,
                self.workers[value],
                worker,
                node.meta if dtype is None else replace(node.meta, dtype=dtype),
                per_step=node.is_state and value not in self.graph.modified,
            )
        )

    def _add_generator_edges(self) -> None:
        chain = self.segmentation.random_chain
        for earlier, later in pairwise(chain):
            if self.workers[earlier] != self.workers[later]:
                self._add_generator_edge(earlier, self.workers[later])
        if chain and not self.is_microbatched:
            for worker in range(self.placed.num_workers):
                if worker != self.workers[chain[-1]]:
                    self._add_generator_edge(chain[-1], worker)

    def _add_generator_edge(self, value: int, worker: int) -> None:
        draws = self.graph.draws_from_process and not self.is_microbatched
        self.edges.append(
            Edge(
                len(self.edges),
                EdgeKind.GENERATOR,
                value,
                self.workers[value],
                worker,
                ALL_GENERATORS_META if draws else GENERATOR_META,
            )
        )

    def _add_process_generator_edges(self) -> None:
        """Of several microbatches: Python's and NumPy's generators, which run on through them."""
        drawing = drawing_node(self.graph, self.segmentation) if self.is_microbatched else None
        if drawing is None:
            return
        source = self.workers[drawing]
        for worker in range(self.placed.num_workers):
            if worker != source:
                number, kind = len(self.edges), EdgeKind.PROCESS_GENERATORS
                edge = Edge(number, kind, drawing, source, worker, PROCESS_GENERATORS_META)
                self.edges.append(edge)

    def _sum_terms(
        self, value: int, order: tuple[int, ...], destination: int
    ) -> tuple[SumTerm, ...]:
        """Add the gradient edges of a value; sum on the sender what may be summed there."""
        terms: list[SumTerm] = []
        by_worker = groupby(order, key=lambda c: self._worker_of(self.gradients.contributions[c]))
        for worker, group in by_worker:
            contributions = tuple(group)
            if worker == destination:
                terms += [SumTerm(contribution=c) for c in contributions]
                continue
            is_first = not terms and not self.graph.has_terms_before(value)
            parts = [contributions] if is_first else [(c,) for c in contributions]
            for part in parts:
                meta = self.nodes[value].meta
                assert meta is not None
                dtype = rounded_by(self.nodes, [self.gradients.contributions[c] for c in part])
                if is_first and self._is_whole_gradient(value, part):
                    dtype = self.nodes[value].wire or dtype
                meta = meta if dtype is None else replace(meta, dtype=dtype)
                terms.append(SumTerm(edge=len(self.edges)))
                self.edges.append(
                    Edge(len(self.edges), EdgeKind.GRADIENT, value, worker, destination, meta, part)
                )
        return tuple(terms)

    def _is_whole_gradient(self, value: int, contributions: tuple[int, ...]) -> bool:
        """Whether nothing is added to them where they arrive: then they may be rounded before."""
        uses = sum(len(self._uses_of(c)) for c in contributions)
        return uses == len(self.uses[value]) and value not in self.graph.given_roots

    def _worker_of_sum(self, value: int) -> int:
        """See ``PartitionPlan``."""
        found = (c for c in self.gradients.contributions if c.value == value)
        is_input = self.workers[value] == EVERYWHERE
        return self._worker_of(next(found)) if is_input else self.workers[value]

    def _worker_of(self, contribution: Contribution) -> int:
        return self.segmentation.segments[contribution.segment].worker

    def _segment_io(self) -> tuple[SegmentIO, ...]:
        segment_of = self.segmentation.segment_of
        needed_outside = self._needed_outside_segment()
        leaf_uses = {use for c in self.gradients.contributions for use in c.uses}
        result = []
        for segment in self.segmentation.segments:
            values: set[int] = set()
            parameters: set[int] = set()
            for position in segment.nodes:
                for index, operand in enumerate(self.nodes[position].reads):
                    if segment_of[operand] == segment.index or (position, index) in leaf_uses:
                        continue
                    values.add(operand)
                    node = self.nodes[operand]
                    flows = node.requires_grad and self.nodes[position].requires_grad
                    if flows and self.graph.has_gradients:
                        if node.kind is not NodeKind.PARAMETER:
                            raise InvariantError(f"no edge brings the gradient of {node.name}")
                        parameters.add(operand)
            outputs = tuple(p for p in segment.nodes if p in needed_outside)
            loss = self.graph.loss_node
            roots = tuple(
                p
                for p in outputs
                if p in self.gradients.sums
                or (p == loss and self.graph.has_gradients)
                or p in self.graph.given_roots
            )
            result.append(
                SegmentIO(
                    tuple(sorted(values)),
                    tuple(self.leaves[segment.index]),
                    tuple(sorted(parameters)),
                    outputs,
                    tuple(sorted(roots, key=self._latest_use)),
                    any(self.nodes[p].is_random for p in segment.nodes),
                )
            )
        return tuple(result)

    def _latest_use(self, value: int) -> tuple[int, int]:
        """Two outputs may turn out to be one tensor: its gradient then comes in eager's order."""
        position, index = max(
            (use for c in self.gradients.sums.get(value, ()) for use in self._uses_of(c)),
            key=lambda use: (use[0], -use[1]),
            default=(len(self.nodes), 0),
        )
        return -position, index

    def _uses_of(self, contribution: int) -> tuple[tuple[int, int], ...]:
        found = self.gradients.contributions[contribution]
        return found.uses + tuple(use for seed in found.seed for use in self._uses_of(seed))

    def _needed_outside_segment(self) -> set[int]:
        segment_of = self.segmentation.segment_of
        needed = {output.node for output in self.graph.outputs if output.node is not None}
        for position, node in enumerate(self.nodes):
            needed.update(r for r in node.reads if segment_of[r] != segment_of[position])
        if self.graph.buffer_updates:
            kept = {name for fold in self.graph.buffer_updates for name in fold.reads}
            needed.update(p for p, node in enumerate(self.nodes) if node.name in kept)
        return {edge.value for edge in self.edges if edge.kind is EdgeKind.VALUE} | needed


# Foresee which uses will have to be split because others are.
#
# Splitting the uses of one value moves operations to later segments, and may so bring the gradients
# of another value out of order. Cut, look and cut again finds that out one value after the other::
#
#     v1 .. vn      made first, all in one segment
#     p2 = v2 + q1        q2 = f(v2)        q1 moves, so p2 does, so the uses of v2 are split,
#     p3 = v3 + q2        q3 = f(v3)        so q2 moves, so p3 does, so the uses of v3 are split ...
#
# In a network of a thousand such layers that takes a thousand rounds over the whole graph. Here
# only what moved is looked at again. It decides on levels alone, before operations that depend on
# no activation are moved to their users: what it finds is split in good time, not for certain by
# need.


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
