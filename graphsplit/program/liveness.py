"""The values that a worker may forget after each instruction: nothing later reads them.

    RECEIVE mb0 edge3
    FORWARD mb0 seg2    frees mb0 v7     v7 came by edge3, and no other segment here reads it
    SEND mb0 edge5      frees mb0 v9     seg2 made v9, and this was its last receiver

What autograd holds is freed by the backward of its segment, and gradients are taken out where they
are summed or sent; so this is about the values of nodes alone. Without it they would be kept for
every microbatch until the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphsplit.partition.plan import Edge, EdgeKind, PartitionPlan
from graphsplit.partition.replicas.buffer_chains import kept_values
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import WorkerProgram

HeldValue = tuple[int, int]  # (microbatch, node)
GENERATOR = -1  # in the place of a node: the state of a microbatch's generator


def last_uses(plan: PartitionPlan, program: WorkerProgram) -> dict[int, tuple[HeldValue, ...]]:
    """The values that nothing reads any more once an instruction has run, by its position.

    Outputs of the graph are not among it: they are what a step is for.
    """
    uses = _Uses(plan, program.worker)
    latest: dict[HeldValue, int] = {}
    for position, instruction in enumerate(program.instructions):
        for held in uses.of(instruction):
            latest[held] = position
    found: dict[int, list[HeldValue]] = {}
    for held, position in latest.items():
        found.setdefault(position, []).append(held)
    return {position: tuple(held) for position, held in found.items()}


class _Uses:
    """The values that an instruction makes, receives or reads, of those held for a while."""

    def __init__(self, plan: PartitionPlan, worker: int) -> None:
        self._plan = plan
        self._worker = worker
        self._outputs = {o.node for o in plan.placed.graph.outputs if o.node is not None}
        # By segment: nodes that are held once per microbatch, and once per step.
        self._reads: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def of(self, instruction: Instruction) -> Iterator[HeldValue]:
        microbatch, operand = instruction.microbatch, instruction.operand
        if instruction.opcode is Opcode.FORWARD:
            each, once = self._of_segment(operand)
            yield from ((microbatch, value) for value in each)
            yield from ((0, value) for value in once)
        elif instruction.opcode is Opcode.FOLD:
            first = self._plan.in_first_lane(operand)
            for value in kept_values(self._plan, self._plan.chains[first]):
                if self._is_held(value + operand - first):
                    yield microbatch, value + operand - first
        elif instruction.opcode in (Opcode.SEND, Opcode.RECEIVE):
            edge = self._plan.edges[operand]
            if self._is_freed(edge):
                is_state = edge.kind is EdgeKind.GENERATOR
                held = (GENERATOR,) if is_state else edge.values
                yield from ((microbatch, value) for value in held)

    def _is_freed(self, edge: Edge) -> bool:
        if edge.kind is EdgeKind.GENERATOR:
            return self._plan.is_microbatched
        return edge.kind is EdgeKind.VALUE and self._is_held(edge.value)

    def _of_segment(self, segment: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if segment not in self._reads:
            io = self._plan.io[segment]
            leaves = (self._plan.contributions[c].value for c in io.leaves)
            values = dict.fromkeys(
                v for v in (*io.values, *leaves, *io.outputs) if self._is_held(v)
            )
            once = tuple(v for v in values if is_held_once(self._plan, v))
            each = tuple(v for v in values if v not in once)
            if io.is_random and self._plan.is_microbatched:
                each = (*each, GENERATOR)
            self._reads[segment] = each, once
        return self._reads[segment]

    def _is_held(self, value: int) -> bool:
        """Whether it is kept for a while: no output, nor what the worker always has."""
        node = self._plan.placed.graph.nodes[value]
        is_own = node.is_state and self._plan.placed.workers[value] == self._worker
        is_output = self._plan.in_first_lane(value) in self._outputs
        return not (is_own or node.is_everywhere or is_output)


def is_held_once(plan: PartitionPlan, value: int) -> bool:
    """Whether a worker holds one value for all microbatches, under the first one's number.

    That is borrowed state which no operation modifies.
    """
    graph = plan.placed.graph
    return graph.nodes[value].is_state and value not in graph.modified
