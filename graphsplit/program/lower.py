"""Lower a partition plan to one program per worker, in the order that a schedule gives.

A schedule orders compute only. Lowering adds what follows from it: every receive stands right
before the first instruction that needs it, every send right after the one that makes its value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphsplit.capture.graph import Mode
from graphsplit.partition.plan import Edge, EdgeKind, PartitionPlan
from graphsplit.program.instruction import Instruction, Opcode

# A policy gives, for one worker, its FORWARD and BACKWARD instructions in the order to run them.
Policy = Callable[[PartitionPlan, int, int], Sequence[Instruction]]


@dataclass(frozen=True)
class WorkerProgram:
    """All that one worker does in one step, in order."""

    worker: int
    num_microbatches: int
    instructions: tuple[Instruction, ...]

    def describe(self) -> str:
        """The program as text, one instruction per line."""
        lines = [f"program worker {self.worker}, {self.num_microbatches} microbatch(es)"]
        return "\n".join(lines + [f"  {i}" for i in self.instructions])


def describe_programs(programs: Sequence[WorkerProgram]) -> str:
    """All programs, worker by worker."""
    return "\n".join(program.describe() for program in programs)


def lower(
    plan: PartitionPlan, policy: Policy, *, num_microbatches: int = 1
) -> tuple[WorkerProgram, ...]:
    """Lower a plan to one program per worker."""
    return tuple(
        WorkerProgram(
            worker,
            num_microbatches,
            tuple(
                _Lowering(plan, worker, num_microbatches).run(
                    policy(plan, worker, num_microbatches)
                )
            ),
        )
        for worker in range(plan.num_workers)
    )


class _Lowering:
    """Adds communication around one worker's compute."""

    def __init__(self, plan: PartitionPlan, worker: int, num_microbatches: int) -> None:
        self.plan = plan
        self.worker = worker
        self.microbatches = range(num_microbatches)
        self.out: list[Instruction] = []
        self.done: set[tuple[int, int]] = set()  # (edge, microbatch) received or sent
        self.contributed: set[tuple[int, int]] = set()  # (contribution, microbatch)
        self.incoming = [e for e in plan.edges if e.destination == worker]
        self.outgoing = [e for e in plan.edges if e.source == worker]
        self.is_training = plan.placed.graph.mode is Mode.TRAIN
        self.random_after = _previous_random_segment(plan)

    def run(self, compute: Sequence[Instruction]) -> list[Instruction]:
        if self.is_training:
            self.out.append(Instruction(Opcode.ZERO_GRADIENTS))
        self._send_state()
        for instruction in compute:
            if instruction.opcode is Opcode.FORWARD:
                self._forward(instruction)
            else:
                self._backward(instruction)
        self._finish()
        return self.out

    def _move(self, edge: Edge, microbatch: int, opcode: Opcode) -> None:
        microbatch = 0 if edge.per_step else microbatch
        if (edge.index, microbatch) not in self.done:
            self.done.add((edge.index, microbatch))
            self.out.append(Instruction(opcode, edge.index, microbatch))

    def _send_state(self) -> None:
        """Borrowed parameters and buffers: their owner has them before anything runs."""
        nodes = self.plan.placed.graph.nodes
        for microbatch in self.microbatches:
            for edge in self.outgoing:
                if edge.kind is EdgeKind.VALUE and nodes[edge.value].is_state:
                    self._move(edge, microbatch, Opcode.SEND)

    def _forward(self, instruction: Instruction) -> None:
        segment, microbatch = instruction.operand, instruction.microbatch
        io = self.plan.io[segment]
        reads = {*io.values, *(self.plan.contributions[c].value for c in io.leaves)}
        for edge in self.incoming:
            needed = edge.kind is EdgeKind.VALUE and edge.value in reads
            if edge.kind is EdgeKind.GENERATOR and segment in self.random_after:
                before = self.random_after[segment]
                needed = self.plan.segmentation.segment_of[edge.value] == before
            if needed:
                self._move(edge, microbatch, Opcode.RECEIVE)
        self.out.append(instruction)
        for edge in self.outgoing:
            made_here = self.plan.segmentation.segment_of[edge.value] == segment
            if made_here and edge.kind is not EdgeKind.GRADIENT and not self._is_late(edge):
                self._move(edge, microbatch, Opcode.SEND)

    def _is_late(self, edge: Edge) -> bool:
        """Whether only the end of the step needs it: outputs and the generator's last state.

        They go out after the gradients, which others wait for.
        """
        return self.is_training and edge.index in self._late_edges

    @property
    def _late_edges(self) -> frozenset[int]:
        if not hasattr(self, "_late"):
            self._late = late_edges(self.plan)
        return self._late

    def _backward(self, instruction: Instruction) -> None:
        segment, microbatch = instruction.operand, instruction.microbatch
        io = self.plan.io[segment]
        sums = [self.plan.folds.get(root, ()) for root in io.roots]
        sums += [self.plan.seeds.get(leaf, ()) for leaf in io.leaves]
        for term in itertools.chain.from_iterable(sums):
            if term.edge is not None:
                self._move(self.plan.edges[term.edge], microbatch, Opcode.RECEIVE)
        self.out.append(instruction)
        self.contributed.update((c, microbatch) for c in self.plan.io[segment].leaves)
        for edge in self.outgoing:
            if edge.kind is EdgeKind.GRADIENT and all(
                (c, microbatch) in self.contributed for c in edge.contributions
            ):
                self._move(edge, microbatch, Opcode.SEND)

    def _finish(self) -> None:
        if self.plan.placed.graph.has_gradients:
            self._accumulate_shared_parameters()
        for microbatch in self.microbatches:
            for edge in self.outgoing:
                self._move(edge, microbatch, Opcode.SEND)
        if self.is_training:
            self.out.append(Instruction(Opcode.OPTIMIZER))
        for microbatch in self.microbatches:
            for edge in self.incoming:
                self._move(edge, microbatch, Opcode.RECEIVE)

    def _accumulate_shared_parameters(self) -> None:
        placed = self.plan.placed
        for microbatch in self.microbatches:
            for value, terms in self.plan.folds.items():
                if placed.graph.nodes[value].is_state and placed.workers[value] == self.worker:
                    for term in terms:
                        if term.edge is not None:
                            self._move(self.plan.edges[term.edge], microbatch, Opcode.RECEIVE)
                    self.out.append(Instruction(Opcode.ACCUMULATE, value, microbatch))


def late_edges(plan: PartitionPlan) -> frozenset[int]:
    """Edges that no segment of their destination waits for."""
    waiting: set[tuple[EdgeKind, int, int]] = set()
    for segment, io in zip(plan.segments, plan.io, strict=True):
        for value in (*io.values, *(plan.contributions[c].value for c in io.leaves)):
            waiting.add((EdgeKind.VALUE, value, segment.worker))
    chain = plan.segmentation.random_chain
    workers = plan.placed.workers
    for before, after in itertools.pairwise(chain):
        waiting.add((EdgeKind.GENERATOR, before, workers[after]))
    return frozenset(
        edge.index
        for edge in plan.edges
        if edge.kind is not EdgeKind.GRADIENT
        and (edge.kind, edge.value, edge.destination) not in waiting
    )


def _previous_random_segment(plan: PartitionPlan) -> dict[int, int]:
    """For each segment that draws, the segment that drew last before it."""
    segment_of = plan.segmentation.segment_of
    order = [segment_of[p] for p in plan.segmentation.random_chain]
    return {later: earlier for earlier, later in itertools.pairwise(order) if earlier != later}
