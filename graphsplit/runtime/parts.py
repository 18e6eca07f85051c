"""The parts that a worker's program runs with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from graphsplit.cluster.member.identity import ReportedPosition
from graphsplit.optimizers.parameter_hooks import HookState
from graphsplit.optimizers.update import Updater
from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.lower import WorkerProgram
from graphsplit.runtime.segments.compiled import Compiler
from graphsplit.runtime.segments.part_sums import PartSums
from graphsplit.transport.base import Transport


@dataclass(frozen=True)
class RunnerParts:
    """The parts that a runner works with.

    Attributes:
        plan: The agreed plan.
        plan_number: Its number in the job; part of every channel's identity.
        program: This worker's program.
        depths: How many messages of an edge may be under way, where 2 are too few.
        state: Parameters and buffers of this worker, by node.
        transport: Moves values; None if the plan has a single worker.
        updater: What happens to the owned gradients at both ends of a step.
        position: Told of every instruction, for heartbeats.
        compiler: Compiles segments, or None.
        hook_state: Python state that hooks on parameters of several workers share.
        sums: Adds the gradients of microbatches; None: one after the other, in ``.grad``.
    """

    plan: PartitionPlan
    plan_number: int
    program: WorkerProgram
    depths: Mapping[int, int]
    state: Mapping[int, torch.Tensor]
    transport: Transport | None
    updater: Updater
    position: ReportedPosition = field(default_factory=ReportedPosition)
    compiler: Compiler | None = None
    hook_state: Sequence[HookState] = ()
    sums: PartSums | None = None
