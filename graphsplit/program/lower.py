"""Lower a partition plan to one program per worker, in the order that a schedule gives.

A schedule orders compute only. Lowering adds what follows from it: every receive stands right
before the first instruction that needs it, every send right after the one that makes its value.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphsplit.capture.graph import Mode
from graphsplit.partition.plan import Edge, EdgeKind, Exchange, PartitionPlan, SumTerm
from graphsplit.program.instruction import Instruction, Opcode

# A policy gives, for a number of microbatches and every worker, the FORWARD, BACKWARD, ACCUMULATE,
# ADD_BLOCK and FOLD instructions in the order to run them; BACKWARD_INPUT and BACKWARD_WEIGHT for
# BACKWARD where the plan allows it. `schedule.orders` checks what it gives.
Policy = Callable[[PartitionPlan, int], Sequence[Sequence[Instruction]]]


class StepPart(NamedTuple):
    """Which part of a step some programs run: a whole batch, or some of its microbatches.

    Attributes:
        num_microbatches: How many microbatches.
        first: Whether they begin the step: gradients are set to None.
        last: Whether they end it: the optimizer steps.
        is_microbatched: Whether the batch was split, if only into one. False where a microbatch
            runs like a whole batch, one after the other, for what their code shares.
        adds_up: Whether they end a batch whose parts of gradients were kept apart.
        start: The number of the first of them in the batch, where replicas share it.
        num_parts: How many microbatches replicas share: all of the batch; 0: these alone.
        exchange: When they exchange parts of gradients.
    """

    num_microbatches: int = 1
    first: bool = True
    last: bool = True
    is_microbatched: bool = False
    adds_up: bool = False
    start: int = 0
    num_parts: int = 0
    exchange: Exchange = Exchange.BESIDE

    @property
    def parts(self) -> range:
        """The microbatches by their numbers in the batch."""
        return range(self.start, self.start + self.num_microbatches)

    @property
    def shared(self) -> range:
        """The microbatches by their numbers among those that replicas share.

        Below 0 behind others of the batch: of these the first replicas have had more.
        """
        if self.num_parts:
            return self.parts
        return range(-self.num_microbatches, 0) if self.start else range(self.num_microbatches)


WHOLE_STEP = StepPart()


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
    plan: PartitionPlan,
    policy: Policy,
    *,
    num_microbatches: int = 1,
    first: bool = True,
    last: bool = True,
    adds_up: bool = False,
) -> tuple[WorkerProgram, ...]:
    """Lower a plan to one program per worker.

    Args:
        plan: The plan.
        policy: Orders the compute.
        num_microbatches: How many microbatches the programs run.
        first: Whether they begin the step: gradients are set to None.
        last: Whether they end it: the optimizer steps.
        adds_up: Whether they end a batch whose parts of gradients were kept apart.
    """
    part = StepPart(num_microbatches, first, last, adds_up=adds_up)
    common = _Common(plan, PlanTraffic(plan), late_edges(plan), part)
    return tuple(
        WorkerProgram(worker, num_microbatches, tuple(_Lowering(common, worker).run(compute)))
        for worker, compute in enumerate(policy(plan, num_microbatches))
    )


@dataclass(frozen=True)
class _Common:
    """The tables that the lowering of all workers has in common."""

    plan: PartitionPlan
    traffic: PlanTraffic
    late: frozenset[int]
    part: StepPart


class _Lowering:
    """Adds communication around one worker's compute."""

    def __init__(self, common: _Common, worker: int) -> None:
        self.common = common
        self.plan = plan = common.plan
        self.traffic = traffic = common.traffic
        self.worker = worker
        self.microbatches = range(common.part.num_microbatches)
        self.out: list[Instruction] = []
        # By message: edge * microbatches + microbatch. Integers: there may be millions.
        self.done: set[int] = set()  # received or sent
        self.contributed: Counter[int] = Counter()  # how many contributions there are
        self.late: list[list[Edge]] = [[] for _ in self.microbatches]  # made, and not yet sent
        self.incoming = traffic.incoming[worker]
        self.outgoing = traffic.outgoing[worker]
        self.is_training = plan.placed.graph.mode is Mode.TRAIN

    def run(self, compute: Sequence[Instruction]) -> list[Instruction]:
        if self.is_training and self.common.part.first:
            self.out.append(Instruction(Opcode.ZERO_GRADIENTS))
        self._send_state()
        is_call = self.plan.placed.graph.mode.keeps_outputs_home
        if is_call:  # its backward comes when the script asks for it
            compute = sorted(compute, key=lambda i: i.opcode is not Opcode.FORWARD)
        for instruction in compute:
            if is_call and instruction.opcode is not Opcode.FORWARD:
                self._end_forward()
            if instruction.opcode is Opcode.FORWARD:
                self._forward(instruction)
            elif instruction.opcode is Opcode.ACCUMULATE:
                self._receive_terms(
                    self.plan.gradient_sums[instruction.operand], instruction.microbatch
                )
                self.out.append(instruction)
                self._move_block(instruction, Opcode.SEND)
            elif instruction.opcode is Opcode.ADD_BLOCK:
                self._move_block(instruction, Opcode.RECEIVE)
                self.out.append(instruction)
            elif instruction.opcode is Opcode.FOLD:
                self._fold(instruction)
            else:
                self._backward(instruction)
        self._finish()
        return self.out

    def _move(self, edge: Edge, microbatch: int, opcode: Opcode) -> None:
        microbatch = 0 if edge.per_step else microbatch
        message = self._message(edge, microbatch)
        if message not in self.done:
            self.done.add(message)
            self.out.append(Instruction(opcode, edge.index, microbatch))

    def _message(self, edge: Edge, microbatch: int) -> int:
        return edge.index * len(self.microbatches) + microbatch

    def _send_state(self) -> None:
        """Borrowed parameters and buffers: their owner has them before anything runs.

        They go in the order of their first use: others begin with what has come.
        What an operation modifies has another value for each microbatch, once the one before it
        has run; see ``_forward``.
        """
        nodes, first_use = self.plan.placed.graph.nodes, self.traffic.first_use
        for edge in sorted(self.outgoing, key=lambda edge: first_use.get(edge.index, 0)):
            if edge.kind is EdgeKind.VALUE and nodes[edge.value].is_state:
                self._move(edge, 0, Opcode.SEND)
        for chain in self.plan.chains.values():
            first = chain.edges[0]
            if first is not None and chain.owner == self.worker:
                self._move(self.plan.edges[first], 0, Opcode.SEND)

    def _move_block(self, instruction: Instruction, opcode: Opcode) -> None:
        """A block of parts of a gradient goes to the parameter's owner once its last part is in."""
        block = self.plan.blocks_of(instruction.operand)
        is_later = self.plan.exchange is Exchange.LATER
        if block is None or is_later or instruction.microbatch not in block.ends:
            return
        edge = block.edges[self.plan.lane_of(instruction.operand)]
        if edge is not None:
            self._move(self.plan.edges[edge], instruction.microbatch, opcode)

    def _fold(self, instruction: Instruction) -> None:
        """The buffers come before their worker's first microbatch of a lane, and go on after it."""
        lane = self.plan.lane_of(instruction.operand)
        chain = self.plan.chains[self.plan.in_first_lane(instruction.operand)]
        here = self.plan.lanes[lane] if self.plan.lanes else self.microbatches
        before, after = chain.edges[lane : lane + 2]
        if before is not None and instruction.microbatch == here[0]:
            self._move(self.plan.edges[before], 0, Opcode.RECEIVE)
        self.out.append(instruction)
        if after is not None and instruction.microbatch == here[-1]:
            self._move(self.plan.edges[after], 0, Opcode.SEND)

    def _forward(self, instruction: Instruction) -> None:
        segment, microbatch = instruction.operand, instruction.microbatch
        for edge in self.traffic.awaited[segment]:
            self._move(edge, microbatch, Opcode.RECEIVE)
        self.out.append(instruction)
        for edge in self.traffic.made[segment]:
            if self._is_late(edge):
                self.late[microbatch].append(edge)
            else:
                self._move(edge, microbatch, Opcode.SEND)
        if microbatch + 1 in self.microbatches:
            for edge in self.traffic.modified[segment]:
                self._move(edge, microbatch + 1, Opcode.SEND)

    def _is_late(self, edge: Edge) -> bool:
        """Whether only the end of the step needs it: outputs and the generator's last state.

        They go out right after the microbatch's next gradients, which others wait for. Not later:
        who receives them could not begin its next step while this worker computes the rest.
        """
        return self.is_training and edge.index in self.common.late

    def _backward(self, instruction: Instruction) -> None:
        segment, microbatch = instruction.operand, instruction.microbatch
        io = self.plan.io[segment]
        if instruction.opcode is not Opcode.BACKWARD_WEIGHT:
            sums = [self.plan.gradient_sums.get(root, ()) for root in io.roots]
            sums += [self.plan.seeds.get(leaf, ()) for leaf in io.leaves]
            self._receive_terms(itertools.chain.from_iterable(sums), microbatch)
        self.out.append(instruction)
        made = made_leaves(self.plan, instruction)
        carriers = [self.traffic.carrier[c] for c in made if c in self.traffic.carrier]
        for edge in sorted(carriers, key=lambda edge: edge.index):
            message = self._message(edge, microbatch)
            self.contributed[message] += 1
            if self.contributed[message] == len(edge.contributions):
                self._move(edge, microbatch, Opcode.SEND)
        for edge in self.late[microbatch]:
            self._move(edge, microbatch, Opcode.SEND)
        self.late[microbatch] = []

    def _finish(self) -> None:
        for microbatch in self.microbatches:
            for edge in self._edges_in(microbatch, self.outgoing):
                if edge.kind not in (EdgeKind.REDUCTION, EdgeKind.BLOCK):
                    self._move(edge, microbatch, Opcode.SEND)
        if self.is_training and self.common.part.adds_up:
            self.out.append(Instruction(Opcode.ADD_UP))
        if self.is_training and self.common.part.last:
            self._receive_generators()
            self._share_reduction()
            self.out.append(Instruction(Opcode.OPTIMIZER))
        for microbatch in self.microbatches:
            for edge in self._edges_in(microbatch, self.incoming):
                if edge.kind is not EdgeKind.BLOCK:
                    self._move(edge, microbatch, Opcode.RECEIVE)

    def _receive_generators(self) -> None:
        """Before the optimizer: a callback that is shown the gradients may draw."""
        for microbatch in self.microbatches:
            for edge in self._edges_in(microbatch, self.incoming):
                if edge.kind in (EdgeKind.GENERATOR, EdgeKind.PROCESS_GENERATORS):
                    self._move(edge, microbatch, Opcode.RECEIVE)

    def _edges_in(self, microbatch: int, edges: Sequence[Edge]) -> Iterator[Edge]:
        """The edges that a microbatch uses."""
        return (edge for edge in edges if self.plan.is_in(microbatch, edge.value))

    def _end_forward(self) -> None:
        """All that forward sends and receives, before the first backward of a call."""
        for edges, opcode in ((self.outgoing, Opcode.SEND), (self.incoming, Opcode.RECEIVE)):
            for edge in edges:
                if edge.kind is not EdgeKind.GRADIENT:
                    self._move(edge, 0, opcode)

    def _share_reduction(self) -> None:
        """Parts to the root, then the whole to everybody; see ``partition.shared_norms``."""
        reduction = self.plan.reduction
        if reduction is None:
            return
        outgoing = [edge for edge in self.outgoing if edge.kind is EdgeKind.REDUCTION]
        incoming = [edge for edge in self.incoming if edge.kind is EdgeKind.REDUCTION]
        moves = [(edge, Opcode.SEND) for edge in outgoing]
        received = [(edge, Opcode.RECEIVE) for edge in incoming]
        self.out.append(Instruction(Opcode.REDUCE))
        for edge, opcode in received + moves if self.worker == reduction.root else moves + received:
            self._move(edge, 0, opcode)
        self.out.append(Instruction(Opcode.CLIP))

    def _receive_terms(self, terms: Iterable[SumTerm], microbatch: int) -> None:
        for term in terms:
            if term.edge is not None:
                self._move(self.plan.edges[term.edge], microbatch, Opcode.RECEIVE)


