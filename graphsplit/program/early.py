"""Instructions that run inside a backward: the blocks of gradients behind it that others wait for.

A replica sends the blocks that its last microbatch completes. In the program they stand behind the
backward that makes them, but each needs few of its gradients, and autograd has those of the last
parameters long before it has all::

    program   BACKWARD                                   ACCUMULATE b, SEND b, ACCUMULATE a, SEND a
    as run    BACKWARD ... b is there ....... a is there
                           ACCUMULATE b       ACCUMULATE a
                           SEND b             SEND a

They run in the order of the program, none before the one in front of it. So a send waits for the
same messages of others as in the order that was proven: of those, backward gives and takes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphsplit.partition.checks.one_state import opaque_calls
from graphsplit.partition.plan import EdgeKind, PartitionPlan
from graphsplit.program.instruction import Instruction, Opcode

Needs = tuple[frozenset[int], ...]


def early_needs(plan: PartitionPlan, instructions: Sequence[Instruction]) -> Mapping[int, Needs]:
    """The instructions that can run inside a worker's backwards.

    Args:
        plan: The plan.
        instructions: The worker's program.

    Returns:
        By the position of a backward: of each instruction right behind it that can run inside, the
        contributions that it needs of this backward. The last one sends a block.
    """
    if not plan.blocks:
        return {}
    watched = {plan.segmentation.segment_of[position] for position, _ in opaque_calls(plan)}
    found: dict[int, Needs] = {}
    for position, instruction in enumerate(instructions):
        segment = instruction.operand
        if instruction.opcode is not Opcode.BACKWARD or segment in watched:
            continue
        needs = () if plan.io[segment].parameters else _behind(plan, instructions, position)
        if needs:
            found[position] = needs
    return found


def shares_sent(plan: PartitionPlan, instructions: Sequence[Instruction]) -> dict[int, float]:
    """By the position of a send inside a backward, the share of this that is done by then.

    As if all blocks took equally long to make.
    """
    found: dict[int, float] = {}
    for position, needs in early_needs(plan, instructions).items():
        behind = range(position + 1, position + 1 + len(needs))
        sends = [p for p in behind if instructions[p].opcode is Opcode.SEND]
        found.update((p, (number + 1) / len(sends)) for number, p in enumerate(sends))
    return found


def _behind(plan: PartitionPlan, instructions: Sequence[Instruction], position: int) -> Needs:
    made = frozenset(plan.io[instructions[position].operand].leaves)
    needs: list[frozenset[int]] = []
    length = 0
    for instruction in instructions[position + 1 :]:
        if instruction.opcode is Opcode.SEND:
            kind = plan.edges[instruction.operand].kind
            if kind not in (EdgeKind.BLOCK, EdgeKind.VALUE):
                break
            needs.append(frozenset())
            length = len(needs) if kind is EdgeKind.BLOCK else length
            continue
        read = _read_by_sum(plan, instruction)
        if read is None:
            break
        needs.append(made & read)
    return tuple(needs[:length])


def _read_by_sum(plan: PartitionPlan, instruction: Instruction) -> frozenset[int] | None:
    """The contributions that a sum of a block reads; None if it is none, or reads messages."""
    block = plan.blocks_of(instruction.operand)
    if instruction.opcode is not Opcode.ACCUMULATE or block is None:
        return None
    terms = [
        term
        for member in plan.members_of(instruction.operand)
        for term in block.terms.get(member) or plan.gradient_sums.get(member, ())
    ]
    read = [term.contribution for term in terms if term.contribution is not None]
    return frozenset(read) if len(read) == len(terms) else None
