"""Proof, before step 0, that a job's programs cannot deadlock.

Every instruction of every worker is a vertex. It waits for the instruction before it, a RECEIVE
also for its SEND, and a SEND also for the RECEIVE that frees its place in the channel (the k-th
message of a channel of depth d needs the (k-d)-th to be taken). If that graph has no cycle, every
instruction gets its turn, whatever the timing.

The order of the microbatches is checked too where it means something: in what is modified in place.

Programs of many microbatches have millions of vertices, each with at most one arrow from another
worker; so the graph is one array of integers, and the proof lets every worker run as far as it can.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from graphsplit.errors import ScheduleError
from graphsplit.partition.plan import PartitionPlan
from graphsplit.placement.resolve import EVERYWHERE
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import WorkerProgram
from graphsplit.text import align

_SHOWN = 3  # of a long run of instructions that follow each other in a circle


def verify_programs(
    plan: PartitionPlan,
    programs: Sequence[WorkerProgram],
    *,
    depth: int = 2,
    depths: Mapping[int, int] | None = None,
) -> None:
    """Check that sends and receives match one to one and that no cycle of waits exists.

    Args:
        plan: The plan.
        programs: All workers' programs.
        depth: How many messages of an edge may be under way.
        depths: The same by edge, for those of which it is another number.

    Raises:
        ScheduleError: Names the message, or prints the cycle of waits.
    """
    graph = _WaitGraph(programs)
    sends = graph.messages(plan, Opcode.SEND)
    receives = graph.messages(plan, Opcode.RECEIVE)
    if missing := [edge.index for edge in plan.edges if edge.index not in sends]:
        raise ScheduleError(f"edge{missing[0]} is never sent")
    for edge, sent in sends.items():
        received = receives.get(edge, [])
        order = [graph.instructions[vertex].microbatch for vertex in sent]
        other = [graph.instructions[vertex].microbatch for vertex in received]
        if order != other:
            raise ScheduleError(
                f"edge{edge}: worker {plan.edges[edge].source} sends microbatches {order}, worker "
                f"{plan.edges[edge].destination} receives {other}"
            )
        graph.add_channel(sent, received, (depths or {}).get(edge, depth))
    if extra := sorted(set(receives) - set(sends)):
        raise ScheduleError(f"edge{extra[0]} is received but never sent")
    _check_order_of_changes(plan, programs)
    blocked = graph.run()
    if blocked:
        raise ScheduleError(graph.describe_circle(blocked))


def _check_order_of_changes(plan: PartitionPlan, programs: Sequence[WorkerProgram]) -> None:
    """Check that memory modified in place (running statistics) meets microbatches in order."""
    graph, workers = plan.placed.graph, plan.placed.workers
    segment_of = plan.segmentation.segment_of
    touched: dict[int, set[int]] = {}  # by segment, where it is the memory itself and no copy
    for value, positions in graph.touching.items():
        for segment in {segment_of[position] for position in positions}:
            if workers[value] in (EVERYWHERE, plan.segments[segment].worker):
                touched.setdefault(segment, set()).add(value)
    for program in programs:
        latest: dict[int, int] = {}
        for instruction in program.instructions if touched else ():
            if instruction.opcode is not Opcode.FORWARD:
                continue
            for value in touched.get(instruction.operand, ()):
                if instruction.microbatch < latest.get(value, 0):
                    raise ScheduleError(
                        f"worker {program.worker} runs '{instruction}' after microbatch "
                        f"{latest[value]} has modified {graph.nodes[value].name}"
                    )
                latest[value] = instruction.microbatch


class _WaitGraph:
    """All instructions of all programs, numbered through, and what each waits for.

    Attributes:
        instructions: Every instruction, program after program.
    """

    def __init__(self, programs: Sequence[WorkerProgram]) -> None:
        self._programs = programs
        self._first = [0, *accumulate(len(program.instructions) for program in programs)]
        self.instructions: list[Instruction] = []
        for program in programs:
            self.instructions += program.instructions
        # For each vertex the one of another program that it waits for, or -1.
        self._waits_for = array("q", [-1]) * len(self.instructions)

    def messages(self, plan: PartitionPlan, opcode: Opcode) -> dict[int, list[int]]:
        """The vertices that send, or receive, each edge's messages, in their order."""
        found: dict[int, list[int]] = {}
        for program, first in zip(self._programs, self._first, strict=False):
            for vertex, instruction in enumerate(program.instructions, first):
                if instruction.opcode is not opcode:
                    continue
                edge = plan.edges[instruction.operand]
                end = edge.source if opcode is Opcode.SEND else edge.destination
                if end != program.worker:
                    raise ScheduleError(
                        f"worker {program.worker} runs '{instruction}', but that edge goes from "
                        f"worker {edge.source} to worker {edge.destination}"
                    )
                found.setdefault(edge.index, []).append(vertex)
        return found

    def add_channel(self, sent: Sequence[int], received: Sequence[int], depth: int) -> None:
        """Let receives wait for their sends, and sends for a free place."""
        for send, receive in zip(sent, received, strict=True):
            self._waits_for[receive] = send
        for send, receive in zip(sent[depth:], received, strict=False):
            self._waits_for[send] = receive

    def run(self) -> dict[int, int]:
        """Let all programs run; returns where each one stands that cannot end, by its index."""
        done = bytearray(len(self.instructions))
        at = self._first[:-1]
        waiting: dict[int, int] = {}  # who waits for a vertex; one arrow, so one program
        ready = list(range(len(at)))
        while ready:
            program = ready.pop()
            vertex, end = at[program], self._first[program + 1]
            while vertex < end:
                other = self._waits_for[vertex]
                if other >= 0 and not done[other]:
                    waiting[other] = program
                    break
                done[vertex] = 1
                if vertex in waiting:
                    ready.append(waiting.pop(vertex))
                vertex += 1
            at[program] = vertex
        return {p: v for p, v in enumerate(at) if v < self._first[p + 1]}

    def describe_circle(self, blocked: dict[int, int]) -> str:
        """Print a circle of waits, found by going from each blocked program to what it awaits."""
        program = next(iter(blocked))
        seen: dict[int, int] = {}  # the vertex that others wait for, by program
        while program not in seen:
            awaited = self._waits_for[blocked[program]]
            program, before = self._program_of(awaited), program
            seen[before] = awaited
        circle = [program]
        while (following := self._program_of(seen[circle[-1]])) != program:
            circle.append(following)
        # Found backwards, from who waits to who is awaited; shown in the order of running.
        circle.reverse()
        start = circle.index(min(circle))
        circle = circle[start:] + circle[:start]
        lines = ["the programs wait for each other in a circle:"]
        for program, waiter in zip(circle, circle[1:] + circle[:1], strict=True):
            lines += self._lines(program, blocked[program], seen[waiter], waiter)
        waiters = circle[1:] + circle[:1]
        rows = [
            (self._programs[p].worker, self.instructions[blocked[p] : seen[waiter] + 1])
            for p, waiter in zip(circle, waiters, strict=True)
        ]
        return "\n".join([*lines, *draw_circle(rows)])

    def _program_of(self, vertex: int) -> int:
        return bisect_right(self._first, vertex) - 1

    def _lines(self, program: int, start: int, end: int, waiter: int) -> Iterator[str]:
        """The instructions of one program from where it is blocked to the one that is awaited."""
        worker, first = self._programs[program].worker, self._first[program]
        left_out = end - start + 1 - 2 * _SHOWN
        for index, vertex in enumerate(range(start, end + 1)):
            if 0 <= index - _SHOWN < left_out:
                if index == _SHOWN:
                    yield f"  worker {worker} ... {left_out} more instructions  (then)"
                continue
            arrow = "then"
            if vertex == end:
                arrow = f"is waited for by worker {self._programs[waiter].worker}"
            yield f"  worker {worker} #{vertex - first}: {self.instructions[vertex]}  ({arrow})"


