"""Predict a step: play the lowered programs through on a clock, with what everything costs.

A worker runs its instructions in order. A SEND keeps it busy while the message is copied, and waits
only if its channel is full. A RECEIVE waits until the message has arrived::

    worker 0   |F0|send|F1|send| ...
                       :...... flight
    worker 1   ........wait......|receive|F0| ...

What a link takes in all (``Link.seconds``) is the sender's part, the flight, and the receiver's
part. Messages of a link fly one after the other as far as bytes are concerned. Workers of one host
share its cores (``processors``).

Steps follow each other: a worker begins the next one when it is done, and when the worker that
reads the batches has announced it. The last of the simulated steps is the one that is shown; where
it is not the first, one more follows it, which workers that are done early begin meanwhile.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphsplit.errors import ScheduleError
from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.depths import channel_depths
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import WorkerProgram
from graphsplit.schedule.costs import Costs, Link
from graphsplit.schedule.simulation.memory import peak_bytes
from graphsplit.schedule.simulation.processors import Processors
from graphsplit.schedule.simulation.timeline import Span, Timeline

_DEPTH = 2
_AT_ONCE = Link(latency_s=0.0, bytes_per_s=float("inf"))


def simulate(
    plan: PartitionPlan,
    programs: Sequence[WorkerProgram],
    costs: Costs,
    *,
    depths: Mapping[int, int] | None = None,
    num_steps: int = 1,
    leader: int | None = None,
) -> Timeline:
    """Predict the last of some steps that follow each other.

    Args:
        plan: The plan.
        programs: All workers' programs.
        costs: What computing and moving costs.
        depths: How many messages of an edge may be under way, where 2 are too few; None: as deep
            as the runtime makes them.
        num_steps: How many steps to simulate. From the second on a step begins as those in the
            middle of an epoch do, with workers that were not done at the same time.
        leader: The worker that announces each step; None if nobody does.

    Raises:
        ScheduleError: The programs cannot go on.
    """
    found = depths if depths is not None else channel_depths(programs)
    play = _Play(plan, programs, costs, found, num_steps, leader)
    play.run()
    before, end = ([0.0, *play.ends])[num_steps - 1 : num_steps + 1]
    workers = _from_zero(play.spans)
    return Timeline(workers, end - before, peak_bytes(plan, workers, costs))


def _from_zero(workers: Sequence[Sequence[Span]]) -> tuple[tuple[Span, ...], ...]:
    """Let time begin with the first span."""
    begin = min((spans[0].begin_s for spans in workers if spans), default=0.0)
    if begin == 0.0:
        return tuple(map(tuple, workers))
    return tuple(
        tuple(
            Span(s.instruction, s.begin_s - begin, s.start_s - begin, s.end_s - begin)
            for s in spans
        )
        for spans in workers
    )


@dataclass
class _Channel:
    """The messages of an edge that are under way."""

    depth: int
    arrivals: deque[float] = field(default_factory=deque)
    num_under_way: int = 0
    receiver_waits: bool = False
    sender_waits: bool = False


@dataclass
class _Worker:
    """Where a worker is."""

    position: int = 0
    step: int = 0
    begin: float = 0.0
    start: float = 0.0
    has_been_announced: bool = False


class _Play:
    """Plays all programs through."""

    def __init__(
        self,
        plan: PartitionPlan,
        programs: Sequence[WorkerProgram],
        costs: Costs,
        depths: Mapping[int, int],
        num_steps: int,
        leader: int | None,
    ) -> None:
        self.plan = plan
        self.costs = costs
        self.shown = num_steps - 1
        self.num_steps = num_steps + 1 if num_steps > 1 else 1
        self.leader = leader
        self.programs = [program.instructions for program in programs]
        self.workers = [_Worker() for _ in programs]
        self.spans: list[list[Span]] = [[] for _ in programs]
        self.ends = [0.0] * self.num_steps
        self.announced: list[float] = []  # when the leader announced each step
        self.channels = [_Channel(depths.get(edge.index, _DEPTH)) for edge in plan.edges]
        self.link_free: dict[tuple[int, int], float] = {}
        self.hosts, self.host_of = _hosts(costs, len(programs))
        self.wakes: list[tuple[float, int]] = []  # when to look at which worker again
        self.host_wakes: list[tuple[float, int]] = []  # when to look at which host again

    def run(self) -> None:
        for worker in range(len(self.programs)):
            self._begin_step(worker, 0.0)
        while self.wakes or self.host_wakes:
            if not self.host_wakes or (self.wakes and self.wakes[0] <= self.host_wakes[0]):
                now, worker = heapq.heappop(self.wakes)
                self._go_on(worker, now)
                continue
            now, host = heapq.heappop(self.host_wakes)
            if self.hosts[host].next_end() == now:  # else another computation came in between
                worker = self.hosts[host].finish(now)
                self._note_host(host)
                self._finish(worker, now)
        stuck = [w for w, state in enumerate(self.workers) if state.step < self.num_steps]
        if stuck:
            state = self.workers[stuck[0]]
            raise ScheduleError(
                f"worker {stuck[0]} can never run '{self.programs[stuck[0]][state.position]}'; "
                f"{len(stuck)} worker(s) cannot go on"
            )

    def _note_host(self, host: int) -> None:
        end = self.hosts[host].next_end()
        if end != float("inf"):
            heapq.heappush(self.host_wakes, (end, host))

    def _begin_step(self, worker: int, now: float) -> None:
        """The time before a program: the worker's own work, then the leader's announcement."""
        state = self.workers[worker]
        state.position, state.begin, state.start = -1, now, now
        state.has_been_announced = False
        self._compute(worker, now, self.costs.between.get(worker, 0.0))

    def _compute(self, worker: int, now: float, seconds: float) -> None:
        """Keep a worker busy, then finish what it is at."""
        if seconds <= 0.0:
            self._finish(worker, now)
            return
        host = self.host_of[worker]
        self.hosts[host].start(now, worker, seconds)
        self._note_host(host)

    def _finish(self, worker: int, now: float) -> None:
        """Finish what a worker is at."""
        state = self.workers[worker]
        if state.position < 0:
            if now > state.start:
                self._note_span(worker, None, now)
            state.begin = now
            if not self._is_announced(worker, now):
                return
        else:
            instruction = self.programs[worker][state.position]
            self._note_span(worker, instruction, now)
            if instruction.opcode is Opcode.SEND:
                self._send(instruction.operand, now)
            elif instruction.opcode is Opcode.RECEIVE:
                self._take(instruction.operand, now)
        state.position += 1
        state.begin = now
        heapq.heappush(self.wakes, (now, worker))

    def _is_announced(self, worker: int, now: float) -> bool:
        """Whether a worker may begin its program; if not, it is looked at when it may."""
        state, leader = self.workers[worker], self.leader
        if leader is None:
            return True
        if worker == leader:
            self.announced.append(now)
            for other, waiting in enumerate(self.workers):
                if other != leader and waiting.has_been_announced and waiting.step == state.step:
                    self._wake_for_ticket(other, now)
            return True
        if not state.has_been_announced:
            state.has_been_announced = True
            if len(self.announced) > state.step:
                self._wake_for_ticket(worker, now)
            return False
        return True

    def _wake_for_ticket(self, worker: int, now: float) -> None:
        assert self.leader is not None
        link = self.costs.links.get((self.leader, worker), _AT_ONCE)
        there = self.announced[self.workers[worker].step] + link.latency_s
        heapq.heappush(self.wakes, (max(now, there), worker))

    def _note_span(self, worker: int, instruction: Instruction | None, now: float) -> None:
        state = self.workers[worker]
        if state.step == self.shown:
            self.spans[worker].append(Span(instruction, state.begin, state.start, now))

    def _go_on(self, worker: int, now: float) -> None:
        """Start a worker's next instruction, unless it must wait."""
        state, program = self.workers[worker], self.programs[worker]
        if state.position < 0:  # the ticket is there
            state.position = 0
        if state.position >= len(program):
            self.ends[state.step] = max(self.ends[state.step], now)
            state.step += 1
            if state.step < self.num_steps:
                self._begin_step(worker, now)
            return
        instruction = program[state.position]
        if instruction.opcode is Opcode.SEND:
            channel = self.channels[instruction.operand]
            channel.sender_waits = channel.num_under_way >= channel.depth
            if channel.sender_waits:
                return
            channel.num_under_way += 1
        elif instruction.opcode is Opcode.RECEIVE:
            channel = self.channels[instruction.operand]
            channel.receiver_waits = not channel.arrivals
            if channel.receiver_waits:
                return
            if channel.arrivals[0] > now:
                heapq.heappush(self.wakes, (channel.arrivals[0], worker))
                return
        state.start = now
        self._compute(worker, now, self.costs.seconds(instruction, worker))

    def _send(self, edge_index: int, now: float) -> None:
        """A message has left its sender."""
        edge, channel = self.plan.edges[edge_index], self.channels[edge_index]
        pair = (edge.source, edge.destination)
        link = self.costs.links.get(pair, _AT_ONCE)
        size = edge.meta.size_bytes
        busy = self.costs.send.get(edge_index, 0.0) + self.costs.receive.get(edge_index, 0.0)
        flight = max(0.0, link.seconds(size) - busy)
        on_the_wire = min(flight, size / link.bytes_per_s)
        left = max(now, self.link_free.get(pair, 0.0)) + on_the_wire
        self.link_free[pair] = left
        arrival = left + flight - on_the_wire
        channel.arrivals.append(arrival)
        if channel.receiver_waits:
            channel.receiver_waits = False
            heapq.heappush(self.wakes, (arrival, edge.destination))

    def _take(self, edge_index: int, now: float) -> None:
        """A receiver has taken a message; its room is free."""
        channel = self.channels[edge_index]
        channel.arrivals.popleft()
        channel.num_under_way -= 1
        if channel.sender_waits:
            channel.sender_waits = False
            heapq.heappush(self.wakes, (now, self.plan.edges[edge_index].source))


def _hosts(costs: Costs, num_workers: int) -> tuple[list[Processors], list[int]]:
    """The hosts, and on which of them each worker runs."""
    hosts: list[Processors] = []
    host_of = [-1] * num_workers
    for host in costs.hosts:
        for worker in host.workers:
            host_of[worker] = len(hosts)
        hosts.append(Processors(host.cores, costs.num_threads))
    for worker, found in enumerate(host_of):
        if found < 0:
            host_of[worker] = len(hosts)
            hosts.append(Processors(costs.num_threads, costs.num_threads))
    return hosts, host_of
