"""The result of partitioning: segments, edges and gradient sums, as one frozen value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise

import torch

from graphsplit.capture.graph import NodeKind
from graphsplit.marks.wire import is_wider
from graphsplit.partition.gradient_sums import Contribution, Use, differentiable_uses
from graphsplit.partition.segments import Segment, Segmentation
from graphsplit.placement.resolve import EVERYWHERE, PlacedGraph
from graphsplit.tensor_meta import TensorMeta


class EdgeKind(Enum):
    """The kinds of edges, by what travels along them."""

    VALUE = "value"
    GRADIENT = "gradient"
    GENERATOR = "generator"
    PROCESS_GENERATORS = "process generators"
    BUFFERS = "buffers"
    BLOCK = "sum of gradients"
    REDUCTION = "reduction"


@dataclass(frozen=True, slots=True)
class Edge:
    """One tensor going to one worker.

    Attributes:
        index: Position among all edges of the plan.
        kind: Forward value, gradient, the state of the random generator, those of Python's and
            NumPy's generators where these do not go with it, buffers of a chain, or numbers about
            gradients.
        value: The node it carries (for a generator state: the random operation that left it; for
            numbers about gradients: the first parameter, which stands for all; for buffers of a
            chain: the first one).
        source: Sending worker.
        destination: Receiving worker.
        meta: What is carried.
        contributions: For gradients: the contributions it carries, already summed, in order.
        per_step: Sent once, not per microbatch: borrowed state that no operation modifies.
        members: Borrowed state that goes in one message: its nodes; the first stands for all.
    """

    index: int
    kind: EdgeKind
    value: int
    source: int
    destination: int
    meta: TensorMeta
    contributions: tuple[int, ...] = ()
    per_step: bool = False
    members: tuple[int, ...] = ()

    @property
    def values(self) -> tuple[int, ...]:
        """The nodes that it carries, or stands for."""
        return self.members or (self.value,)


@dataclass(frozen=True, slots=True)
class SumTerm:
    """One term of the sum that makes a value's gradient: local, or received."""

    contribution: int | None = None
    edge: int | None = None


@dataclass(frozen=True, slots=True)
class SegmentIO:
    """Inputs and outputs of one segment.

    Attributes:
        values: Nodes read from outside, in program order: state, inputs, constants, and values
            of other segments.
        leaves: For each contribution of this segment, its index; every one is an input of its
            own.
        parameters: Parameters that the segment uses directly: autograd's leaves.
        outputs: Nodes that others need, in program order.
        roots: Outputs that may receive a gradient, in program order.
        is_random: Whether it draws from the generator.
    """

    values: tuple[int, ...]
    leaves: tuple[int, ...]
    parameters: tuple[int, ...]
    outputs: tuple[int, ...]
    roots: tuple[int, ...]
    is_random: bool


@dataclass(frozen=True, slots=True)
class RecomputedGroup:
    """Operations of a segment that backward runs again.

    Attributes:
        positions: The operations, in program order.
        repeats_writes: Whether buffers are then modified once more: what a checkpoint inside the
            network does in eager mode.
    """

    positions: tuple[int, ...]
    repeats_writes: bool = False


@dataclass(frozen=True, slots=True)
class WeightUse:
    """An operation whose weight gradients can be computed apart from that of its activation.

    Attributes:
        position: The operation.
        operands: Which of its operands are weights; by index among what it reads.
        leaves: For each of them, the contribution that stands for it, or -1: the parameter itself.
        work: Multiplications and additions that computing its weight gradients takes.
    """

    position: int
    operands: tuple[int, ...]
    leaves: tuple[int, ...]
    work: int


@dataclass(frozen=True, slots=True)
class BackwardSplit:
    """How the backward of one segment falls into two instructions.

    ``BACKWARD_INPUT`` computes all that others wait for, ``BACKWARD_WEIGHT`` the rest.

    Attributes:
        uses: What is left to ``BACKWARD_WEIGHT``.
    """

    uses: tuple[WeightUse, ...]

    @property
    def leaves(self) -> tuple[int, ...]:
        """Contributions that ``BACKWARD_WEIGHT`` makes."""
        return tuple(leaf for use in self.uses for leaf in use.leaves if leaf >= 0)


@dataclass(frozen=True, slots=True)
class Reduction:
    """Numbers that all workers share between the last gradient and the optimizer.

    Attributes:
        root: The worker that gathers them and hands them out.
        sizes: How many numbers each worker gives.
    """

    root: int
    sizes: tuple[int, ...]


class Exchange(Enum):
    """When replicas exchange their parts of gradients.

    Attributes:
        BESIDE: In the plan that makes them, beside its backward.
        LATER: Not in this plan: they are kept, and added to those of later batches of the step.
        WITH_KEPT: In the plan of a step's last batch, each added to what the others have kept.
        ALONE: In this plan, which computes nothing: it ends a step whose batches kept them.
    """

    BESIDE = "beside"
    LATER = "later"
    WITH_KEPT = "with kept"
    ALONE = "alone"
    __hash__ = object.__hash__  # Enum's is a call in Python, for each plan that a step looks up


