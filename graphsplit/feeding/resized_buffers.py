"""Buffers to which an operation gives another size: every worker knows the new one.

A quantisation-aware layer starts with one scale, and has one for each channel after its first run.
It has them on its owner; a graph that another worker records later is to show the same sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from graphsplit.capture.graph import Node, NodeKind
from graphsplit.job.control import ControlChannels
from graphsplit.optimizers.ownership import is_elsewhere, resize
from graphsplit.partition.checks.one_state import opaque_calls
from graphsplit.partition.plan import PartitionPlan

_RESIZING = "fused_moving_avg_obs"


def share_sizes(
    control: ControlChannels, plan: PartitionPlan, tensors: Mapping[str, torch.Tensor]
) -> bool:
    """Take the sizes of buffers from their owners. All workers call it, after a plan's first run.

    Args:
        control: The channels of the job.
        plan: What has run.
        tensors: Parameters and buffers by name.

    Returns:
        Whether one has another size than in the plan; the same on all workers.
    """
    has_changed = False
    for node, owner in _resizable(plan):
        tensor = tensors.get(node.target)
        if tensor is None:  # a buffer that has another form by now
            continue
        mine, what = list(tensor.shape), f"the size of {node.target}"
        shape = control.share_value(mine, source=owner, what=what)
        if shape != list(tensor.shape) and is_elsewhere(tensor):
            resize(tensor, shape)
        has_changed |= node.meta is not None and shape != list(node.meta.shape)
    return has_changed


def _resizable(plan: PartitionPlan) -> Iterator[tuple[Node, int]]:
    """Buffers that an operation may resize, each with its owner."""
    graph, workers = plan.placed.graph, plan.placed.workers
    whole = {position for position, call in opaque_calls(plan) if call.traits.written}
    found: dict[str, tuple[Node, int]] = {}
    for position, node in enumerate(graph.nodes):
        if position in whole or _RESIZING in node.target:
            for read in node.reads:
                if graph.nodes[read].kind is NodeKind.BUFFER:
                    found[graph.nodes[read].target] = graph.nodes[read], workers[read]
    yield from found.values()