def made_leaves(plan: PartitionPlan, instruction: Instruction) -> tuple[int, ...]:
    """The contributions whose gradients a backward instruction makes."""
    leaves = plan.io[instruction.operand].leaves
    if instruction.opcode is Opcode.BACKWARD:
        return leaves
    later = plan.splits[instruction.operand].leaves
    return (
        later
        if instruction.opcode is Opcode.BACKWARD_WEIGHT
        else tuple(leaf for leaf in leaves if leaf not in later)
    )


def first_of_backward(plan: PartitionPlan, program: WorkerProgram) -> int:
    """Where the backward of a call begins: before it, all that forward moves has been moved."""
    instructions = program.instructions
    for position in reversed(range(len(instructions))):
        one = instructions[position]
        is_move = one.opcode in (Opcode.SEND, Opcode.RECEIVE)
        is_forwards = is_move and plan.edges[one.operand].kind is not EdgeKind.GRADIENT
        if one.opcode is Opcode.FORWARD or is_forwards:
            return position + 1
    return 0


def late_edges(plan: PartitionPlan) -> frozenset[int]:
    """Edges that no segment of their destination waits for."""
    waiting: set[tuple[EdgeKind, int, int]] = set()
    for segment, io in zip(plan.segments, plan.io, strict=True):
        for value in (*io.values, *(plan.contributions[c].value for c in io.leaves)):
            waiting.add((EdgeKind.VALUE, value, segment.worker))
    workers = plan.placed.workers
    for before, after in plan.random_hops:
        waiting.add((EdgeKind.GENERATOR, before, workers[after]))
    return frozenset(
        edge.index
        for edge in plan.edges
        if edge.kind is not EdgeKind.GRADIENT
        and all((edge.kind, value, edge.destination) not in waiting for value in edge.values)
    )


