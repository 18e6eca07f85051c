"""Norms of gradients that all owners share before the optimizer: instructions and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphsplit.optimizers.update import Updater
from graphsplit.partition.plan import Edge, PartitionPlan
from graphsplit.program.instruction import Opcode
from graphsplit.runtime.step_state import Action, StepState


def bind_reduce(opcode: Opcode, updater: Updater, worker: int) -> Action:
    """An instruction that makes this worker's part of the reduction, or uses all parts."""
    if opcode is Opcode.CLIP:
        return lambda state: updater.clip(state.partials)

    def reduce(state: StepState) -> None:
        state.partials[worker] = updater.partial()

    return reduce


def bind_send_reduction(plan: PartitionPlan, edge: Edge, send: Callable[..., Any]) -> Action:
    """Send this worker's part to the root, or, from there, the whole."""
    assert plan.reduction is not None
    if edge.source != plan.reduction.root:
        return lambda state: send(state.partials[edge.source], step=state.step, microbatch=0)
    givers = [worker for worker, size in enumerate(plan.reduction.sizes) if size]

    def send_whole(state: StepState) -> None:
        whole = torch.cat([state.partials[worker] for worker in givers])
        send(whole, step=state.step, microbatch=0)

    return send_whole


def bind_receive_reduction(plan: PartitionPlan, edge: Edge, receive: Callable[..., Any]) -> Action:
    """Receive a worker's part, at the root, or there from the whole."""
    assert plan.reduction is not None
    if edge.destination == plan.reduction.root:

        def receive_part(state: StepState) -> None:
            state.partials[edge.source] = receive(step=state.step, microbatch=0)

        return receive_part
    sizes = plan.reduction.sizes

    def receive_whole(state: StepState) -> None:
        parts = receive(step=state.step, microbatch=0).split(sizes)
        state.partials.update(enumerate(parts))

    return receive_whole
