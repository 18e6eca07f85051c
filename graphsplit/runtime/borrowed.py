"""Messages of parameters and buffers that a worker borrows: one each, or many small ones in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphsplit.capture.graph import NodeKind
from graphsplit.partition.plan import Edge, PartitionPlan
from graphsplit.partition.replicas.bundles import places_of
from graphsplit.runtime.step_state import Action, StepState
from graphsplit.tensor_meta import ALIGNMENT, begin_of
from graphsplit.torch_ext.private import foreach_copy_

Layout = tuple[tuple[int, ...], tuple[int, ...], int]


def bind_send_state(
    plan: PartitionPlan,
    edge: Edge,
    microbatch: int,
    state: Mapping[int, torch.Tensor],
    send: Callable[..., Any],
) -> Action:
    """Send a parameter or buffer that lives here, or those that go with it, as they are now."""
    tensors = [state[value] for value in edge.values]
    if not edge.members:
        (tensor,) = tensors
        return lambda step: send(tensor.detach(), step=step.step, microbatch=microbatch)
    message = torch.zeros(edge.meta.shape, dtype=edge.meta.dtype)
    known: list[int] | None = None
    places: list[torch.Tensor] = []
    head = message.view(torch.uint8)[: len(tensors)]

    def send_together(step: StepState) -> None:
        nonlocal places, known
        begins = [begin_of(tensor) for tensor in tensors]
        if begins != known:
            head.copy_(torch.tensor(begins, dtype=torch.uint8))
            places = [message.as_strided(*layout) for layout in _layouts(plan, edge, begins)]
            known = begins
        with torch.no_grad():
            foreach_copy_(places, tensors)
        send(message, step=step.step, microbatch=microbatch)

    return send_together


def bind_receive_state(
    plan: PartitionPlan, edge: Edge, microbatch: int, receive: Callable[..., Any]
) -> Action:
    """Receive what another worker has lent; parameters that are trained ask for a gradient."""
    nodes = plan.placed.graph.nodes
    slots = [
        (plan.slot(value), nodes[value].kind is NodeKind.PARAMETER and nodes[value].asks_grad)
        for value in edge.values
    ]
    known: list[int] | None = None
    layouts: list[Layout] = []

    def receive_state(step: StepState) -> None:
        nonlocal known, layouts
        message = receive(step=step.step, microbatch=microbatch)
        values, found = step.values[microbatch], [message]
        if edge.members:
            begins = message.view(torch.uint8)[: len(slots)].tolist()
            if begins != known:
                known, layouts = begins, _layouts(plan, edge, begins)
            found = [message.as_strided(*layout) for layout in layouts]
        for (slot, is_trained), value in zip(slots, found, strict=True):
            values[slot] = value.requires_grad_(True) if is_trained else value

    return receive_state


def _layouts(plan: PartitionPlan, edge: Edge, begins: Sequence[int]) -> list[Layout]:
    """Shape and strides of each tensor in a message of several, as at home, and where it begins.

    ``begins`` has for each how many bytes it lies behind a multiple of 64, at home and here: bits
    of small products depend on it.
    """
    metas = (plan.placed.graph.nodes[member].meta for member in edge.members)
    places = places_of(plan, edge.members)
    return [
        (meta.shape, meta.strides, place.start + begin % ALIGNMENT // meta.dtype.itemsize)
        for meta, place, begin in zip(metas, places, begins, strict=True)
        if meta is not None
    ]
