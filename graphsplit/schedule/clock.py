"""How long computations and messages take while a rule is played."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphsplit.partition.plan import EdgeKind, PartitionPlan
from graphsplit.program.event_loop import UNITS
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.schedule.costs import Costs


class UnitClock:
    """A forward takes one unit, a backward two, each part of one that is split takes one.

    Messages, and adding up the gradient of a shared parameter, take none.
    """

    def seconds(self, instruction: Instruction, worker: int) -> float:
        """How long a worker computes."""
        return UNITS.get(instruction.opcode, 0)

    def delay(self, instruction: Instruction, source: int, destination: int) -> float:
        """How long what was computed is on its way to another worker."""
        return 0


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


Clock = UnitClock | CostClock
