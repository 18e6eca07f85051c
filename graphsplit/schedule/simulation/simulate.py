"""Predict a step: play the lowered programs through on a clock, with what everything costs.

A worker runs its instructions in order. A SEND keeps it busy while the message is copied, and waits
only if its channel is full. A RECEIVE waits until the message has arrived::

    worker 0   |F0|send|F1|send| ...
                       :...... flight
    worker 1   ........wait......|receive|F0| ...

What a link takes in all (``LinkCost.seconds``) is the sender's part, the flight, and the receiver's
part. Messages of a link fly one after the other as far as bytes are concerned. Workers of one host
share its cores (``processors``).

Blocks of gradients leave while the backward that makes them still runs (``program.early``), evenly
over its time.

Steps follow each other: a worker begins the next one when it is done, and when the worker that
reads the batches has announced it. The last of the simulated steps is the one that is shown; where
it is not the first, one more follows it, which workers that are done early begin meanwhile.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from graphsplit.errors import ScheduleError
from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.depths import channel_depths
from graphsplit.program.early import shares_sent
from graphsplit.program.event_loop import Channel, ProgramPlay
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import WorkerProgram
from graphsplit.schedule.costs import Costs, LinkCost
from graphsplit.schedule.simulation.timeline import Span, Timeline, peak_bytes


# The cores of one host, shared evenly by the workers that compute on it.
#
# While more cores are asked for than there are, all computations go on at the same, lower speed
# (processor sharing). So the host has a clock of its own that runs at that speed, and each
# computation ends when this clock has advanced by the seconds that it needs: no computation is
# touched when another one begins or ends.
class Processors:
    """One host.

    Args:
        cores: How many cores it has.
        threads: How many cores each computation keeps busy.
    """

    def __init__(self, cores: float, threads: int = 1) -> None:
        self._cores = cores
        self._threads = min(threads, cores)
        self._ends: list[tuple[float, int]] = []  # by the host's clock, and who
        self._clock = 0.0
        self._now = 0.0

    def _speed(self) -> float:
        asked = len(self._ends) * self._threads
        return 1.0 if asked <= self._cores else self._cores / asked

    def _advance(self, now: float) -> None:
        self._clock += (now - self._now) * self._speed()
        self._now = now

    def start(self, now: float, worker: int, seconds: float) -> None:
        """A worker begins to compute what takes a core so long."""
        self._advance(now)
        if not self._ends:
            self._clock = now  # sums of small numbers stay exact
        heapq.heappush(self._ends, (self._clock + seconds, worker))

    def next_end(self) -> float:
        """When a computation ends next if no other one begins; infinite if there is none."""
        if not self._ends:
            return math.inf
        return self._now + max(0.0, self._ends[0][0] - self._clock) / self._speed()

    def finish(self, now: float) -> int:
        """The computation that ends now; returns who ran it."""
        self._advance(now)
        end, worker = heapq.heappop(self._ends)
        self._clock = max(self._clock, end)
        return worker


_DEPTH = 2
_AT_ONCE = LinkCost(latency_s=0.0, bytes_per_s=float("inf"))


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
    play = _Simulation(plan, programs, costs, found, num_steps, leader)
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


class _Simulation(ProgramPlay):
    """Plays programs on a clock of costs, one step after the other.

    Before each program stands None: what the worker does between two of them.
    """

    def __init__(
        self,
        plan: PartitionPlan,
        programs: Sequence[WorkerProgram],
        costs: Costs,
        depths: Mapping[int, int],
        num_steps: int,
        leader: int | None,
    ) -> None:
        super().__init__([(None, *program.instructions) for program in programs])
        self.plan = plan
        self.costs = costs
        self.shown = num_steps - 1
        self.num_steps = num_steps + 1 if num_steps > 1 else 1
        self.leader = leader
        self.steps = [0] * len(programs)
        self.begins = [0.0] * len(programs)  # when each worker came to what it is at
        self.starts = [0.0] * len(programs)  # when it no longer waited
        self.spans: list[list[Span]] = [[] for _ in programs]
        # By worker and position, what share of the latest backward is done when a block is sent.
        self.shares = [shares_sent(plan, program.instructions) for program in programs]
        self.backward = [(0.0, 0.0) for _ in programs]  # its begin and end
        self.ends = [0.0] * self.num_steps
        self.announced: list[float] = []  # when the leader announced each step
        for edge in plan.edges:
            self.channels[edge.index] = Channel(depths.get(edge.index, _DEPTH))
        self.link_free: dict[tuple[int, int], float] = {}
        self.hosts, self.host_of = _hosts(costs, len(programs))

    def run(self) -> None:
        super().run()
        stuck = [w for w, step in enumerate(self.steps) if step < self.num_steps]
        if stuck:
            first = self.programs[stuck[0]][self.positions[stuck[0]]]
            raise ScheduleError(
                f"worker {stuck[0]} can never run '{first}'; {len(stuck)} worker(s) cannot go on"
            )

    def begin(self, worker: int) -> bool:
        while self.steps[worker] < self.num_steps:
            if super().begin(worker):
                return True
            if self.positions[worker] < len(self.programs[worker]):
                return False
            step = self.steps[worker]
            self.ends[step] = max(self.ends[step], self.now)
            self.steps[worker] += 1
            self.positions[worker] = 0
        return False

    def can_begin(self, worker: int, instruction: Instruction | None) -> bool:
        if self.positions[worker] == 1 and not self._has_ticket(worker):
            return False
        if not super().can_begin(worker, instruction):
            return False
        self.starts[worker] = self.now
        return True

    def _has_ticket(self, worker: int) -> bool:
        """Whether a worker knows of its step; it is stirred when it does."""
        if self.leader is None or worker == self.leader:
            return True
        if self.steps[worker] >= len(self.announced):
            return False
        return self._ticket_s(worker, self.steps[worker]) <= self.now

    def _ticket_s(self, worker: int, step: int) -> float:
        assert self.leader is not None
        link = self.costs.links.get((self.leader, worker), _AT_ONCE)
        return self.announced[step] + link.latency_s

    def compute(self, worker: int, seconds: float) -> None:
        host = self.host_of[worker]
        self.hosts[host].start(self.now, worker, seconds)
        self._note_end(host)

    def _note_end(self, host: int) -> None:
        end = self.hosts[host].next_end()
        if end != math.inf:
            self.at(end, len(self.programs) + host, lambda: self._end_on(host))

    def _end_on(self, host: int) -> None:
        if self.hosts[host].next_end() == self.now:  # else another computation came in between
            worker = self.hosts[host].finish(self.now)
            self._note_end(host)
            self.end(worker)

    def finish(self, worker: int) -> None:
        instruction = self.programs[worker][self.positions[worker]]
        if instruction is not None and instruction.opcode is Opcode.BACKWARD:
            self.backward[worker] = self.starts[worker], self.now
        is_seen = instruction is not None or self.now > self.starts[worker]
        if is_seen and self.steps[worker] == self.shown:
            span = Span(instruction, self.begins[worker], self.starts[worker], self.now)
            self.spans[worker].append(span)
        self.begins[worker] = self.now
        super().finish(worker)
        if instruction is None and worker == self.leader:
            self.announced.append(self.now)
            for other in range(len(self.programs)):
                self.stir(other, self._ticket_s(other, -1))

    def seconds(self, worker: int, instruction: Instruction | None) -> float:
        if instruction is None:
            return self.costs.between.get(worker, 0.0)
        return self.costs.seconds(instruction, worker)

    def arrival(self, edge_index: int) -> float:
        edge = self.plan.edges[edge_index]
        pair = (edge.source, edge.destination)
        link = self.costs.links.get(pair, _AT_ONCE)
        size = edge.meta.size_bytes
        busy = self.costs.send.get(edge_index, 0.0) + self.costs.receive.get(edge_index, 0.0)
        flight = max(0.0, link.seconds(size) - busy)
        on_the_wire = min(flight, size / link.bytes_per_s)
        left = max(self._sent_s(edge.source), self.link_free.get(pair, 0.0)) + on_the_wire
        self.link_free[pair] = left
        return max(self.now, left + flight - on_the_wire)

    def _sent_s(self, worker: int) -> float:
        """When what a worker has just sent left it."""
        share = self.shares[worker].get(self.positions[worker] - 2)  # None stands before them
        begin_s, end_s = self.backward[worker]
        return self.now if share is None else begin_s + share * (end_s - begin_s)


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
