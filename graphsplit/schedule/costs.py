"""Costs of computing and moving, as policies, the simulator and the profiler know them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from graphsplit.encoding.fields import integer, number, string
from graphsplit.partition.plan import EdgeKind, PartitionPlan
from graphsplit.program.event_loop import UNITS
from graphsplit.program.instruction import Instruction, Opcode

Seconds = Annotated[float, number(0, math.inf)]
Rate = Annotated[float, number(1e-12, math.inf)]
Count = Annotated[int, integer(1, 1 << 20)]
Size = Annotated[int, integer(0, 1 << 62)]


@dataclass(frozen=True)
class LinkCost:
    """The cost of moving a message from one worker to another.

    Attributes:
        latency_s: From the send of an empty message until its receiver goes on, in seconds.
        bytes_per_s: How many more bytes arrive each second.
    """

    latency_s: Seconds
    bytes_per_s: Rate

    def seconds(self, num_bytes: int) -> float:
        """How long a message of this size takes."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Host:
    """A machine whose cores some workers share.

    Attributes:
        workers: Their ranks.
        cores: How many cores they may use.
    """

    workers: tuple[int, ...]
    cores: Count


@dataclass(frozen=True)
class Costs:
    """The costs of one microbatch, in seconds and bytes.

    Seconds are those that a worker needs while it has a core to itself. Where more compute than a
    host has cores, the simulator stretches them.

    Attributes:
        forward: Seconds of each segment's forward, by segment.
        backward_input: Seconds of the part of its backward that others wait for.
        backward_weight: Seconds of the part that only the optimizer waits for; 0 where the two are
            not apart.
        activations: Bytes that a segment holds from its forward until its backward.
        links: What moving costs, by source and destination.
        optimizer: Seconds of each worker's optimizer step, by worker.
        send: Seconds that a message keeps its sender busy, by edge; a part of what its link takes.
        receive: Seconds that it keeps its receiver busy once it is there, by edge; also a part.
        others: Seconds of all other instructions, by worker, opcode and operand.
        between: Seconds from the end of a worker's program to the begin of its next step: drawing
            batches, tickets, callbacks; by worker.
        hosts: Who shares cores with whom; a worker that is not in it has a core for itself.
        num_threads: How many cores a computation keeps busy, at the most.
        source: Where these numbers come from, in words: ``"measured over 3 steps"``.
        backward_whole: Seconds of a segment's backward in one piece, where they are known to be
            other than those of its two parts.
    """

    forward: Mapping[int, Seconds]
    backward_input: Mapping[int, Seconds]
    backward_weight: Mapping[int, Seconds]
    activations: Mapping[int, Size] = field(default_factory=dict)
    links: Mapping[tuple[int, int], LinkCost] = field(default_factory=dict)
    optimizer: Mapping[int, Seconds] = field(default_factory=dict)
    send: Mapping[int, Seconds] = field(default_factory=dict)
    receive: Mapping[int, Seconds] = field(default_factory=dict)
    others: Mapping[tuple[int, Opcode, int], Seconds] = field(default_factory=dict)
    between: Mapping[int, Seconds] = field(default_factory=dict)
    hosts: tuple[Host, ...] = ()
    num_threads: Count = 1
    source: Annotated[str, string(256)] = ""
    backward_whole: Mapping[int, Seconds] = field(default_factory=dict)

    def seconds(self, instruction: Instruction, worker: int) -> float:
        """How long an instruction keeps its worker busy; 0 where that is not known."""
        opcode, operand = instruction.opcode, instruction.operand
        if opcode is Opcode.FORWARD:
            return self.forward.get(operand, 0.0)
        if opcode is Opcode.BACKWARD:
            parts = self.backward_input.get(operand, 0.0) + self.backward_weight.get(operand, 0.0)
            return self.backward_whole.get(operand, parts)
        if opcode is Opcode.BACKWARD_INPUT:
            return self.backward_input.get(operand, 0.0)
        if opcode is Opcode.BACKWARD_WEIGHT:
            return self.backward_weight.get(operand, 0.0)
        if opcode is Opcode.SEND:
            return self.send.get(operand, 0.0)
        if opcode is Opcode.RECEIVE:
            return self.receive.get(operand, 0.0)
        if opcode is Opcode.OPTIMIZER:
            return self.optimizer.get(worker, 0.0)
        return self.others.get((worker, opcode, operand), 0.0)


# How long computations and messages take while a rule is played.


class EvenClock:
    """A clock for where no costs are known: all workers take equally long for a step.

    Whoever placed the modules knew what is slow: who has few of them, or shares one with other
    replicas, has the long ones. On each worker a forward takes one unit, a backward two, each part
    of one that is split takes one. Messages, and adding up gradients, take none.

    Args:
        computed: All computations of a step, each with its worker.
    """

    def __init__(self, computed: Iterable[tuple[int, Instruction]]) -> None:
        loads: dict[int, int] = {}
        for worker, instruction in computed:
            loads[worker] = loads.get(worker, 0) + UNITS.get(instruction.opcode, 0)
        most = max(loads.values(), default=0)
        self._units = {w: most * _FINE // load for w, load in loads.items() if load}

    def seconds(self, instruction: Instruction, worker: int) -> int:
        """How long a worker computes."""
        return UNITS.get(instruction.opcode, 0) * self._units.get(worker, 0)

    def delay(self, instruction: Instruction, source: int, destination: int) -> int:
        """How long what was computed is on its way to another worker."""
        return 0


_FINE = 720_720  # whole numbers, so that what takes equally long ends at one moment


@dataclass(frozen=True)
class CostClock:
    """A clock that goes by a model of the costs.

    Attributes:
        costs: The costs.
        sizes: Bytes that a segment's forward, or backward, sends to a worker.
    """

    costs: Costs
    sizes: Mapping[tuple[bool, int, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: PartitionPlan, costs: Costs) -> CostClock:
        """A clock for a plan."""
        sizes: dict[tuple[bool, int, int], int] = {}
        segment_of = plan.segmentation.segment_of
        for edge in plan.edges:
            if edge.kind is EdgeKind.GRADIENT:
                segments = {plan.contributions[c].segment for c in edge.contributions}
            else:
                segments = {segment_of[edge.value]}
            for segment in segments:
                key = (edge.kind is EdgeKind.GRADIENT, segment, edge.destination)
                sizes[key] = sizes.get(key, 0) + edge.meta.size_bytes
        return cls(costs, sizes)

    def seconds(self, instruction: Instruction, worker: int) -> float:
        """How long a worker computes."""
        return self.costs.seconds(instruction, worker)

    def delay(self, instruction: Instruction, source: int, destination: int) -> float:
        """How long what was computed is on its way to another worker."""
        link = self.costs.links.get((source, destination))
        if link is None:
            return 0.0
        is_gradient = instruction.opcode is not Opcode.FORWARD
        return link.seconds(self.sizes.get((is_gradient, instruction.operand, destination), 0))


Clock = EvenClock | CostClock
