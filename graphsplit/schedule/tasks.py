"""The computations of a step, and which of them each waits for."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator

from graphsplit.capture.graph import NodeKind
from graphsplit.partition.plan import Exchange, PartitionPlan, SumTerm
from graphsplit.partition.replicas.blocks import distances
from graphsplit.partition.replicas.buffer_chains import sources_of
from graphsplit.program.instruction import Instruction, Opcode

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
        self._collect()
        self._collect_blocks()
        self._collect_buffer_updates()
        for earlier, later in _next_microbatch(plan):
            self.waits[Opcode.FORWARD, later].append(((Opcode.FORWARD, earlier), 1))

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

    def _collect(self) -> None:
        waits = self.waits
        for index, before in enumerate(_forward(self.plan)):
            task = (Opcode.FORWARD, index)
            waits[task] = [(task, 1), *(((Opcode.FORWARD, other), 0) for other in before)]
        for index, following in enumerate(_backward(self.plan)):
            if following is None:
                continue
            task = self.backward(index)
            waits[task] = [(task, 1), ((Opcode.FORWARD, index), 0)]
            waits[task] += [(self.backward(other), 0) for other in following]
            if index in self.split:
                later = (Opcode.BACKWARD_WEIGHT, index)
                waits[later] = [(later, 1), (task, 0)]
        for value, segments in _accumulate(self.plan).items():
            task = (Opcode.ACCUMULATE, value)
            makers = (self._makes_term(s, v) for s in segments for v in self.plan.members_of(value))
            waits[task] = [(task, 1), *((maker, 0) for maker in dict.fromkeys(makers))]
            in_lane_before = value - self.plan.num_values
            if in_lane_before >= 0 and self.plan.blocks_of(value) is None:
                waits[task].append(((Opcode.ACCUMULATE, in_lane_before), 1))

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


# The order between segments' forwards and backwards, whatever that of microbatches.


def _forward(plan: PartitionPlan) -> tuple[frozenset[int], ...]:
    """For each segment, those whose forward its own forward waits for."""
    segment_of = plan.segmentation.segment_of
    found: list[set[int]] = []
    for io in plan.io:
        reads = (*io.values, *(plan.contributions[c].value for c in io.leaves))
        found.append({segment_of[value] for value in reads})
    nodes = plan.placed.graph.nodes
    for segment in plan.segments:
        for position in segment.nodes:
            found[segment.index].update(segment_of[p] for p in nodes[position].runs_after)
    for users in _users_of_modified(plan).values():
        worker = plan.segments[users[-1]].worker
        here = [index for index in users if plan.segments[index].worker == worker]
        found[here[-1]].update(here)
    for before, after in plan.random_hops:
        found[segment_of[after]].add(segment_of[before])
    return tuple(frozenset(before - {-1, index}) for index, before in enumerate(found))


def _backward(plan: PartitionPlan) -> tuple[frozenset[int] | None, ...]:
    """For each segment, those whose backward its own waits for; None where it has no backward."""
    found: list[frozenset[int] | None] = []
    for index, io in enumerate(plan.io):
        if not plan.placed.graph.has_gradients or not (io.roots or io.leaves):
            found.append(None)
            continue
        sums = [plan.gradient_sums.get(root, ()) for root in io.roots]
        sums += [plan.seeds.get(leaf, ()) for leaf in io.leaves]
        before = _contributing(plan, itertools.chain.from_iterable(sums))
        found.append(frozenset(before - {index}))
    return tuple(found)


def _contributing(plan: PartitionPlan, terms: Iterable[SumTerm]) -> set[int]:
    """The segments whose backward makes the terms of a sum."""
    contributions: set[int] = set()
    for term in terms:
        if term.edge is not None:
            contributions.update(plan.edges[term.edge].contributions)
        elif term.contribution is not None:
            contributions.add(term.contribution)
    return {plan.contributions[c].segment for c in contributions}


def _accumulate(plan: PartitionPlan) -> dict[int, frozenset[int]]:
    """For each parameter whose gradient is summed, the segments whose backward makes its terms."""
    nodes = plan.placed.graph.nodes
    return {
        value: frozenset(_contributing(plan, terms))
        for value, terms in plan.gradient_sums.items()
        if nodes[value].kind is not NodeKind.OPERATION
    }


def _next_microbatch(plan: PartitionPlan) -> tuple[tuple[int, int], ...]:
    """Pairs of segments that touch memory which is modified in place.

    The first one's forward must be done for a microbatch before the second one's begins for the
    next.
    """
    pairs: dict[tuple[int, int], None] = {}
    for users in _users_of_modified(plan).values():
        *others, last = users
        pairs.update(dict.fromkeys((last, other) for other in others))
    return tuple(pairs)


def _users_of_modified(plan: PartitionPlan) -> dict[int, list[int]]:
    """For each value that is modified in place, the segments that read or write its memory.

    The last one is the last that modifies it, if another one does not run after it there.
    """
    workers, segment_of = plan.placed.workers, plan.segmentation.segment_of
    users = {  # segments are numbered by rising level
        value: sorted({segment_of[position] for position in positions})
        for value, positions in plan.placed.graph.touching.items()
    }
    for value, found in users.items():
        # Readers elsewhere get a copy of the microbatch's own; only the owner changes the memory.
        found.sort(key=lambda index: plan.segments[index].worker == workers[value])
    return users
