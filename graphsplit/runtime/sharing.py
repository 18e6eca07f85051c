"""The tally of all gradients: its instructions, and its messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphsplit.optimizers.update import Updater
from graphsplit.partition.plan import Edge, PartitionPlan
from graphsplit.program.instruction import Opcode
from graphsplit.runtime.step_state import StepState

Action = Callable[[StepState], None]


def bind_tally(opcode: Opcode, updater: Updater, worker: int) -> Action:
    """An instruction that makes this worker's part of the tally, or uses all parts."""
    if opcode is Opcode.CLIP:
        return lambda state: updater.clip(state.tallies)

    def tally(state: StepState) -> None:
        state.tallies[worker] = updater.tally()

    return tally


def bind_send_tally(plan: PartitionPlan, edge: Edge, send: Callable[..., Any]) -> Action:
    """Send this worker's part to the root, or, from there, the whole."""
    assert plan.tally is not None
    if edge.source != plan.tally.root:
        return lambda state: send(state.tallies[edge.source], step=state.step, microbatch=0)
    givers = [worker for worker, size in enumerate(plan.tally.sizes) if size]

    def send_whole(state: StepState) -> None:
        whole = torch.cat([state.tallies[worker] for worker in givers])
        send(whole, step=state.step, microbatch=0)

    return send_whole


def bind_receive_tally(plan: PartitionPlan, edge: Edge, receive: Callable[..., Any]) -> Action:
    """Receive a worker's part, at the root, or there from the whole."""
    assert plan.tally is not None
    if edge.destination == plan.tally.root:

        def receive_part(state: StepState) -> None:
            state.tallies[edge.source] = receive(step=state.step, microbatch=0)

        return receive_part
    sizes = plan.tally.sizes

    def receive_whole(state: StepState) -> None:
        parts = receive(step=state.step, microbatch=0).split(sizes)
        state.tallies.update(enumerate(parts))

    return receive_whole
