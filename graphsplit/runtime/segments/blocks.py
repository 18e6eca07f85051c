"""Instructions for gradients that replicas add in blocks; see ``partition.blocks``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphsplit.errors import StepFailedError
from graphsplit.partition.plan import Edge, PartitionPlan, SumTerm
from graphsplit.program.instruction import Instruction
from graphsplit.runtime.channels import sparse_gradient
from graphsplit.runtime.segments.autograd import accumulate, gradient_sum
from graphsplit.runtime.segments.pairwise import PairwiseSums
from graphsplit.runtime.step_state import Gradient, StepState
from graphsplit.torch_ext.attributes import TENSOR_HOOKS

Action = Callable[[StepState], None]
Terms = Callable[[StepState, int, tuple[SumTerm, ...]], list[Gradient]]


def bind_part(
    plan: PartitionPlan, instruction: Instruction, pairs: PairwiseSums, terms_of: Terms
) -> Action:
    """Add a microbatch's part to the block that it is in, where it was made."""
    terms, microbatch = plan.gradient_sums[instruction.operand], instruction.microbatch
    first = plan.in_first_lane(instruction.operand)
    key = first, next(end for end in plan.blocks[first].ends if end >= microbatch)

    def add_part(state: StepState) -> None:
        found = terms_of(state, microbatch, terms)
        part = gradient_sum(found)
        # A term may be the gradient of another parameter as well.
        pairs.add_to_block(key, part, is_shared=any(part is one for one in found))

    return add_part


def bind_send_block(
    plan: PartitionPlan, edge: Edge, microbatch: int, pairs: PairwiseSums, send: Callable[..., Any]
) -> Action:
    """Send a block to the parameter's owner."""
    first = plan.in_first_lane(edge.value)

    def send_block(state: StepState) -> None:
        block = pairs.take_block((first, microbatch))
        if block is not None and block.layout is not torch.strided:
            raise sparse_gradient(plan.placed.graph.nodes[edge.value], edge)
        send(block, step=state.step, microbatch=microbatch)

    return send_block


def bind_add_block(
    plan: PartitionPlan, instruction: Instruction, pairs: PairwiseSums, parameter: torch.Tensor
) -> Action:
    """Add a block to the sum of a parameter's gradient, where it lives."""
    microbatch, first = instruction.microbatch, plan.in_first_lane(instruction.operand)
    sums = plan.blocks[first]
    edge, size = sums.edges[plan.lane_of(instruction.operand)], sums.ends[microbatch]
    name = plan.placed.graph.nodes[first].target

    def add_block(state: StepState) -> None:
        if any(getattr(parameter, table, None) for table in TENSOR_HOOKS):
            raise StepFailedError(
                f"a hook was put on {name} after the first step, and replicas add parts of its "
                f"gradient before the hook could see them\n"
                f"  Fix: put hooks on parameters before the first step of a Model."
            )
        if edge is None:
            block = pairs.take_block((first, microbatch))
        else:
            block = state.received[microbatch].pop(edge)
        start = state.microbatches.start if state.microbatches is not None else 0
        with pairs.apart([parameter], start + microbatch + 1 - size, size):
            if block is not None:
                accumulate(parameter, block, is_shared=False)

    return add_block
