"""Workers on one clock, each at one thing at a time: the loop that plays schedules through.

A worker that is free is asked to begin what comes next. If it has to wait, whatever it waits for
stirs it later. All that comes to pass at one moment is heard before anybody begins something, and
who was stirred first begins first: equal inputs give equal plays.

Three play on it: a rule that chooses what to run next (``schedule/play.py``), programs on a clock
of units, which tells how deep channels must be (``depths.py``), and programs on a clock of costs,
which predicts a step (``schedule/simulation/``).
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from graphsplit.program.instruction import Instruction, Opcode

UNITS = {  # of time: what takes none is not in it
    Opcode.FORWARD: 1,
    Opcode.BACKWARD: 2,
    Opcode.BACKWARD_INPUT: 1,
    Opcode.BACKWARD_WEIGHT: 1,
}


class EventLoop(ABC):
    """The loop.

    Attributes:
        now: The time.
        stirred: Workers that may be able to go on.
    """

    def __init__(self, num_workers: int) -> None:
        self.now: float = 0
        self.stirred: deque[int] = deque(range(num_workers))
        self._busy = [False] * num_workers
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    @abstractmethod
    def begin(self, worker: int) -> bool:
        """Let a free worker begin what comes next; tells whether it is busy now."""

    def at(self, when: float, order: int, event: Callable[[], None]) -> None:
        """Let something come to pass later; at one moment, what is of a smaller order is first."""
        heapq.heappush(self._events, (when, order, next(self._numbers), event))

    def stir(self, worker: int, when: float = 0) -> None:
        """Let a worker look again, at once or later, whether it can go on."""
        if when > self.now:
            self.at(when, worker, lambda: self.stirred.append(worker))
        else:
            self.stirred.append(worker)

    def release(self, worker: int) -> None:
        """A worker has done what it was busy with."""
        self._busy[worker] = False
        self.stirred.append(worker)

    def run(self) -> None:
        """Go on until nothing more comes to pass."""
        events, stirred, busy = self._events, self.stirred, self._busy
        while stirred or events:
            while stirred:
                worker = stirred.popleft()
                if not busy[worker]:
                    busy[worker] = self.begin(worker)
            if events:
                self.now = events[0][0]
            while events and events[0][0] == self.now:
                heapq.heappop(events)[-1]()


@dataclass
class Channel:
    """The messages of an edge.

    Attributes:
        depth: How many may be under way; None: any number.
        arrivals: When each that is sent and not yet taken arrives.
        num_under_way: How many are between the begin of their send and the end of their receive.
        most: The most that were under way at once.
        sender: The worker that waits for room; -1: nobody.
        receiver: The worker that waits for a message; -1: nobody.
    """

    depth: int | None = None
    arrivals: deque[float] = field(default_factory=deque)
    num_under_way: int = 0
    most: int = 0
    sender: int = -1
    receiver: int = -1


class ProgramPlay(EventLoop):
    """Plays programs: a SEND waits for room in its channel, a RECEIVE for its message.

    Computations take units of time, messages none, and channels have no bounds.

    Args:
        programs: By worker; None stands for what is no instruction, and needs no channel.

    Attributes:
        positions: Which instruction each worker is at.
        channels: By edge.
    """

    def __init__(self, programs: Sequence[Sequence[Instruction | None]]) -> None:
        super().__init__(len(programs))
        self.programs = programs
        self.positions = [0] * len(programs)
        self.channels: dict[int, Channel] = {}

    def begin(self, worker: int) -> bool:
        """Run a worker up to what takes time."""
        program = self.programs[worker]
        while (position := self.positions[worker]) < len(program):
            instruction = program[position]
            if not self.can_begin(worker, instruction):
                return False
            seconds = self.seconds(worker, instruction)
            if seconds > 0:
                self.compute(worker, seconds)
                return True
            self.finish(worker)
        return False

    def can_begin(self, worker: int, instruction: Instruction | None) -> bool:
        """Whether a worker need not wait; if it must, it is stirred when that is over."""
        if instruction is None:
            return True
        if instruction.opcode is Opcode.SEND:
            channel = self._channel(instruction)
            if channel.depth is not None and channel.num_under_way >= channel.depth:
                channel.sender = worker
                return False
            channel.num_under_way += 1
            channel.most = max(channel.most, channel.num_under_way)
        elif instruction.opcode is Opcode.RECEIVE:
            channel = self._channel(instruction)
            if not channel.arrivals:
                channel.receiver = worker
                return False
            if channel.arrivals[0] > self.now:
                self.stir(worker, channel.arrivals[0])
                return False
        return True

    def compute(self, worker: int, seconds: float) -> None:
        """Keep a worker busy with what it is at."""
        self.at(self.now + seconds, worker, lambda: self.end(worker))

    def end(self, worker: int) -> None:
        """A worker is no longer busy."""
        self.finish(worker)
        self.release(worker)

    def finish(self, worker: int) -> None:
        """Note that a worker has done its present task."""
        instruction = self.programs[worker][self.positions[worker]]
        self.positions[worker] += 1
        if instruction is None:
            return
        if instruction.opcode is Opcode.SEND:
            channel = self._channel(instruction)
            arrival = self.arrival(instruction.operand)
            channel.arrivals.append(arrival)
            if channel.receiver >= 0:
                self.stir(channel.receiver, arrival)
                channel.receiver = -1
        elif instruction.opcode is Opcode.RECEIVE:
            channel = self._channel(instruction)
            channel.arrivals.popleft()
            channel.num_under_way -= 1
            if channel.sender >= 0:
                self.stir(channel.sender)
                channel.sender = -1

    def seconds(self, worker: int, instruction: Instruction | None) -> float:
        """How long an instruction takes."""
        return 0 if instruction is None else UNITS.get(instruction.opcode, 0)

    def arrival(self, edge: int) -> float:
        """When a message arrives that has been sent just now."""
        return self.now

    def _channel(self, instruction: Instruction) -> Channel:
        channel = self.channels.get(instruction.operand)
        if channel is None:
            channel = self.channels[instruction.operand] = Channel()
        return channel
