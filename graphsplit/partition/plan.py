"""What partitioning gives: segments, edges and gradient folds, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from graphsplit.partition.gradients import Contribution
from graphsplit.partition.segments import Segment, Segmentation
from graphsplit.placement.resolve import PlacedGraph
from graphsplit.tensor_meta import TensorMeta


class EdgeKind(Enum):
    """What travels along an edge."""

    VALUE = "value"
    GRADIENT = "gradient"
    GENERATOR = "generator"
    TALLY = "tally"


@dataclass(frozen=True, slots=True)
class Edge:
    """One tensor going to one worker.

    Attributes:
        index: Position among all edges of the plan.
        kind: Forward value, gradient, the state of the random generator, or numbers about
            gradients.
        value: The node it carries (for a generator state: the random operation that left it; for
            numbers about gradients: the first parameter, which stands for all).
        source: Sending worker.
        destination: Receiving worker.
        meta: What is carried.
        contributions: For gradients: the contributions it carries, already folded, in order.
        per_step: Sent once, not per microbatch: borrowed state that no operation modifies.
    """

    index: int
    kind: EdgeKind
    value: int
    source: int
    destination: int
    meta: TensorMeta
    contributions: tuple[int, ...] = ()
    per_step: bool = False


@dataclass(frozen=True, slots=True)
class FoldTerm:
    """One term of the sum that makes a value's gradient: local, or received."""

    contribution: int | None = None
    edge: int | None = None


@dataclass(frozen=True, slots=True)
class SegmentIO:
    """What goes into and comes out of one segment.

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
class Tally:
    """Numbers that all workers share between the last gradient and the optimizer.

    Attributes:
        root: The worker that gathers them and hands them out.
        sizes: How many numbers each worker gives.
    """

    root: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class PartitionPlan:
    """A placed graph, cut.

    Attributes:
        placed: The graph with its workers.
        segmentation: Its segments.
        io: Inputs and outputs of each segment, by segment.
        edges: All edges, by index.
        contributions: All leaves that collect gradients, by index.
        folds: For each value with contributions: the terms of its gradient, in order.
        seeds: For each contribution with a seed: the terms of the seed, in order.
        home: The worker that has the outputs and computes metrics.
        is_microbatched: Whether it runs microbatches of a step: each draws from a generator state
            of its own, so that no state is left for the end of the step.
        tally: What workers share before the optimizer steps; None if it is nothing.
    """

    placed: PlacedGraph
    segmentation: Segmentation
    io: tuple[SegmentIO, ...]
    edges: tuple[Edge, ...]
    contributions: tuple[Contribution, ...]
    folds: dict[int, tuple[FoldTerm, ...]]
    seeds: dict[int, tuple[FoldTerm, ...]]
    home: int
    is_microbatched: bool = False
    tally: Tally | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, by index."""
        return self.segmentation.segments

    @property
    def num_workers(self) -> int:
        """Size of the cluster."""
        return self.placed.num_workers

    def segments_of(self, worker: int) -> tuple[Segment, ...]:
        """A worker's segments in forward order."""
        return tuple(s for s in self.segments if s.worker == worker)

    def inputs_of(self, worker: int) -> frozenset[int]:
        """Positions of the graph inputs that a worker consumes."""
        from graphsplit.capture.graph import NodeKind

        nodes = self.placed.graph.nodes
        return frozenset(
            value
            for segment in self.segments_of(worker)
            for value in self.io[segment.index].values
            if nodes[value].kind is NodeKind.INPUT
        )

    def owned_state(self, worker: int) -> tuple[int, ...]:
        """Parameters and buffers that live on a worker."""
        nodes, workers = self.placed.graph.nodes, self.placed.workers
        return tuple(p for p, n in enumerate(nodes) if n.is_state and workers[p] == worker)
