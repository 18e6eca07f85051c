"""The computations of a step, and which of them each waits for."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.schedule.dependencies import Dependencies

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

    @property
    def _num_values(self) -> int:
        """How many values a lane has."""
        return len(self.plan.placed.graph.nodes) // max(1, len(self.plan.lanes))

    def is_in(self, microbatch: int, task: Task) -> bool:
        """Whether a microbatch has a task: its lane does it."""
        opcode, operand = task
        if opcode is not Opcode.ACCUMULATE:
            operand = self.plan.segments[operand].nodes[0]
        return microbatch >= 0 and self.plan.is_in(microbatch, operand)

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
            waits[task] = [(task, 1), *((self._makes_term(s, value), 0) for s in segments)]
            in_lane_before = value - self._num_values
            if in_lane_before >= 0:
                waits[task].append(((Opcode.ACCUMULATE, in_lane_before), 1))
        for earlier, later_one in dependencies.next_microbatch:
            waits[Opcode.FORWARD, later_one].append(((Opcode.FORWARD, earlier), 1))

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
        return self.plan.segments[operand].worker

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
