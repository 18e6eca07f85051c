"""Costs of computing and moving, as policies, the simulator and the profiler know them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from graphsplit.encoding.fields import integer, number, string
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
