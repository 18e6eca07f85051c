"""How deep each channel must be, so that no sender waits for a receiver who keeps to its order.

The programs are played through on a clock, every computation taking one unit of time, a backward
two, messages none, and channels without bounds. The most messages that are under way at once on an
edge, and one more, is the depth it gets: one is taken while the next is made. That play is an order
of all instructions in which no SEND ever finds its channel full; so the programs cannot deadlock
over channels of these depths, however long things really take. ``schedule.verify`` proves it once
more, without the clock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import WorkerProgram

SHALLOW = 2
_UNITS = {
    Opcode.FORWARD: 1,
    Opcode.BACKWARD: 2,
    Opcode.BACKWARD_INPUT: 1,
    Opcode.BACKWARD_WEIGHT: 1,
}


def channel_depths(programs: Sequence[WorkerProgram]) -> dict[int, int]:
    """The edges that need a deeper channel than 2 messages, each with its depth.

    Returns what it found so far where the programs cannot go on: they deadlock over channels of any
    depth, which is for ``verify_programs`` to tell.
    """
    if all(program.num_microbatches <= SHALLOW for program in programs):
        return {}
    return _Play(programs).run()


class _Play:
    """Plays all programs through."""

    def __init__(self, programs: Sequence[WorkerProgram]) -> None:
        self.programs = [program.instructions for program in programs]
        self.num_messages = max((program.num_microbatches for program in programs), default=1)
        self.positions = [0] * len(programs)
        self.sent: set[tuple[int, int]] = set()  # (edge, microbatch), and not yet taken
        self.awaited: dict[tuple[int, int], int] = {}  # by which worker
        self.under_way: dict[int, int] = {}
        self.most: dict[int, int] = {}

    def run(self) -> dict[int, int]:
        clock = [(0, worker) for worker in range(len(self.programs))]
        woken: deque[int] = deque()
        while clock:
            now, worker = heapq.heappop(clock)
            woken.append(worker)
            while woken:
                worker = woken.popleft()
                spent = self._go_on(worker, woken)
                if spent:
                    heapq.heappush(clock, (now + spent, worker))
        depths = {edge: min(most + 1, self.num_messages) for edge, most in self.most.items()}
        return {edge: depth for edge, depth in depths.items() if depth > SHALLOW}

    def _go_on(self, worker: int, woken: deque[int]) -> int:
        """Run one worker up to its next computation; 0 if it waits, or has come to its end."""
        program = self.programs[worker]
        while self.positions[worker] < len(program):
            instruction = program[self.positions[worker]]
            if instruction.opcode is Opcode.RECEIVE and not self._receive(worker, instruction):
                return 0
            self.positions[worker] += 1
            if instruction.opcode is Opcode.SEND:
                self._send(instruction, woken)
            elif instruction.opcode in _UNITS:
                return _UNITS[instruction.opcode]
        return 0

    def _send(self, instruction: Instruction, woken: deque[int]) -> None:
        edge, message = instruction.operand, (instruction.operand, instruction.microbatch)
        self.sent.add(message)
        self.under_way[edge] = self.under_way.get(edge, 0) + 1
        self.most[edge] = max(self.most.get(edge, 0), self.under_way[edge])
        if message in self.awaited:
            woken.append(self.awaited.pop(message))

    def _receive(self, worker: int, instruction: Instruction) -> bool:
        message = (instruction.operand, instruction.microbatch)
        if message not in self.sent:
            self.awaited[message] = worker
            return False
        self.sent.remove(message)
        self.under_way[instruction.operand] -= 1
        return True
