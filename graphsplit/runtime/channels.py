"""The channels of a plan: what both ends know of each edge's messages, and one worker's ends."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch

from graphsplit.capture.graph import Node
from graphsplit.capture.operations.effects import never_written
from graphsplit.errors import StepFailedError
from graphsplit.partition.plan import Edge, EdgeKind, PartitionPlan
from graphsplit.partition.spans import gradient_spans, value_spans
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import WorkerProgram
from graphsplit.runtime.step_state import Action, StepState
from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport


def channel_specs(
    plan: PartitionPlan, plan_number: int, *, worker: int, depths: Mapping[int, int]
) -> dict[int, ChannelSpec]:
    """The messages of each edge that begins or ends on a worker, as both ends know them.

    Args:
        plan: The plan.
        plan_number: Its number in the job.
        worker: The worker.
        depths: How many messages of an edge may be under way, where 2 are too few.
    """
    spans = {**gradient_spans(plan), **value_spans(plan)}
    kept = never_written(plan.placed.graph.fx_graph)
    return {
        edge.index: _spec(
            plan,
            plan_number,
            edge,
            span_bytes=spans.get(edge.index, 0),
            depth=depths.get(edge.index, ChannelSpec.depth),
            kept=kept,
        )
        for edge in plan.edges
        if worker in (edge.source, edge.destination)
    }


def _spec(
    plan: PartitionPlan,
    plan_number: int,
    edge: Edge,
    *,
    span_bytes: int,
    depth: int,
    kept: AbstractSet[str],
) -> ChannelSpec:
    node = plan.placed.graph.nodes[edge.value]
    what = {
        EdgeKind.VALUE: "",
        EdgeKind.GRADIENT: "gradient of ",
        EdgeKind.GENERATOR: "generator state after ",
        EdgeKind.PROCESS_GENERATORS: "generators of the process after ",
        EdgeKind.BLOCK: "sum of gradients of ",
        EdgeKind.BUFFERS: "buffers that go with ",
        EdgeKind.REDUCTION: "reduction over all gradients, beside ",
    }[edge.kind]
    size = max(edge.meta.size_bytes, edge.meta.span_bytes, span_bytes, 1)
    return ChannelSpec(
        plan=plan_number,
        edge=edge.index,
        source=edge.source,
        destination=edge.destination,
        dtype=edge.meta.dtype,
        shape=edge.meta.static_shape,
        max_bytes=size,
        depth=depth,
        label=f"{what}{node.name} ({node.module_path or 'network'}): worker {edge.source} -> "
        f"worker {edge.destination}",
        lends=_is_kept_inside(plan, edge),
        keeps=edge.kind is EdgeKind.VALUE
        and plan.placed.graph.nodes[plan.in_first_lane(edge.value)].name in kept,
        device=edge.meta.device,
    )


def _is_kept_inside(plan: PartitionPlan, edge: Edge) -> bool:
    """Whether an edge's values are gone when the step is: neither outputs nor ``.grad``."""
    if edge.kind is EdgeKind.VALUE:
        value = plan.in_first_lane(edge.value)
        return all(output.node != value for output in plan.placed.graph.outputs)
    return edge.kind is EdgeKind.GRADIENT and not plan.placed.graph.nodes[edge.value].is_state


