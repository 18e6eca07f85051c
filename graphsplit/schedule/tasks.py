"""The computations of a step, and which of them each waits for."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from graphsplit.partition.plan import Exchange, PartitionPlan
from graphsplit.partition.replicas.blocks import distances
from graphsplit.partition.replicas.buffer_chains import sources_of
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.schedule.dependencies import Dependencies

# Computations of a value, not of a segment; they wait for those of other lanes.
BETWEEN_LANES = (Opcode.ACCUMULATE, Opcode.ADD_BLOCK, Opcode.FOLD)
Task = tuple[Opcode, int]  # what to do with which segment or value, in every microbatch


class Tasks:
    """The computations of one microbatch.

    Args:
        plan: The plan.
        split: The segments whose backward is run in two parts.

    Attributes:
        waits: For each task, the tasks it waits for, each with the distance in microbatches: 0 for
            the same one, 1 for the one before.
    """

    def __init__(self, plan: PartitionPlan, split: Collection[int] = ()) -> None:
        self.plan = plan
        self.split = frozenset(split)
        self.waits: dict[Task, list[tuple[Task, int]]] = {}
        self._collect(Dependencies.of(plan))

    def is_in(self, microbatch: int, task: Task) -> bool:
        """Whether a microbatch has a task: its lane does it."""
        opcode, operand = task
        if opcode not in BETWEEN_LANES:
            operand = self.plan.segments[operand].nodes[0]
        is_there = microbatch >= 0 and self.plan.is_in(microbatch, operand)
        if opcode is not Opcode.ADD_BLOCK or not is_there:
            return is_there
        block = self.plan.blocks_of(operand)
        return block is not None and microbatch in block.ends

    def _collect(self, dependencies: Dependencies) -> None:
        waits = self.waits
        for index, before in enumerate(dependencies.forward):
            task = (Opcode.FORWARD, index)
            waits[task] = [(task, 1), *(((Opcode.FORWARD, other), 0) for other in before)]
        for index, following in enumerate(dependencies.backward):
            if following is None:
                continue
            task = self.backward(index)
            waits[task] = [(task, 1), ((Opcode.FORWARD, index), 0)]
            waits[task] += [(self.backward(other), 0) for other in following]
            if index in self.split:
                later = (Opcode.BACKWARD_WEIGHT, index)
                waits[later] = [(later, 1), (task, 0)]
        for value, segments in dependencies.accumulate.items():
            task = (Opcode.ACCUMULATE, value)
            makers = (self._makes_term(s, v) for s in segments for v in self.plan.members_of(value))
            waits[task] = [(task, 1), *((maker, 0) for maker in dict.fromkeys(makers))]
            in_lane_before = value - self.plan.num_values
            if in_lane_before >= 0 and self.plan.blocks_of(value) is None:
                waits[task].append(((Opcode.ACCUMULATE, in_lane_before), 1))
        self._collect_blocks()
        self._collect_buffer_updates()
        for earlier, later_one in dependencies.next_microbatch:
            waits[Opcode.FORWARD, later_one].append(((Opcode.FORWARD, earlier), 1))

    def _collect_blocks(self) -> None:
        """A parameter's owner adds the blocks of all lanes in the order of their parts."""
        blocks = self.plan.blocks if self.plan.exchange is not Exchange.LATER else {}
        for first, block in blocks.items():
            apart = sorted(distances(list(block.ends)))
            for lane in range(len(block.workers)):
                value = first + lane * self.plan.num_values
                task = (Opcode.ADD_BLOCK, value)
                self.waits[task] = [((Opcode.ACCUMULATE, value), 0), *((task, n) for n in apart)]
                if lane:
                    before = (Opcode.ADD_BLOCK, value - self.plan.num_values)
                    self.waits[task] += [(before, number) for number in apart]

    def _collect_buffer_updates(self) -> None:
        """Into buffers microbatches are folded in order, each once backward has come past.

        A fold may write to values of forward once more, which autograd would take for a change.
        """
        for first, chain in self.plan.chains.items():
            for lane in range(len(chain.workers)):
                task = (Opcode.FOLD, first + lane * self.plan.num_values)
                sources = sorted(sources_of(self.plan, chain, lane))
                passes = ((self.backward(s), (Opcode.FORWARD, s)) for s in sources)
                done = (back if back in self.waits else forward for back, forward in passes)
                self.waits[task] = [(task, 1), *((one, 0) for one in done)]
                if lane:
                    self.waits[task].append(((Opcode.FOLD, task[1] - self.plan.num_values), 1))

    def backward(self, segment: int) -> Task:
        """The task that makes the gradients that other segments wait for."""
        is_split = segment in self.split
        return (Opcode.BACKWARD_INPUT if is_split else Opcode.BACKWARD), segment

    def _makes_term(self, segment: int, value: int) -> Task:
        if segment in self.split:
            leaves = self.plan.splits[segment].leaves
            if any(self.plan.contributions[leaf].value == value for leaf in leaves):
                return Opcode.BACKWARD_WEIGHT, segment
        return self.backward(segment)

    def worker_of(self, task: Task) -> int:
        """The worker that does it."""
        opcode, operand = task
        if opcode is Opcode.ACCUMULATE:
            return self.plan.worker_of_sum(operand)
        if opcode is Opcode.ADD_BLOCK:
            return self.plan.placed.workers[operand]
        if opcode is Opcode.FOLD:
            chain = self.plan.chains[self.plan.in_first_lane(operand)]
            return chain.workers[self.plan.lane_of(operand)]
        return self.plan.segments[operand].worker

    def late(self) -> frozenset[Task]:
        """The sums between lanes that wait for what others make, themselves or for each other.

        No forward and no backward waits for them.
        """
        found: set[Task] = set()
        sums = (task for task in self.waits if task[0] in BETWEEN_LANES and self.plan.lanes)
        for task in sorted(sums, key=lambda task: (task[1], BETWEEN_LANES.index(task[0]))):
            worker = self.worker_of(task)
            waits = (earlier for earlier, _ in self.waits[task])
            if any(self.worker_of(one) != worker or one in found for one in waits):
                found.add(task)
        return frozenset(found)

    def followers(self) -> dict[Task, list[tuple[Task, int]]]:
        """For each task, the tasks that wait for it, each with the distance in microbatches."""
        found: dict[Task, list[tuple[Task, int]]] = {}
        for task, waits in self.waits.items():
            for earlier, distance in waits:
                found.setdefault(earlier, []).append((task, distance))
        return found

    def instructions(self, num_microbatches: int) -> Iterator[tuple[Instruction, int]]:
        """Every computation of a step, with the number of those that it waits for."""
        for task, waits in self.waits.items():
            for microbatch in range(num_microbatches):
                if self.is_in(microbatch, task):
                    found = sum(self.is_in(microbatch - back, other) for other, back in waits)
                    yield Instruction(*task, microbatch), found
