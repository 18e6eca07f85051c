"""Play a rule for the order of computations through on all workers at once.

Whenever a worker is free it runs, of what can run there, what the rule prefers. The order in which
things ran is the schedule: it fits any graph, and it cannot deadlock, since it has just run. The
clock is that of measured costs, or one on which a backward takes twice as long as a forward, and
all workers equally long.

Each segment meets the microbatches in their order, forward and backward, and gradients are added in
that order. Those of several lanes take turns, so that the replicas behind them work at the same
time::

    worker 0   F0 F2 F1 F3                         lanes of microbatches 0 1, and 2 3
    worker 1      F0 F1 B0 ...
    worker 2         F2 F3 B2 ...
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from graphsplit.partition.plan import PartitionPlan
from graphsplit.partition.segments import Segment
from graphsplit.program.event_loop import EventLoop
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.schedule.costs import Clock, EvenClock
from graphsplit.schedule.tasks import BETWEEN_LANES, Tasks


class WarmUp(Enum):
    """A rule for what may be under way.

    Attributes:
        NONE: No limit. What the others say is said of each lane of microbatches, and added.
        BY_LEVEL: As many microbatches as there are changes of the worker from its first segment
            down to the last one, and one (PipeDream-Flush, arXiv:2006.09503).
        BY_CHUNK: Counts forwards whose backward is still to run: for worker ``r`` of ``P``, with
            ``V`` segments, ``2 (P - r - 1) + (V - 1) P + 1`` (Megatron-LM, arXiv:2104.04473).
    """

    NONE = "none"
    BY_LEVEL = "by level"
    BY_CHUNK = "by chunk"

    def limits(self, tasks: Tasks, *, more: int = 0) -> list[int]:
        """How much may be under way, by worker.

        Args:
            tasks: The computations of a microbatch.
            more: How much more than the rule says.
        """
        plan = tasks.plan
        limits = [0] * plan.num_workers
        lanes: dict[int, list[Segment]] = {}
        for segment in plan.segments:
            lanes.setdefault(plan.lane_of(segment.nodes[0]), []).append(segment)
        for segments in lanes.values():
            for worker, limit in self._of_lane(tasks, segments).items():
                limits[worker] += limit
        return [max(1, limit + more) for limit in limits]

    def _of_lane(self, tasks: Tasks, segments: Sequence[Segment]) -> dict[int, int]:
        backward = [s for s in segments if tasks.backward(s.index) in tasks.waits]
        limits = {segment.worker: 1 for segment in segments}
        if self is WarmUp.BY_CHUNK:
            levels: dict[int, list[int]] = {}
            for segment in backward:
                levels.setdefault(segment.worker, []).append(segment.level)
            ranked = sorted(levels, key=lambda worker: (levels[worker][0], worker))
            for rank, worker in enumerate(ranked):
                behind, chunks = len(ranked) - rank - 1, len(levels[worker])
                limits[worker] = 2 * behind + (chunks - 1) * len(ranked) + 1
        else:
            depths = _depths(tasks, segments)
            last = max((depths[segment.index] for segment in backward), default=0)
            for segment in segments:
                limit = last - depths[segment.index] + 1
                limits[segment.worker] = max(limits[segment.worker], limit)
        return limits


def _depths(tasks: Tasks, segments: Sequence[Segment]) -> dict[int, int]:
    """The most changes of worker on any way to each segment; they are numbered by rising level."""
    plan, depths = tasks.plan, dict[int, int]()
    for segment in segments:
        waits = tasks.waits[Opcode.FORWARD, segment.index]
        before = [plan.segments[other] for (_, other), distance in waits if not distance]
        changes = (depths[one.index] + (one.worker != segment.worker) for one in before)
        depths[segment.index] = max(changes, default=0)
    return depths


@dataclass(frozen=True)
class Preference:
    """The preference of a free worker.

    Of several forwards, or backwards, earlier microbatches come first. Weight gradients that are
    computed apart fill the time in which nothing else may run.

    Attributes:
        forward_first: Whether all forwards of the step come before any backward.
        backward_first: Whether a backward comes before a forward that may run as well. It holds
            less memory; the other way round later workers get their work sooner.
        warm_up: How much may be under way before backward must catch up: more would not keep
            anybody busy, but hold memory.
        splits: Whether the backward of segments that can be split runs in two parts.
        ends: Of how many microbatches at the begin of a step, and of how many at its end, it does
            so; None: of all. Between them nobody waits for long, and a whole backward is quicker.
            Steps follow each other: where a worker still has weight gradients to compute at the
            end, those before it are on their way into the next step.
        in_groups: Whether microbatches go in groups of as many as there are workers, one level
            after the other, so that a worker of several levels begins with all of them early.
        more: How many more than ``warm_up`` says may be under way; fewer if negative.
    """

    forward_first: bool = False
    backward_first: bool = False
    warm_up: WarmUp = WarmUp.BY_LEVEL
    splits: bool = False
    ends: tuple[int, int] | None = None
    in_groups: bool = False
    more: int = 0


_Ready = tuple[int, int, int, int, Instruction]  # the smallest of what is ready runs first


def play(
    plan: PartitionPlan, num_microbatches: int, rule: Preference, clock: Clock | None = None
) -> tuple[Sequence[Instruction], ...]:
    """The compute of all workers, each in the order to run it."""
    return _RulePlay(plan, num_microbatches, rule, clock).orders_of_all()


class _RulePlay(EventLoop):
    """Plays a rule through."""

    def __init__(
        self, plan: PartitionPlan, num_microbatches: int, rule: Preference, clock: Clock | None
    ) -> None:
        super().__init__(plan.num_workers)
        self.plan = plan
        self.rule = rule
        self.num_microbatches = num_microbatches
        self.turns = _turns(plan, num_microbatches)
        first, last = rule.ends or (num_microbatches, 0)
        self.whole = range(first, num_microbatches - last)  # turns with a whole backward
        self.tasks = Tasks(plan, plan.splits if rule.splits else ())
        self.followers = self.tasks.followers()
        self.worker_of = {task: self.tasks.worker_of(task) for task in self.tasks.waits}
        self.missing: dict[Instruction, int] = dict(self.tasks.instructions(num_microbatches))
        self.clock = clock or EvenClock((self._worker(one), one) for one in self.missing)
        workers = range(plan.num_workers)
        self.group = len(set(self.worker_of.values())) if rule.in_groups else 1
        self.late = self.tasks.late()
        # What can run, by worker: forwards, backwards with sums, weight gradients, and late sums.
        self.forward: list[list[_Ready]] = [[] for _ in workers]
        self.backward: list[list[_Ready]] = [[] for _ in workers]
        self.fillers: list[list[_Ready]] = [[] for _ in workers]
        self.last: list[list[_Ready]] = [[] for _ in workers]
        self.orders: list[list[Instruction]] = [[] for _ in workers]
        self.limits = rule.warm_up.limits(self.tasks, more=rule.more)
        self.most = max(self.limits, default=1)
        self.begun: list[set[int]] = [set() for _ in workers]  # microbatches
        self.open = [0] * plan.num_workers  # forwards whose backward is still to run
        self.forwards = [0] * plan.num_workers  # still to run
        self.own = [0] * plan.num_workers  # all that is still to run, but for late sums
        # By worker and microbatch: computations still to run, with and without weight gradients.
        self.left = [[0] * num_microbatches for _ in workers]
        self.left_urgent = [[0] * num_microbatches for _ in workers]
        for instruction in self.missing:
            worker = self._worker(instruction)
            self.own[worker] += not self._is_late(instruction)
            if self._is_between_lanes(instruction):
                continue  # it waits for other lanes, whose microbatches are under way elsewhere
            self.left[worker][instruction.microbatch] += 1
            is_urgent = instruction.opcode is not Opcode.BACKWARD_WEIGHT
            self.left_urgent[worker][instruction.microbatch] += is_urgent
            self.forwards[worker] += instruction.opcode is Opcode.FORWARD

    def _worker(self, instruction: Instruction) -> int:
        return self.worker_of[instruction.opcode, instruction.operand]

    def _is_between_lanes(self, instruction: Instruction) -> bool:
        """Whether it waits for other lanes."""
        if instruction.opcode is Opcode.ACCUMULATE:
            return bool(self.plan.lanes) and self.plan.blocks_of(instruction.operand) is None
        return instruction.opcode in BETWEEN_LANES

    def _is_late(self, instruction: Instruction) -> bool:
        return (instruction.opcode, instruction.operand) in self.late

    def orders_of_all(self) -> tuple[Sequence[Instruction], ...]:
        for instruction, number in self.missing.items():
            if number == 0:
                self._push(instruction)
        self.run()
        while any(self.forward):
            self._allow_one_more()
            self.run()
        return tuple(self.orders)

    def _push(self, instruction: Instruction) -> None:
        worker = self._worker(instruction)
        ready = self.backward
        if instruction.opcode is Opcode.FORWARD:
            ready = self.forward
        elif instruction.opcode is Opcode.BACKWARD_WEIGHT:
            if self._is_whole(instruction):  # it was a part of the backward
                self._finish(worker, instruction)
                return
            ready = self.fillers
        elif self._is_late(instruction):
            ready = self.last  # however quick others are, this worker's own need not wait for them
        heapq.heappush(ready[worker], (*self._place(instruction), instruction))
        self.stirred.append(worker)

    def _place(self, instruction: Instruction) -> tuple[int, int, int, int]:
        """The order of what is ready: by turn, backward from the deepest level, then sums.

        What ends a block of another worker's gradient comes first: it travels beside the backward.
        Blocks come in the order of the backward that makes them, the last parameters first.
        """
        opcode, operand = instruction.opcode, instruction.operand
        segments, turn = self.plan.segments, self.turns[instruction.microbatch]
        if opcode is Opcode.FORWARD:
            level = segments[operand].level
        elif opcode not in BETWEEN_LANES:
            level = -segments[operand].level
        else:
            level = -len(segments) if self._is_sent(instruction) else 1
        if opcode is Opcode.ADD_BLOCK or self._is_sent(instruction):
            operand = -operand
        return turn // self.group, level, turn, operand

    def _is_sent(self, instruction: Instruction) -> bool:
        block = self.plan.blocks_of(instruction.operand)
        if instruction.opcode is not Opcode.ACCUMULATE or block is None:
            return False
        edge = block.edges[self.plan.lane_of(instruction.operand)]
        return edge is not None and instruction.microbatch in block.ends

    def _is_whole(self, instruction: Instruction) -> bool:
        return self.turns[instruction.microbatch] in self.whole

    def begin(self, worker: int) -> bool:
        """Begin what the rule prefers."""
        ready = self._preferred(worker)
        if not ready:
            return False
        if self._has_earlier_weights(ready[0][-1]):
            ready = self.fillers[worker]
        instruction = heapq.heappop(ready)[-1]
        as_run = instruction
        if instruction.opcode is Opcode.BACKWARD_INPUT and self._is_whole(instruction):
            as_run = Instruction(Opcode.BACKWARD, instruction.operand, instruction.microbatch)
        self.orders[worker].append(as_run)
        self.begun[worker].add(instruction.microbatch)
        if instruction.opcode is Opcode.FORWARD:
            self.open[worker] += self.tasks.backward(instruction.operand) in self.worker_of
        when = self.now + self.clock.seconds(as_run, worker)
        self.at(when, 2 * worker, lambda: self._end(worker, instruction))
        return True

    def _end(self, worker: int, instruction: Instruction) -> None:
        self.release(worker)
        self._finish(worker, instruction)

    def _has_earlier_weights(self, instruction: Instruction) -> bool:
        """Whether a backward must be run whole, and weight gradients of the one before wait."""
        if instruction.opcode is not Opcode.BACKWARD_INPUT:
            return False
        operand, microbatch = instruction.operand, instruction.microbatch
        later = Instruction(Opcode.BACKWARD_WEIGHT, operand, microbatch)
        return self._is_whole(instruction) and self.missing[later] > 1

    def _preferred(self, worker: int) -> list[_Ready]:
        """Where to take the next computation of a worker from; empty if it has to wait."""
        forward, backward = self.forward[worker], self.backward[worker]
        if self.rule.forward_first and self.forwards[worker]:
            return forward
        if self.rule.backward_first and backward:
            return backward
        if forward and self._may_start(worker, forward[0][-1]):
            return forward
        return backward or self.fillers[worker] or ([] if self.own[worker] else self.last[worker])

    def _may_start(self, worker: int, instruction: Instruction) -> bool:
        limit = self.limits[worker]
        if self.rule.warm_up is WarmUp.BY_CHUNK:
            return self.open[worker] < limit
        begun = self.begun[worker]
        if self.rule.warm_up is WarmUp.NONE or instruction.microbatch in begun:
            return True
        if sum(self.left_urgent[worker][m] > 0 for m in begun) >= limit:
            return False
        return not self.rule.splits or (
            sum(self.left[worker][m] > 0 for m in begun) < max(limit, self.most)
        )

    def _allow_one_more(self) -> None:
        """Nobody can go on within the limits: raise that of the worker that is furthest behind."""
        behind = min((ready[0][:-1], worker) for worker, ready in enumerate(self.forward) if ready)
        self.limits[behind[1]] += 1
        self.stirred.append(behind[1])

    def _finish(self, worker: int, instruction: Instruction) -> None:
        opcode, microbatch = instruction.opcode, instruction.microbatch
        is_counted = not self._is_between_lanes(instruction)
        self.own[worker] -= not self._is_late(instruction)
        self.left[worker][microbatch] -= is_counted
        self.left_urgent[worker][microbatch] -= is_counted and opcode is not Opcode.BACKWARD_WEIGHT
        self.forwards[worker] -= opcode is Opcode.FORWARD
        self.open[worker] -= opcode in (Opcode.BACKWARD, Opcode.BACKWARD_INPUT)
        for task, distance in self.followers.get((opcode, instruction.operand), ()):
            is_in_step = microbatch + distance < self.num_microbatches
            if not is_in_step or not self.tasks.is_in(microbatch + distance, task):
                continue
            later = Instruction(*task, microbatch + distance)
            destination = self.worker_of[task]
            delay = 0.0
            if destination != worker:
                delay = self.clock.delay(instruction, worker, destination)
            if delay:
                self.at(self.now + delay, 2 * destination + 1, partial(self._arrive, later))
            else:
                self._arrive(later)

    def _arrive(self, instruction: Instruction) -> None:
        """Something that a computation waits for is there."""
        self.missing[instruction] -= 1
        if self.missing[instruction] == 0:
            self._push(instruction)


def _turns(plan: PartitionPlan, num_microbatches: int) -> list[int]:
    """The turn of each microbatch: lanes take turns, longer ones more often."""
    come = {
        microbatch: (index + 0.5) / len(lane)
        for lane in plan.lanes
        for index, microbatch in enumerate(lane)
    }
    line = sorted(range(num_microbatches), key=lambda m: (come.get(m, 0.0), m))
    turns = [0] * num_microbatches
    for turn, microbatch in enumerate(line):
        turns[microbatch] = turn
    return turns
