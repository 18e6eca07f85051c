"""Instructions for gradients that replicas add in blocks; see ``partition.replicas.blocks``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphsplit.errors import StepFailedError
from graphsplit.partition.plan import Edge, Exchange, PartitionPlan, SumTerm
from graphsplit.program.instruction import Instruction
from graphsplit.runtime.channels import sparse_gradient
from graphsplit.runtime.segments.autograd import accumulate, gradient_sum
from graphsplit.runtime.segments.part_sums import PartSums
from graphsplit.runtime.step_state import Gradient, StepState
from graphsplit.torch_ext.attributes import TENSOR_HOOKS

Action = Callable[[StepState], None]
Terms = Callable[[StepState, int, tuple[SumTerm, ...]], list[Gradient]]


def bind_part(
    plan: PartitionPlan,
    instruction: Instruction,
    sums: PartSums,
    owned: Mapping[int, torch.Tensor],
    terms_of: Terms,
) -> Action:
    """Add a microbatch's part to the block that it is in, where it was made; or keep it."""
    terms, microbatch = plan.gradient_sums[instruction.operand], instruction.microbatch
    first = plan.in_first_lane(instruction.operand)
    key = first, next(end for end in plan.blocks[first].ends if end >= microbatch)
    owner = owned.get(first, str(plan.placed.graph.nodes[first].target))

    def add_part(state: StepState) -> None:
        found = terms_of(state, microbatch, terms)
        part = gradient_sum(found)
        # A term may be the gradient of another parameter as well.
        sums.add_to_block(key, part, is_shared=any(part is one for one in found))

    def keep_part(state: StepState) -> None:
        found = terms_of(state, microbatch, terms)
        part = gradient_sum(found)
        start = state.microbatches.start if state.microbatches is not None else 0
        sums.keep(owner, start + microbatch, part, is_shared=any(part is one for one in found))

    def add_kept(state: StepState) -> None:
        sums.add_to_block(key, sums.take_kept(owner, microbatch))

    if plan.exchange is Exchange.ALONE:
        return add_kept
    return add_part if plan.exchange is Exchange.BESIDE else keep_part


def bind_send_block(
    plan: PartitionPlan, edge: Edge, microbatch: int, sums: PartSums, send: Callable[..., Any]
) -> Action:
    """Send a block to the parameter's owner."""
    first = plan.in_first_lane(edge.value)

    def send_block(state: StepState) -> None:
        block = sums.take_block((first, microbatch), is_read=True)
        if block is not None and block.layout is not torch.strided:
            raise sparse_gradient(plan.placed.graph.nodes[edge.value], edge)
        send(block, step=state.step, microbatch=microbatch)

    return send_block


def bind_add_block(
    plan: PartitionPlan, instruction: Instruction, sums: PartSums, parameter: torch.Tensor
) -> Action:
    """Add a block to the sum of a parameter's gradient, where it lives."""
    microbatch, first = instruction.microbatch, plan.in_first_lane(instruction.operand)
    blocks = plan.blocks[first]
    edge, size = blocks.edges[plan.lane_of(instruction.operand)], blocks.ends[microbatch]
    name = plan.placed.graph.nodes[first].target

    def add_block(state: StepState) -> None:
        if any(getattr(parameter, table, None) for table in TENSOR_HOOKS):
            raise StepFailedError(
                f"a hook was put on {name} after the first step, and replicas add parts of its "
                f"gradient before the hook could see them\n"
                f"  Fix: put hooks on parameters before the first step of a Model."
            )
        if edge is None:
            block = sums.take_block((first, microbatch))
        else:
            block = state.received[microbatch].pop(edge)
        start = state.microbatches.start if state.microbatches is not None else 0
        with sums.apart([parameter], start + microbatch + 1 - size, size):
            if block is not None:
                accumulate(parameter, block, is_shared=False)

    return add_block