@dataclass(frozen=True, slots=True)
class BlockSums:
    """A parameter, or several, whose parts of gradients are added in blocks where they are made.

    Attributes:
        workers: Who makes and adds the parts, by lane.
        edges: The edge on which its blocks go to the parameter's owner, by lane; None: it is there.
        ends: The last microbatch of each block, in order, and how many the block has.
        members: The parameters, by number in the first lane; the first one stands for all.
        terms: The terms of the other ones' gradients, in all lanes.
    """

    workers: tuple[int, ...]
    edges: tuple[int | None, ...]
    ends: Mapping[int, int]
    members: tuple[int, ...]
    terms: Mapping[int, tuple[SumTerm, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BufferChain:
    """Buffers that go from worker to worker, each of which updates them by its microbatches.

    Attributes:
        updates: Which of the graph's buffer updates, by their indices.
        buffers: The buffers, by their numbers in the first lane.
        owner: Where they live.
        workers: Who updates them, by lane.
        edges: The edge on which they come to each lane, and the one home; None: they are there.
    """

    updates: tuple[int, ...]
    buffers: tuple[int, ...]
    owner: int
    workers: tuple[int, ...]
    edges: tuple[int | None, ...]


@dataclass(frozen=True)
class PartitionPlan:
    """A placed graph, cut.

    Attributes:
        placed: The graph with its workers.
        segmentation: Its segments.
        io: Inputs and outputs of each segment, by segment.
        edges: All edges, by index.
        contributions: All leaves that collect gradients, by index.
        gradient_sums: For each value with contributions: the terms of its gradient, in order. Not
            for parameters for which another one stands in ``blocks``.
        seeds: For each contribution with a seed: the terms of the seed, in order.
        home: The worker that has the outputs and computes metrics.
        is_microbatched: Whether it runs microbatches of a step: each draws from a generator state
            of its own, so that no state is left for the end of the step.
        reduction: What workers share before the optimizer steps; None if it is nothing.
        splits: The segments whose backward may be run in two parts; see ``partition.splitting``.
        recomputed: By segment, groups of operations that backward runs again; see
            ``partition.recomputation``.
        run_twice: Operations that forward runs twice, instead of once more in backward.
        lanes: The microbatches of each lane, where their workers differ: every value then has a
            number in each lane; see ``partition.replicas.lanes``. Empty: all run the same.
        chains: The buffers into which the microbatches are folded, by the first one's number in the
            first lane; see ``partition.replicas.buffer_chains``.
        blocks: The parameters whose gradients are added in blocks, by number in the first lane; see
            ``partition.replicas.blocks``.
        is_replicated: Whether replicas share the microbatches, or what is evaluated.
        together: How many whole batches replicas evaluate at once: they are its microbatches then.
        evaluators: For each replicated module, the workers that share these batches.
        exchange: When parts of gradients that are added in blocks go to their owners.
        gradient_dtype: To what these parts and their sums are rounded; None: they are left as they
            are.
    """

    placed: PlacedGraph
    segmentation: Segmentation
    io: tuple[SegmentIO, ...]
    edges: tuple[Edge, ...]
    contributions: tuple[Contribution, ...]
    gradient_sums: dict[int, tuple[SumTerm, ...]]
    seeds: dict[int, tuple[SumTerm, ...]]
    home: int
    is_microbatched: bool = False
    reduction: Reduction | None = None
    splits: Mapping[int, BackwardSplit] = field(default_factory=dict)
    recomputed: Mapping[int, tuple[RecomputedGroup, ...]] = field(default_factory=dict)
    run_twice: frozenset[int] = frozenset()
    lanes: tuple[range, ...] = ()
    chains: Mapping[int, BufferChain] = field(default_factory=dict)
    blocks: Mapping[int, BlockSums] = field(default_factory=dict)
    is_replicated: bool = False
    together: int = 1
    evaluators: tuple[tuple[int, ...], ...] = ()
    exchange: Exchange = Exchange.BESIDE
    gradient_dtype: torch.dtype | None = None

    @property
    def num_values(self) -> int:
        """How many values a lane has."""
        return len(self.placed.graph.nodes) // max(1, len(self.lanes))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, by index."""
        return self.segmentation.segments

    def lane_of(self, value: int) -> int:
        """The lane of a value."""
        return value // self.num_values

    def in_first_lane(self, value: int) -> int:
        """The number that a value has in the first lane; its own where there are no lanes."""
        return value % self.num_values

    def is_in(self, microbatch: int, value: int) -> bool:
        """Whether a microbatch runs the lane of a value."""
        return not self.lanes or microbatch in self.lanes[self.lane_of(value)]

    def counted(self) -> Iterator[int]:
        """All nodes; parameters and buffers, which lanes have in common, once."""
        nodes = self.placed.graph.nodes
        return (p for p, n in enumerate(nodes) if not n.is_state or self.lane_of(p) == 0)

    def slot(self, value: int) -> int:
        """The number under which a microbatch keeps a value: outputs have one for all lanes."""
        first = self.in_first_lane(value)
        is_output = any(output.node == first for output in self.placed.graph.outputs)
        return first if is_output else value

    @cached_property
    def random_hops(self) -> tuple[tuple[int, int], ...]:
        """Pairs of operations that draw from one generator, one right after the other."""
        hops = pairwise(self.segmentation.random_chain)
        return tuple(hop for hop in hops if self.lane_of(hop[0]) == self.lane_of(hop[1]))

    def draws_first(self, segment: int) -> bool:
        """Whether a segment draws before all others of its lane."""
        later = {after for _, after in self.random_hops}
        nodes, drawing = self.segments[segment].nodes, self.segmentation.random_chain
        return any(position not in later and position in nodes for position in drawing)

    @cached_property
    def gradient_uses(self) -> dict[int, list[Use]]:
        """Uses of each value that carry a gradient, in the order in which eager adds them."""
        graph = self.placed.graph
        return differentiable_uses(graph.nodes) if graph.has_gradients else {}

    def behind(self, outputs: Iterable[int]) -> frozenset[int]:
        """The operations of which a backward from outputs may free what autograd has saved."""
        key = frozenset(outputs)
        if key not in self._behind:
            self._behind[key] = frozenset(_history(self, key))
        return self._behind[key]

    @cached_property
    def _behind(self) -> dict[frozenset[int], frozenset[int]]:
        return {}

    @cached_property
    def trained(self) -> set[str]:
        """The names of the parameters that get a gradient: the loss depends on them."""
        graph, found = self.placed.graph, {self.placed.graph.loss_node}
        for position in reversed(range(len(graph.nodes))):
            if position in found:
                found |= {p for p in graph.nodes[position].reads if graph.nodes[p].requires_grad}
        nodes = [graph.nodes[p] for p in found if p is not None]
        return {node.target for node in nodes if node.kind is NodeKind.PARAMETER}

    @cached_property
    def draws_from_process(self) -> bool:
        """Whether Python's and NumPy's generators travel with PyTorch's."""
        return not self.is_microbatched and self.placed.graph.draws_from_process

    @property
    def num_workers(self) -> int:
        """Size of the cluster."""
        return self.placed.num_workers

    def worker_of_sum(self, value: int) -> int:
        """Where the gradients of a value are added up: where it lives, or its first leaf.

        Where they are added in blocks: where the parts are made.
        """
        block = self.blocks_of(value)
        if block is not None:
            return block.workers[self.lane_of(value)]
        worker = self.placed.workers[value]
        first = (c.segment for c in self.contributions if c.value == value)
        return worker if worker != EVERYWHERE else self.segments[next(first)].worker

    def blocks_of(self, value: int) -> BlockSums | None:
        """How the parts of a parameter's gradient are added in blocks, if they are."""
        return self.blocks.get(self.in_first_lane(value)) if self.blocks else None

    def block_meta(self, value: int) -> TensorMeta:
        """A block of parts of a parameter's gradient, as it travels."""
        meta, dtype = self.placed.graph.nodes[value].meta, self.gradient_dtype
        assert meta is not None
        return replace(meta, dtype=dtype) if dtype and is_wider(meta.dtype, dtype) else meta

    def members_of(self, value: int) -> tuple[int, ...]:
        """The parameters whose blocks are added with those of one, in the lane of that; or it."""
        block = self.blocks_of(value)
        shift = value - self.in_first_lane(value)
        return (value,) if block is None else tuple(shift + member for member in block.members)

    def segments_of(self, worker: int) -> tuple[Segment, ...]:
        """A worker's segments in forward order."""
        return tuple(s for s in self.segments if s.worker == worker)

    def owned_state(self, worker: int) -> tuple[int, ...]:
        """Parameters and buffers that live on a worker."""
        nodes, workers = self.placed.graph.nodes, self.placed.workers
        return tuple(p for p, n in enumerate(nodes) if n.is_state and workers[p] == worker)


def _history(plan: PartitionPlan, outputs: Iterable[int]) -> Iterator[int]:
    """Operations to which gradients flow from outputs; all, where some are recomputed together.

    Whoever has modified memory is in the history of all that shares it.
    """
    nodes = plan.placed.graph.nodes
    modifying: dict[int, list[int]] = {}
    for position, node in enumerate(nodes):
        for operand in node.reads if node.changes_inputs else ():
            modifying.setdefault(operand, []).append(position)
    waiting, seen = [*(range(len(nodes)) if plan.recomputed else outputs)], set()
    while waiting:
        position = waiting.pop()
        node = nodes[position]
        if position in seen or not node.requires_grad or node.kind is not NodeKind.OPERATION:
            continue
        seen.add(position)
        yield position
        waiting += [
            *node.reads,
            *modifying.get(position, ()),
            *(p for p, _ in node.shares_modified),
        ]