# Which edges a worker's computations wait for and feed, looked up once for the whole plan.


class PlanTraffic:
    """The edges of a plan by those who need them. Edges stand in the order of their indices.

    Attributes:
        incoming: What each worker receives.
        outgoing: What each worker sends.
        awaited: For each segment, the edges it cannot run forward without.
        made: For each segment, the edges whose values it makes: forward values and generator
            states.
        modified: For each segment that is the last to modify borrowed state, that state's edges.
        carrier: For each contribution that is sent, the gradient edge that carries it.
        first_use: For each edge that segments await, the lowest level of them.
    """

    def __init__(self, plan: PartitionPlan) -> None:
        segment_of = plan.segmentation.segment_of
        self.incoming: list[list[Edge]] = [[] for _ in range(plan.num_workers)]
        self.outgoing: list[list[Edge]] = [[] for _ in range(plan.num_workers)]
        self.made: list[list[Edge]] = [[] for _ in plan.segments]
        self.carrier: dict[int, Edge] = {}
        for edge in plan.edges:
            self.incoming[edge.destination].append(edge)
            self.outgoing[edge.source].append(edge)
            if edge.kind is EdgeKind.GRADIENT:
                self.carrier.update(dict.fromkeys(edge.contributions, edge))
            elif edge.kind is not EdgeKind.REDUCTION and segment_of[edge.value] >= 0:
                self.made[segment_of[edge.value]].append(edge)
        self.awaited = _awaited(plan)
        self.first_use: dict[int, int] = {}
        for segment, edges in zip(plan.segments, self.awaited, strict=True):
            for edge in edges:
                level = self.first_use.get(edge.index, segment.level)
                self.first_use[edge.index] = min(level, segment.level)
        self.modified = _modified(plan)


