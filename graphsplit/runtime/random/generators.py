"""Edges that carry the states of generators of random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphsplit.partition.plan import Edge, EdgeKind, PartitionPlan
from graphsplit.runtime.random.randomness import (
    all_generators,
    process_generators,
    set_all_generators,
    set_process_generators,
)
from graphsplit.runtime.step_state import StepState

Action = Callable[[StepState], None]
GENERATORS = (EdgeKind.GENERATOR, EdgeKind.PROCESS_GENERATORS)


def bind_send_generators(
    plan: PartitionPlan, edge: Edge, microbatch: int, send: Callable[..., Any]
) -> Action:
    """Make the function that sends the states of generators, given the step's state."""
    if edge.kind is EdgeKind.GENERATOR and plan.is_microbatched:
        return lambda state: send(
            state.generators[microbatch], step=state.step, microbatch=microbatch
        )
    read: Callable[[], torch.Tensor] = torch.default_generator.get_state
    if edge.kind is EdgeKind.PROCESS_GENERATORS:
        read = process_generators
    elif plan.draws_from_process:
        read = all_generators
    return lambda state: send(read(), step=state.step, microbatch=microbatch)


def bind_receive_generators(
    plan: PartitionPlan, edge: Edge, microbatch: int, receive: Callable[..., Any]
) -> Action:
    """Make the function that takes over the states of generators, given the step's state."""
    if edge.kind is EdgeKind.GENERATOR and plan.is_microbatched:

        def keep(state: StepState) -> None:
            state.generators[microbatch] = receive(step=state.step, microbatch=microbatch)

        return keep
    write: Callable[[torch.Tensor], Any] = torch.default_generator.set_state
    if edge.kind is EdgeKind.PROCESS_GENERATORS:
        write = set_process_generators
    elif plan.draws_from_process:
        write = set_all_generators

    def take_over(state: StepState) -> None:
        write(receive(step=state.step, microbatch=microbatch))

    return take_over
