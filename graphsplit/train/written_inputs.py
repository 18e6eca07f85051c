"""Inputs that forward or the loss writes to: every worker that holds the batch gets the new values.

In one process there is one batch, and what was written stays in it: for the metrics, for the next
epoch over the same tensors, for the script. Here only the worker that runs the operation sees it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from graphsplit.capture.graph import NodeKind
from graphsplit.capture.memory_calls import GiveBackVersion
from graphsplit.partition.plan import PartitionPlan
from graphsplit.runtime.control import ControlChannels
from graphsplit.train.checkpoint.group import ControlGroup
from graphsplit.train.checkpoint.layout import plain_meta

if TYPE_CHECKING:
    from graphsplit.train.planner import Planned


def written_inputs(plan: PartitionPlan) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Which of the flattened inputs are written to, each with the workers that have the outcome."""
    graph, workers = plan.placed.graph, plan.placed.workers
    ranks: dict[int, set[int]] = {}
    for value, touching in graph.touching.items():
        writes = {workers[p] for p in touching if graph.nodes[p].changes_inputs}
        ranks.setdefault(value, set()).update(writes)
    for position, node in enumerate(graph.nodes):
        found = graph.fx_nodes.get(node.name)
        if found is not None and isinstance(found.target, GiveBackVersion):
            ranks.setdefault(node.reads[0], set()).add(workers[position])
    return tuple(
        (int(graph.nodes[value].target), tuple(sorted(ranks[value])))
        for value in sorted(ranks)
        if graph.nodes[value].kind is NodeKind.INPUT
    )


def share_written(
    control: ControlChannels, planned: Planned, inputs: Sequence[Any], holders: Collection[int]
) -> None:
    """Give what was written to all workers that hold the batch. All of these call it.

    Args:
        control: The channels of the job.
        planned: What has run.
        inputs: This worker's flattened inputs of one microbatch.
        holders: The workers that hold the batch.
    """
    group = ControlGroup(control, lambda: None)
    for index, ranks in planned.written_inputs:
        tensor, source = inputs[index], ranks[0]
        waiting = sorted(set(holders).difference(ranks))
        if group.rank == source:
            for peer in waiting:
                group.send(tensor.detach().contiguous(), destination=peer)
        elif group.rank in waiting:
            with torch.no_grad():
                tensor.copy_(group.receive_tensor(plain_meta(tensor), source=source))
