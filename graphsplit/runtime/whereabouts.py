"""Where a worker's program stands, in words and in parts; and where a step has failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphsplit.capture.graph import Node
from graphsplit.errors import StepFailedError
from graphsplit.frames import short_path
from graphsplit.partition.plan import EdgeKind, PartitionPlan
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.root_cause import Location

_COMPUTING = (
    Opcode.FORWARD,
    Opcode.BACKWARD,
    Opcode.BACKWARD_INPUT,
    Opcode.BACKWARD_WEIGHT,
)


def where(plan: PartitionPlan, program: Sequence[Instruction], step: int, position: int) -> str:
    """A position in words, for heartbeats and failures.

    Args:
        plan: The plan.
        program: The instructions.
        step: The step under way, or the last one, from 0; below 0 before the first.
        position: The instruction that runs; their number between steps.
    """
    if step < 0 or position >= len(program):
        done = step + 1  # callbacks count from 1 as well
        return f"between steps, after step {done}" if done else "before the first step"
    instruction = program[position]
    what = plan.placed.graph.mode.step
    return f"{what} {step + 1}, {instruction}{_about(plan, instruction)}"


def location(
    plan: PartitionPlan, program: Sequence[Instruction], step: int, position: int
) -> Location:
    """A position in parts; arguments as for ``where``."""
    if step < 0 or position >= len(program):
        return Location(step=step + 1 if step >= 0 else None)
    instruction = program[position]
    found = Location(step=step + 1, microbatch=instruction.microbatch, instruction=str(instruction))
    if instruction.opcode not in (Opcode.SEND, Opcode.RECEIVE):
        return found
    edge = plan.edges[instruction.operand]
    node = plan.placed.graph.nodes[edge.value]
    return replace(found, edge=edge.index, operation=node.name, module=node.module_path)


def _about(plan: PartitionPlan, instruction: Instruction) -> str:
    nodes = plan.placed.graph.nodes
    if instruction.opcode in (Opcode.SEND, Opcode.RECEIVE):
        edge = plan.edges[instruction.operand]
        node = nodes[edge.value]
        if edge.kind is EdgeKind.REDUCTION:
            return f" (reduction over gradients, worker {edge.source} -> worker {edge.destination})"
        return (
            f" ({edge.kind.value} of {node.name}, {node.module_path or 'network'}, "
            f"worker {edge.source} -> worker {edge.destination})"
        )
    if instruction.opcode in _COMPUTING:
        segment = plan.segments[instruction.operand]
        paths = dict.fromkeys(nodes[p].module_path or "network" for p in segment.nodes)
        return f" ({', '.join(list(paths)[:6])})"
    return ""


def step_failed(
    error: Exception, position: str, found: Location, nodes: Sequence[Node], node: Node | None
) -> StepFailedError:
    """The error of a step in which an instruction has raised.

    Args:
        error: What was raised.
        position: Where, in words.
        found: Where, in parts.
        nodes: The nodes of the plan's graph.
        node: The operation that raised it, if one has.
    """
    lines = [f"{type(error).__name__}: {error}", f"  at {position}"]
    if node is not None:
        lines.append(
            f"  operation {node.name} = {node.target}({node.arguments}), module "
            f"{node.module_path or '(network)'}"
        )
        operands = (str(nodes[r].meta) for r in node.reads)
        lines.append(f"  its operands: {', '.join(operands)}")
        lines.append(f"  {node.source or '(no line of your own code is involved)'}")
        found = replace(
            found,
            operation=node.name,
            module=node.module_path,
            source=short_path(node.source),
        )
    # The values decide over this one, so the code around may expect it.
    if isinstance(error, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        lines.append(
            "  Fix: a captured graph catches no errors; if the code around catches this one (to "
            "try again with jitter), keep that code whole with gs.opaque."
        )
    return StepFailedError("\n".join(lines), location=found)
