"""Numbers that all owners share between the last gradient and the optimizer.

Clipping by the global norm needs the norm of every gradient, wherever it lives; loss scaling needs
to know whether any of them is infinite. Every worker gives its part, a short vector, to one worker,
the *root*, which hands the whole to everybody::

    worker 0          REDUCE  SEND part to 1                                RECEIVE whole  CLIP
    worker 1, root    REDUCE  RECEIVE parts of 0 and 2  SEND whole to 0, 2                 CLIP
    worker 2          REDUCE  SEND part to 1                                RECEIVE whole  CLIP

The root is the worker whose backward ends last: when it has its part, the others have sent theirs,
and one hop is left. What the numbers mean, only those who step the optimizer know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from graphsplit.capture.graph import NodeKind
from graphsplit.errors import InvariantError
from graphsplit.partition.plan import Edge, EdgeKind, PartitionPlan, Reduction
from graphsplit.tensor_meta import TensorMeta

REDUCTION_DTYPE = torch.float64  # holds every norm of a shorter dtype exactly


def with_reduction(plan: PartitionPlan, sizes: Sequence[int]) -> PartitionPlan:
    """Add to a plan what workers share before the optimizer steps.

    Args:
        plan: The plan of a training step.
        sizes: How many numbers each worker gives.
    """
    reduction = Reduction(_last_in_backward(plan), tuple(sizes))
    root, whole = reduction.root, sum(sizes)
    others = [worker for worker in range(plan.num_workers) if worker != root]
    messages = [(worker, root, sizes[worker]) for worker in others if sizes[worker]]
    messages += [(root, worker, whole) for worker in others]
    kinds = [node.kind for node in plan.placed.graph.nodes]
    edges = [
        Edge(
            index,
            EdgeKind.REDUCTION,
            kinds.index(NodeKind.PARAMETER),
            source,
            destination,
            TensorMeta(REDUCTION_DTYPE, (size,), (1,)),
            per_step=True,
        )
        for index, (source, destination, size) in enumerate(messages, start=len(plan.edges))
    ]
    return dataclasses.replace(plan, edges=(*plan.edges, *edges), reduction=reduction)


def _last_in_backward(plan: PartitionPlan) -> int:
    segments = [s for s in plan.segments if plan.io[s.index].roots or plan.io[s.index].leaves]
    return min(segments, key=lambda segment: (segment.level, segment.worker)).worker


def check_reduction(plan: PartitionPlan) -> None:
    """Check that every part reaches the root, and the whole everybody else."""
    found = sorted((e.source, e.destination) for e in plan.edges if e.kind is EdgeKind.REDUCTION)
    expected: list[tuple[int, int]] = []
    if plan.reduction is not None:
        root = plan.reduction.root
        for worker, size in enumerate(plan.reduction.sizes):
            if worker != root:
                expected += [(root, worker), *([(worker, root)] if size else [])]
    if found != sorted(expected):
        raise InvariantError("a part of the reduction goes astray")
