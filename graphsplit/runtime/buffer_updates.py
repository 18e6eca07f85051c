"""Folds of microbatches into buffers, and the messages that bring these from worker to worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from graphsplit.partition.plan import BufferChain, Edge, PartitionPlan
from graphsplit.program.instruction import Instruction
from graphsplit.runtime.step_state import Action, StepState
from graphsplit.tensor_meta import octets_of


def bind_fold(
    plan: PartitionPlan,
    instruction: Instruction,
    state: Mapping[int, torch.Tensor],
    source: Callable[[int, int], Callable[[StepState], Any]],
) -> Action:
    """Bind a fold of one microbatch.

    Args:
        plan: The plan.
        instruction: The instruction.
        state: Parameters and buffers of this worker, by node.
        source: Gives where a microbatch's value is found.
    """
    graph, microbatch = plan.placed.graph, instruction.microbatch
    first = plan.in_first_lane(instruction.operand)
    chain, shift = plan.chains[first], instruction.operand - first
    names = {node.name: p for p, node in enumerate(graph.nodes[: plan.num_values])}
    updates = [
        (
            GraphModule(torch.nn.Module(), graph.buffer_updates[index].update).forward,
            [chain.buffers.index(names[name]) for name in graph.buffer_updates[index].buffers],
            [source(shift + names[name], microbatch) for name in graph.buffer_updates[index].reads],
        )
        for index in chain.updates
    ]

    def fold(step: StepState) -> None:
        held = _held(step, chain, state)
        with torch.no_grad():
            for update, buffers, reads in updates:
                update(*(held[b] for b in buffers), *(read(step) for read in reads))

    return fold


def bind_send_buffers(
    plan: PartitionPlan, edge: Edge, state: Mapping[int, torch.Tensor], send: Callable[..., Any]
) -> Action:
    """Send the buffers of a chain, as bytes in one message."""
    chain = plan.chains[plan.in_first_lane(edge.value)]

    def send_buffers(step: StepState) -> None:
        message = torch.cat([octets_of(tensor) for tensor in _held(step, chain, state)])
        send(message, step=step.step, microbatch=0)

    return send_buffers


def bind_receive_buffers(
    plan: PartitionPlan, edge: Edge, state: Mapping[int, torch.Tensor], receive: Callable[..., Any]
) -> Action:
    """Receive the buffers of a chain; where they live they are taken over."""
    chain = plan.chains[plan.in_first_lane(edge.value)]
    metas = [plan.placed.graph.nodes[b].meta for b in chain.buffers]
    sizes = [meta.size_bytes for meta in metas if meta is not None]

    def receive_buffers(step: StepState) -> None:
        parts = receive(step=step.step, microbatch=0).split(sizes)
        found = [
            part.clone().view(meta.dtype).view(meta.static_shape)
            for part, meta in zip(parts, metas, strict=True)
            if meta is not None
        ]
        if chain.owner != edge.destination:
            step.folded[chain.buffers[0]] = found
            return
        with torch.no_grad():
            for own, tensor in zip(_held(step, chain, state), found, strict=True):
                own.copy_(tensor)

    return receive_buffers


def _held(
    step: StepState, chain: BufferChain, state: Mapping[int, torch.Tensor]
) -> Sequence[torch.Tensor]:
    """The buffers of a chain as this worker has them: its own, or those that came."""
    came = step.folded.get(chain.buffers[0])
    return [state[b] for b in chain.buffers] if came is None else came