# A circle of waits as a grid: who stands where, and for whom each waits.
#
# time      now                 then                then
# worker 0  RECEIVE mb0 edge1   FORWARD mb0 seg2    SEND mb0 edge0 --> 1
# worker 1  RECEIVE mb0 edge0   SEND mb0 edge1 --> 0

_SHOWN_AT_ENDS = 2  # instructions at each end of a row
_MAX_ROWS = 8


def draw_circle(rows: Sequence[tuple[int, Sequence[Instruction]]]) -> list[str]:
    """The grid, as lines of text.

    Args:
        rows: The workers of the circle, in the order in which they wait: each with its instructions
            from the one at which it is stopped to the one that the next worker waits for.
    """
    cells: list[list[str]] = []
    for index, (worker, instructions) in enumerate(rows):
        follower = rows[(index + 1) % len(rows)][0]
        texts = [str(i) for i in instructions]
        if len(texts) > 2 * _SHOWN_AT_ENDS:
            left_out = len(texts) - 2 * _SHOWN_AT_ENDS
            texts[_SHOWN_AT_ENDS:-_SHOWN_AT_ENDS] = [f"... {left_out} more"]
        texts[-1] += f" --> {follower}"
        cells.append([f"worker {worker}", *texts])
    if len(cells) > _MAX_ROWS:
        cells[_MAX_ROWS - 1 : -1] = [[f"... {len(cells) - _MAX_ROWS} more workers"]]
    header = ["time", "now", *["then"] * (max(map(len, cells)) - 2)]
    first = "each is stopped at its first instruction; '--> n' is what worker n waits for:"
    return [first, *(f"  {line}" for line in align([header, *cells]))]
