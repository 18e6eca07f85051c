"""Instructions in words: what a person sees of them in a picture."""

from __future__ import annotations

from graphsplit.partition.dump import human_bytes
from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction, Opcode

BETWEEN = "between steps"
_MOVES = (Opcode.SEND, Opcode.RECEIVE)
_MAX_PATHS = 4


def title(plan: PartitionPlan, instruction: Instruction | None) -> str:
    """An instruction and what it is about, in one line."""
    if instruction is None:
        return f"{BETWEEN}: batches, tickets, callbacks"
    if instruction.opcode in _MOVES:
        edge = plan.edges[instruction.operand]
        name = plan.placed.graph.nodes[edge.value].name
        return (
            f"{instruction}: {edge.kind.value} of {name}, worker {edge.source} -> worker "
            f"{edge.destination}, {human_bytes(edge.meta.size_bytes)}"
        )
    if 0 <= instruction.operand < len(plan.segments) and is_of_segment(instruction):
        nodes = plan.placed.graph.nodes
        positions = plan.segments[instruction.operand].nodes
        paths = list(dict.fromkeys(nodes[p].module_path or "network" for p in positions))
        more = f" and {len(paths) - _MAX_PATHS} more" if len(paths) > _MAX_PATHS else ""
        return f"{instruction}: {', '.join(paths[:_MAX_PATHS])}{more}"
    return str(instruction)


def is_of_segment(instruction: Instruction) -> bool:
    """Whether its operand is a segment."""
    return " seg" in str(instruction)


def is_move(instruction: Instruction | None) -> bool:
    """Whether it sends or receives."""
    return instruction is not None and instruction.opcode in _MOVES


def initials(instruction: Instruction | None) -> str:
    """The shortest name that tells it from others: ``F3``, ``B3``, ``BW3``, ``O``."""
    if instruction is None:
        return ""
    letters = "".join(word[0] for word in instruction.opcode.value.split("_"))
    return f"{letters}{instruction.microbatch}" if is_of_segment(instruction) else letters
