"""Instructions for gradients that replicas add in blocks; see ``partition.replicas.blocks``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphsplit.errors import StepFailedError
from graphsplit.partition.plan import Edge, Exchange, PartitionPlan, SumTerm
from graphsplit.program.instruction import Instruction
from graphsplit.runtime.channels import sparse_gradient
from graphsplit.runtime.segments.autograd import accumulate, gradient_sum
from graphsplit.runtime.segments.part_sums import PartSums
from graphsplit.runtime.step_state import Action, Gradient, StepState
from graphsplit.tensor_meta import TensorMeta
from graphsplit.torch_ext.attributes import TENSOR_HOOKS

Terms = Callable[[StepState, int, tuple[SumTerm, ...]], list[Gradient]]


def bind_part(
    plan: PartitionPlan,
    instruction: Instruction,
    sums: PartSums,
    owned: Mapping[int, torch.Tensor],
    terms_of: Terms,
) -> Action:
    """Add a microbatch's parts to their blocks, where they were made; or keep them."""
    microbatch, first = instruction.microbatch, plan.in_first_lane(instruction.operand)
    block = plan.blocks[first]
    end = next(end for end in block.ends if end >= microbatch)
    members = [
        (
            block.terms.get(value) or plan.gradient_sums.get(value, ()),
            (plan.in_first_lane(value), end),
            owned.get(value, str(plan.placed.graph.nodes[value].target)),
        )
        for value in plan.members_of(instruction.operand)
    ]

    def add_parts(state: StepState) -> None:
        for terms, key, _ in members:
            found = terms_of(state, microbatch, terms)
            part = gradient_sum(found)
            # A term may be the gradient of another parameter as well.
            sums.add_to_block(key, part, is_shared=any(part is one for one in found))

    def keep_parts(state: StepState) -> None:
        start = state.microbatches.start if state.microbatches is not None else 0
        for terms, _, owner in members:
            found = terms_of(state, microbatch, terms)
            part = gradient_sum(found)
            sums.keep(owner, start + microbatch, part, is_shared=any(part is one for one in found))

    def add_kept(state: StepState) -> None:
        for _, key, owner in members:
            sums.add_to_block(key, sums.take_kept(owner, microbatch))

    def keep_and_add(state: StepState) -> None:
        keep_parts(state)
        add_kept(state)

    return {
        Exchange.BESIDE: add_parts,
        Exchange.LATER: keep_parts,
        Exchange.WITH_KEPT: keep_and_add,
        Exchange.ALONE: add_kept,
    }[plan.exchange]


def bind_send_block(
    plan: PartitionPlan, edge: Edge, microbatch: int, sums: PartSums, send: Callable[..., Any]
) -> Action:
    """Send a block to its owner; those of several parameters as bytes in one message."""
    members = plan.blocks[plan.in_first_lane(edge.value)].members
    nodes, metas = plan.placed.graph.nodes, [plan.block_meta(member) for member in members]

    def send_block(state: StepState) -> None:
        blocks = [sums.take_block((member, microbatch), is_read=True) for member in members]
        for member, block in zip(members, blocks, strict=True):
            if block is not None and block.layout is not torch.strided:
                raise sparse_gradient(nodes[member], edge)
        sent = [b if b is None else b.to(m.dtype) for b, m in zip(blocks, metas, strict=True)]
        message = sent[0] if len(members) == 1 else packed(sent, metas)
        send(message, step=state.step, microbatch=microbatch)

    return send_block


def bind_add_block(
    plan: PartitionPlan,
    instruction: Instruction,
    sums: PartSums,
    owned: Mapping[int, torch.Tensor],
) -> Action:
    """Add a block to the sum of a parameter's gradient, where it lives; or those of several."""
    microbatch, first = instruction.microbatch, plan.in_first_lane(instruction.operand)
    blocks = plan.blocks[first]
    edge, size = blocks.edges[plan.lane_of(instruction.operand)], blocks.ends[microbatch]
    metas = [plan.block_meta(member) for member in blocks.members]
    members = [
        (member, str(plan.placed.graph.nodes[member].target), owned[member])
        for member in blocks.members
    ]

    def come(state: StepState) -> list[Gradient]:
        if edge is None:
            return [sums.take_block((member, microbatch)) for member in blocks.members]
        message = state.received[microbatch].pop(edge)
        if len(members) == 1 or message is None:
            return [message]
        return unpacked(message, metas)

    def add_block(state: StepState) -> None:
        start = state.microbatches.start if state.microbatches is not None else 0
        for (_, name, parameter), block in zip(members, come(state), strict=True):
            if any(getattr(parameter, table, None) for table in TENSOR_HOOKS):
                raise StepFailedError(
                    f"a hook was put on {name} after the first step, and replicas add parts of "
                    f"its gradient before the hook could see them\n"
                    f"  Fix: put hooks on parameters before the first step of a Model."
                )
            with sums.apart([parameter], start + microbatch + 1 - size, size):
                if block is not None:
                    accumulate(parameter, block.to(parameter.dtype), is_shared=False)

    return add_block


def packed(blocks: Sequence[Gradient], metas: Sequence[TensorMeta]) -> torch.Tensor:
    """Blocks as bytes, and for each whether there is one."""
    flags = torch.tensor([block is not None for block in blocks], dtype=torch.uint8)
    parts = [
        torch.zeros(meta.size_bytes, dtype=torch.uint8)
        if block is None
        else block.contiguous().reshape(-1).view(torch.uint8)
        for block, meta in zip(blocks, metas, strict=True)
    ]
    return torch.cat([*parts, flags])


def unpacked(message: torch.Tensor, metas: Sequence[TensorMeta]) -> list[Gradient]:
    """Blocks from bytes, each in memory of its own."""
    *parts, flags = message.split([*(meta.size_bytes for meta in metas), len(metas)])
    return [
        part.clone().view(meta.dtype).view(meta.static_shape) if is_there else None
        for part, meta, is_there in zip(parts, metas, flags.tolist(), strict=True)
    ]