def _awaited(plan: PartitionPlan) -> list[Sequence[Edge]]:
    segment_of = plan.segmentation.segment_of
    values: dict[tuple[int, int], Edge] = {}
    states: dict[tuple[int, int], list[Edge]] = {}  # by the segment that drew, and destination
    for edge in plan.edges:
        if edge.kind is EdgeKind.VALUE:
            values.update(((value, edge.destination), edge) for value in edge.values)
        elif edge.kind is EdgeKind.GENERATOR:
            states.setdefault((segment_of[edge.value], edge.destination), []).append(edge)
    drew_before = _previous_random_segment(plan)
    found: list[Sequence[Edge]] = []
    for segment, io in zip(plan.segments, plan.io, strict=True):
        reads = {*io.values, *(plan.contributions[c].value for c in io.leaves)}
        edges = [values[v, segment.worker] for v in reads if (v, segment.worker) in values]
        edges += states.get((drew_before.get(segment.index, -1), segment.worker), [])
        found.append(sorted(edges, key=lambda edge: edge.index))
    return found


def _previous_random_segment(plan: PartitionPlan) -> dict[int, int]:
    """For each segment that draws, the segment that drew last before it."""
    segment_of = plan.segmentation.segment_of
    hops = ((segment_of[before], segment_of[after]) for before, after in plan.random_hops)
    return {later: earlier for earlier, later in hops if earlier != later}


def _modified(plan: PartitionPlan) -> list[list[Edge]]:
    nodes, segment_of = plan.placed.graph.nodes, plan.segmentation.segment_of
    last: dict[int, int] = {}  # segments are numbered by rising level
    for position, node in enumerate(nodes):
        if node.changes_inputs:
            for shared, _ in node.shares_modified:
                last[shared] = max(last.get(shared, -1), segment_of[position])
    found: list[list[Edge]] = [[] for _ in plan.segments]
    for edge in plan.edges:
        is_borrowed = edge.kind is EdgeKind.VALUE and nodes[edge.value].is_state
        if is_borrowed and not edge.per_step:
            found[last[edge.value]].append(edge)
    return found
