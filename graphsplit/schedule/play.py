"""Play a rule for the order of computations through on all workers at once.

Every forward takes one unit of time, a backward two, adding up the gradient of a shared parameter
none. Whenever a worker is free it runs, of what can run there, what the rule prefers. The order in
which things ran is the schedule: it fits any graph, and it cannot deadlock, since it has just run.

Each segment meets the microbatches in their order, forward and backward, and gradients are added in
that order.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.schedule.dependencies import Dependencies


@dataclass(frozen=True)
class Rule:
    """What a free worker prefers.

    Attributes:
        forward_first: Whether all forwards of the step come before any backward.
        limited: Whether a worker begins a new microbatch only if fewer are under way there than
            there are levels from its first segment down to the last one: more would not keep
            anybody busy, but hold memory.
    """

    forward_first: bool
    limited: bool


_UNITS = {Opcode.ACCUMULATE: 0, Opcode.BACKWARD: 2, Opcode.FORWARD: 1}
_Task = tuple[Opcode, int]  # what to do with which segment or value, in every microbatch
_Ready = tuple[int, int, int, int, Instruction]  # the smallest of what is ready runs first
_Running = tuple[int, int, Instruction]  # when it ends, where, what


def play(
    plan: PartitionPlan, num_microbatches: int, rule: Rule
) -> tuple[Sequence[Instruction], ...]:
    """The compute of all workers, each in the order to run it."""
    return _Play(plan, num_microbatches, rule).run()


class _Play:
    """Plays a rule through."""

    def __init__(self, plan: PartitionPlan, num_microbatches: int, rule: Rule) -> None:
        self.plan = plan
        self.rule = rule
        self.num_microbatches = num_microbatches
        self.missing: dict[Instruction, int] = {}  # how many others each still waits for
        self.waiting: dict[_Task, list[tuple[_Task, int]]] = {}  # who waits, how far behind
        self._note_dependencies(Dependencies.of(plan))
        self.ready: list[list[_Ready]] = [[] for _ in range(plan.num_workers)]
        self.orders: list[list[Instruction]] = [[] for _ in range(plan.num_workers)]
        self.stirred: deque[int] = deque()  # workers that may be able to go on
        self.limits = self._limits()
        self.begun = [0] * plan.num_workers  # microbatches
        self.forwards = [0] * plan.num_workers  # still to run
        self.left = [[0] * num_microbatches for _ in range(plan.num_workers)]  # computations
        for instruction in self.missing:
            worker = self._worker(instruction)
            self.left[worker][instruction.microbatch] += 1
            self.forwards[worker] += instruction.opcode is Opcode.FORWARD

    def _note_dependencies(self, dependencies: Dependencies) -> None:
        """Who waits for whom, with the distance in microbatches."""
        distances: dict[_Task, list[int]] = {}

        def wait(task: _Task, earlier: _Task, distance: int = 0) -> None:
            self.waiting.setdefault(earlier, []).append((task, distance))
            distances.setdefault(task, []).append(distance)

        for index, before in enumerate(dependencies.forward):
            wait((Opcode.FORWARD, index), (Opcode.FORWARD, index), 1)
            for other in before:
                wait((Opcode.FORWARD, index), (Opcode.FORWARD, other))
        for index, following in enumerate(dependencies.backward):
            if following is not None:
                wait((Opcode.BACKWARD, index), (Opcode.BACKWARD, index), 1)
                wait((Opcode.BACKWARD, index), (Opcode.FORWARD, index))
                for other in following:
                    wait((Opcode.BACKWARD, index), (Opcode.BACKWARD, other))
        for value, segments in dependencies.accumulate.items():
            wait((Opcode.ACCUMULATE, value), (Opcode.ACCUMULATE, value), 1)
            for other in segments:
                wait((Opcode.ACCUMULATE, value), (Opcode.BACKWARD, other))
        for earlier, later in dependencies.next_microbatch:
            wait((Opcode.FORWARD, later), (Opcode.FORWARD, earlier), 1)
        for (opcode, operand), found in distances.items():
            for microbatch in range(self.num_microbatches):
                number = sum(distance <= microbatch for distance in found)
                self.missing[Instruction(opcode, operand, microbatch)] = number

    def _limits(self) -> list[int]:
        """How many microbatches may be under way on each worker."""
        segments = self.plan.segments
        backward = {i.operand for i in self.missing if i.opcode is Opcode.BACKWARD}
        last = max((segments[index].level for index in backward), default=0)
        limits = [1] * self.plan.num_workers
        for segment in segments:
            limits[segment.worker] = max(limits[segment.worker], last - segment.level + 1)
        return limits

    def _worker(self, instruction: Instruction) -> int:
        if instruction.opcode is Opcode.ACCUMULATE:
            return self.plan.placed.workers[instruction.operand]
        return self.plan.segments[instruction.operand].worker

    def run(self) -> tuple[Sequence[Instruction], ...]:
        for instruction, number in self.missing.items():
            if number == 0:
                self._push(instruction)
        running: list[_Running] = []
        busy: set[int] = set()
        now = 0
        while True:
            while self.stirred:
                worker = self.stirred.popleft()
                if worker not in busy and self._start(worker, now, running):
                    busy.add(worker)
            if running:
                now = running[0][0]
                while running and running[0][0] == now:
                    _, worker, instruction = heapq.heappop(running)
                    busy.remove(worker)
                    self.stirred.append(worker)
                    self._finish(instruction)
            elif any(self.ready):
                self._allow_one_more()
            else:
                return tuple(self.orders)

    def _push(self, instruction: Instruction) -> None:
        worker = self._worker(instruction)
        heapq.heappush(self.ready[worker], (*self._place(instruction), instruction))
        self.stirred.append(worker)

    def _place(self, instruction: Instruction) -> tuple[int, int, int, int]:
        """What is run before what: backward from the deepest level, then sums, by microbatch."""
        opcode, operand = instruction.opcode, instruction.operand
        segments = self.plan.segments
        if opcode is Opcode.FORWARD:
            order = 0 if self.rule.forward_first else 2
            return order, instruction.microbatch, segments[operand].level, operand
        level = 1 if opcode is Opcode.ACCUMULATE else -segments[operand].level
        return 1, instruction.microbatch, level, operand

    def _start(self, worker: int, now: int, running: list[_Running]) -> bool:
        ready = self.ready[worker]
        if not ready or not self._may_start(worker, ready[0][-1]):
            return False
        instruction = heapq.heappop(ready)[-1]
        self.orders[worker].append(instruction)
        self.begun[worker] = max(self.begun[worker], instruction.microbatch + 1)
        heapq.heappush(running, (now + _UNITS[instruction.opcode], worker, instruction))
        return True

    def _may_start(self, worker: int, instruction: Instruction) -> bool:
        if instruction.opcode is not Opcode.FORWARD:
            return not (self.rule.forward_first and self.forwards[worker])
        if not self.rule.limited or instruction.microbatch < self.begun[worker]:
            return True
        under_way = sum(left > 0 for left in self.left[worker][: self.begun[worker]])
        return under_way < self.limits[worker]

    def _allow_one_more(self) -> None:
        """Nobody can go on within the limits: raise that of the worker that is furthest behind."""
        behind = min((ready[0][:-1], worker) for worker, ready in enumerate(self.ready) if ready)
        self.limits[behind[1]] += 1
        self.stirred.append(behind[1])

    def _finish(self, instruction: Instruction) -> None:
        worker = self._worker(instruction)
        self.left[worker][instruction.microbatch] -= 1
        self.forwards[worker] -= instruction.opcode is Opcode.FORWARD
        task = (instruction.opcode, instruction.operand)
        for (opcode, operand), distance in self.waiting.get(task, ()):
            microbatch = instruction.microbatch + distance
            if microbatch < self.num_microbatches:
                later = Instruction(opcode, operand, microbatch)
                self.missing[later] -= 1
                if self.missing[later] == 0:
                    self._push(later)