@dataclass
class ChannelEnds:
    """One worker's ends of a plan's channels, by edge.

    Attributes:
        specs: What is known of all messages that this worker sends or receives.
        senders: Where it sends.
        receivers: Where it receives.
    """

    specs: dict[int, ChannelSpec] = field(default_factory=dict)
    senders: dict[int, Sender] = field(default_factory=dict)
    receivers: dict[int, Receiver] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        plan: PartitionPlan,
        plan_number: int,
        *,
        worker: int,
        transport: Transport | None,
        depths: Mapping[int, int],
    ) -> ChannelEnds:
        """Open all of a worker's ends, those that need not wait for a peer first."""
        ends = cls(channel_specs(plan, plan_number, worker=worker, depths=depths))
        if not ends.specs:
            return ends
        assert transport is not None
        for index, spec in ends.specs.items():
            if spec.source == worker:
                ends.senders[index] = transport.open_sender(spec)
        for index, spec in ends.specs.items():
            if spec.destination == worker:
                ends.receivers[index] = transport.open_receiver(spec)
        return ends

    def sending(self, edge: Edge, node: Node) -> Callable[..., None]:
        """How an edge's values are sent: in the dtype of the edge, which loses nothing of them."""
        send, dtype = self.senders[edge.index].send, edge.meta.dtype
        if not _is_narrowed(edge, node):
            return send

        def narrow_and_send(value: torch.Tensor | None, *, step: int, microbatch: int) -> None:
            send(None if value is None else value.to(dtype), step=step, microbatch=microbatch)

        return narrow_and_send

    def receiving(self, edge: Edge, node: Node) -> Callable[..., torch.Tensor | None]:
        """How an edge's values are received: in the dtype of the value."""
        receive, meta = self.receivers[edge.index].receive, node.meta
        if not _is_narrowed(edge, node) or meta is None:
            return receive

        def receive_and_widen(*, step: int, microbatch: int) -> torch.Tensor | None:
            value = receive(step=step, microbatch=microbatch)
            return None if value is None else value.to(meta.dtype)

        return receive_and_widen


def _is_narrowed(edge: Edge, node: Node) -> bool:
    is_value = edge.kind in (EdgeKind.VALUE, EdgeKind.GRADIENT)
    return is_value and node.meta is not None and edge.meta.dtype != node.meta.dtype


def first_received(program: WorkerProgram, plan: PartitionPlan) -> int | None:
    """The edge whose value a worker needs before it can do anything in a step, if there is one.

    None where backward brings it: the script may do other things before that.
    """
    for instruction in program.instructions:
        if instruction.opcode is Opcode.RECEIVE:
            is_gradient = plan.edges[instruction.operand].kind is EdgeKind.GRADIENT
            return None if is_gradient else instruction.operand
        if instruction.opcode is not Opcode.ZERO_GRADIENTS:
            return None
    return None


def held_sends(instructions: Sequence[Instruction], plan: PartitionPlan) -> Iterator[int]:
    """Positions of sends that the next instruction follows with one to the same worker."""
    for position, (one, following) in enumerate(itertools.pairwise(instructions)):
        if one.opcode is Opcode.SEND and following.opcode is Opcode.SEND:
            edges = plan.edges[one.operand], plan.edges[following.operand]
            is_call = plan.placed.graph.mode.keeps_outputs_home
            if is_call and edges[0].kind is not edges[1].kind:
                continue  # forward ends in between
            if edges[0].destination == edges[1].destination:
                yield position


def before_waiting_work(instructions: Sequence[Instruction]) -> Iterator[int]:
    """Positions of what follows a send and can wait: weight gradients apart, and the optimizer."""
    can_wait = (Opcode.BACKWARD_WEIGHT, Opcode.OPTIMIZER)
    for position, (one, following) in enumerate(itertools.pairwise(instructions)):
        if one.opcode is Opcode.SEND and following.opcode in can_wait:
            yield position + 1


def announcing(senders: Sequence[Sender], action: Action) -> Action:
    """Announce the values that are sent right after it, so that their receivers are awake."""
    announcements = [sender.announce for sender in senders]

    def announce_and_run(state: StepState) -> None:
        for announce in announcements:
            announce()
        action(state)

    return announce_and_run


def holding(sender: Sender, action: Action) -> Action:
    """Tell that another value to the same worker follows."""

    def hold_and_send(state: StepState) -> None:
        sender.hold()
        action(state)

    return hold_and_send


def letting_others_first(action: Action) -> Action:
    """Yield the core before what nobody waits for, to a worker that a value sent before has woken.

    Where there are fewer cores than workers it may wait for this very core.
    """

    def yield_and_run(state: StepState) -> None:
        os.sched_yield()
        action(state)

    return yield_and_run


def sparse_gradient(node: Node, edge: Edge) -> StepFailedError:
    """Sparse gradients stay on the worker that makes them."""
    return StepFailedError(
        f"the gradient of {node.target} is sparse, and would have to be sent from worker "
        f"{edge.source} to worker {edge.destination}\n"
        f"  Fix: place all that uses it on worker {edge.destination}, or make the embedding with "
        f"sparse=False."
    )
