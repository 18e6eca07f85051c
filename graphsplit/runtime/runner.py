"""Run one worker's program, step after step."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from graphsplit.capture.graph import Node, NodeKind
from graphsplit.errors import GraphsplitError, StepFailedError
from graphsplit.partition.plan import Edge, EdgeKind
from graphsplit.program.early import early_needs
from graphsplit.program.instruction import BACKWARD, Instruction, Opcode
from graphsplit.program.liveness import GENERATOR, HeldValue, is_held_once, last_uses
from graphsplit.program.lower import first_of_backward, late_edges
from graphsplit.root_cause import Location
from graphsplit.runtime.borrowed import bind_receive_state, bind_send_state
from graphsplit.runtime.buffer_updates import bind_fold, bind_receive_buffers, bind_send_buffers
from graphsplit.runtime.channels import (
    ChannelEnds,
    announcing,
    before_waiting_work,
    first_received,
    held_sends,
    holding,
    letting_others_first,
    sparse_gradient,
)
from graphsplit.runtime.parts import RunnerParts
from graphsplit.runtime.randomness import (
    GENERATORS,
    bind_receive_generators,
    bind_send_generators,
)
from graphsplit.runtime.segments.autograd import gradient_sum
from graphsplit.runtime.segments.backward import BackwardBinder, overtaken
from graphsplit.runtime.segments.blocks import bind_send_block
from graphsplit.runtime.segments.changing_state import (
    changing_state,
    run_with_copies,
    with_own_generator,
)
from graphsplit.runtime.segments.code import SegmentCode, build_code
from graphsplit.runtime.segments.early import EarlyRun
from graphsplit.runtime.shared_norms import bind_receive_reduction, bind_reduce, bind_send_reduction
from graphsplit.runtime.step_state import Action, Microbatches, StepState
from graphsplit.runtime.whereabouts import location, step_failed, where
from graphsplit.transport.base import Sender

_SUMS = (Opcode.ACCUMULATE, Opcode.ADD_BLOCK, Opcode.ADD_UP)
_ALL_RUN = (Opcode.REDUCE, Opcode.CLIP, Opcode.OPTIMIZER)
NO_NUMBERS: Mapping[str, Any] = MappingProxyType({})


def _asking(value: torch.Tensor | None) -> torch.Tensor | None:
    """A leaf that asks for a gradient; None stands for a value of a branch that was not taken."""
    return None if value is None else value.detach().requires_grad_(True)


def _weakly(source: Callable[[], Any]) -> Callable[[], Any]:
    """A source of positions that holds nothing: the job tells the latest one for ever."""
    method = weakref.WeakMethod(source)

    def tell() -> Any:
        known = method()
        return "" if known is None else known()

    return tell


class ProgramRunner:
    """One worker's program, ready to run.

    Each instruction is bound once to what it works on, so that a step is a plain loop over
    actions. Used by one thread.

    Attributes:
        instructions: The program.
        nodes: The nodes of the plan's graph.
        state: Parameters and buffers of this worker, by node.
        plan_number: Number of the plan in the job.
        has_run: Whether its engine has noted a step.
    """

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._told = _weakly(self.where), _weakly(self.location)
        self._plan = parts.plan
        self.nodes = parts.plan.placed.graph.nodes
        self.state, self.plan_number = parts.state, parts.plan_number
        self._code: dict[tuple[int, bool], SegmentCode] = {}
        self.instructions = instructions = parts.program.instructions
        self._apart = {  # microbatches of segments whose weight gradients are computed apart
            (i.operand, i.microbatch) for i in instructions if i.opcode is Opcode.BACKWARD_WEIGHT
        }
        self._input_index = {
            p: int(n.target) for p, n in enumerate(self.nodes) if n.kind is NodeKind.INPUT
        }
        self._first_of_backward = first_of_backward(parts.plan, parts.program)
        self._grad_enabled = parts.plan.placed.graph.mode.records_gradients
        self._owned_outputs = {
            output.node: parts.state[output.node].detach()
            for output in parts.plan.placed.graph.outputs
            if output.node is not None and output.node in parts.state
        }
        self._changing = changing_state(parts.plan, parts.state)
        self._is_microbatched = parts.plan.is_microbatched
        self._ends = ends = ChannelEnds.open(
            parts.plan,
            parts.plan_number,
            worker=parts.program.worker,
            transport=parts.transport,
            depths=parts.depths,
        )
        self._senders, self._receivers = ends.senders, ends.receivers
        sums = parts.sums if self._is_microbatched else None
        early = self._early_runs()
        self._backward = BackwardBinder(
            *(parts.plan, parts.state, parts.updater, parts.hook_state, sums),
            *(overtaken(parts.plan, instructions), early),
        )
        self._backward.pending = {segment: [] for segment, _ in self._apart}
        self._actions = [self._bind(i) for i in instructions]
        for position, held in last_uses(parts.plan, parts.program).items():
            self._actions[position] = _freeing(self._actions[position], held)
        for position in held_sends(instructions, parts.plan):
            sender = self._senders[instructions[position].operand]
            if type(sender).hold is not Sender.hold:
                self._actions[position] = holding(sender, self._actions[position])
        self._announce_values()
        if hasattr(os, "sched_yield"):
            for position in before_waiting_work(instructions):
                self._actions[position] = letting_others_first(self._actions[position])
        self._in_order = self._actions.copy()
        for run in early.values():
            for position in run.positions:
                self._actions[position] = run.unless_done(position, self._in_order[position])
        self._bound = self._actions
        waits = [p for p, i in enumerate(instructions) if i.opcode is Opcode.RECEIVE]
        waits.append(len(instructions))
        self._first_wait = waits[0]
        self._first_received = first_received(parts.program, parts.plan)
        self._first_wait_of_backward = next(p for p in waits if p >= self._first_of_backward)
        self.position, self.step, self.has_run = 0, -1, False

    def _early_runs(self) -> dict[Instruction, EarlyRun]:
        """The instructions that run inside a backward, by the backward."""
        return {
            self.instructions[position]: EarlyRun(position + 1, needs, self._run_early)
            for position, needs in early_needs(self._plan, self.instructions).items()
        }

    def _announce_values(self) -> None:
        """Before each computation, announce the values that are sent right after it.

        Only as many as there are cores to spare: who was told looks for the value without sleeping.
        """
        late = late_edges(self._plan)
        spare = max(1, (os.cpu_count() or 1) - 1)
        for position, instruction in enumerate(self.instructions):
            if instruction.opcode is not Opcode.FORWARD and instruction.opcode not in BACKWARD:
                continue
            after = itertools.islice(self.instructions, position + 1, None)
            following = itertools.takewhile(lambda i: i.opcode is Opcode.SEND, after)
            edges = [i.operand for i in following if i.operand not in late]
            senders = [self._senders[edge] for edge in edges[:spare]]
            if senders:
                self._actions[position] = announcing(senders, self._actions[position])

    def node_at(self, file: str, line: int) -> Node | None:
        """The operation that a line of generated code runs, if it is one of this program's."""
        found = (code.node_at_line.get((file, line)) for code in self._code.values())
        return next((node for node in found if node is not None), None)

    def watch(self, wrap: Callable[[int, Action], Action] | None) -> None:
        """Run instructions inside what ``wrap`` makes of each, from the next step on.

        Args:
            wrap: Given an instruction's position and what it is bound to; None: as it is bound.
        """
        self._actions = self._bound
        if wrap is not None:
            self._actions = [wrap(position, action) for position, action in enumerate(self._bound)]

    def where(self) -> str:
        """The current position in words, for heartbeats and failures."""
        return where(self._plan, self.instructions, self.step, self.position)

    def location(self) -> Location:
        """The current position in parts."""
        return location(self._plan, self.instructions, self.step, self.position)

    def run(
        self,
        step: int,
        inputs: Sequence[Sequence[torch.Tensor | None]],
        *,
        numbers: Mapping[str, Any] = NO_NUMBERS,
        microbatches: Microbatches | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepState:
        """Run one step.

        Args:
            step: Number of the step in the job, the same on every worker.
            inputs: For each microbatch, the graph's inputs.
            numbers: Numbers made of the inputs' sizes, by name.
            microbatches: Their weights and generators; None where the step is one whole batch.
            meanwhile: Something else to do, once, before this worker first waits for a value.

        Returns:
            What the step left: ``values`` holds the outputs this worker was sent or made.

        Raises:
            StepFailedError: An operation raised; names it and the user's line.
            TransportError: A value could not be moved.
            JobFailedError: The job was aborted elsewhere.
        """
        state = self._begin(step, inputs, numbers, microbatches)
        with torch.set_grad_enabled(self._grad_enabled):
            if meanwhile is not None:
                self._run_until(self._first_wait, state)
                meanwhile()
            self._run_until(len(self._actions), state)
        return state

    def run_forward(
        self, step: int, inputs: Sequence[Sequence[torch.Tensor | None]], numbers: Mapping[str, Any]
    ) -> StepState:
        """Run the forward of a call, as ``run`` does; ``run_backward`` goes on from its state."""
        state = self._begin(step, inputs, numbers)
        with torch.set_grad_enabled(self._grad_enabled):
            self._run_until(self._first_of_backward, state)
        return state

    def run_backward(self, state: StepState, meanwhile: Callable[[], None]) -> None:
        """Run the backward of a call, whose ``state.given`` are its outputs' gradients."""
        self.step = state.step
        self.position = self._first_of_backward
        with torch.set_grad_enabled(self._grad_enabled):
            self._run_until(self._first_wait_of_backward, state)
            meanwhile()
            self._run_until(len(self._actions), state)

    def _begin(
        self,
        step: int,
        inputs: Sequence[Sequence[torch.Tensor | None]],
        numbers: Mapping[str, Any],
        microbatches: Microbatches | None = None,
    ) -> StepState:
        self._parts.position.text_source, self._parts.position.location_source = self._told
        self.step, self.position = step, 0
        if self._parts.sums is not None and microbatches is not None and not microbatches.start:
            self._parts.sums.begin_batch()
        values = [self._owned_outputs.copy() for _ in inputs]
        empty: list[Any] = [*map(list, zip(*[({}, {}, {}, {}, {}) for _ in inputs], strict=True))]
        return StepState(step, inputs, numbers, microbatches, values, *empty)

    def _run_until(self, end: int, state: StepState) -> None:
        reported, actions = self._parts.position, self._actions
        reported.calls.computing = self._is_computing
        try:
            for position in range(self.position, end):
                self.position = position
                reported.progress += 1
                actions[position](state)
        except (GraphsplitError, KeyboardInterrupt, SystemExit):
            raise
        except Exception as error:
            raise self._failure(error) from error
        finally:
            reported.calls.computing = None
        self.position = end

    def _run_early(self, position: int, state: StepState) -> None:
        """Run an instruction inside the backward in front of it."""
        behind, self.position = self.position, position
        self._parts.position.progress += 1
        self._in_order[position](state)
        self.position = behind

    def _is_computing(self) -> bool:
        """Whether the instruction under way may run code that other workers do not come to."""
        return self.instructions[self.position].opcode not in _ALL_RUN

    def expect_first_value(self) -> None:
        """Have the first value of the next step wake this worker, whatever it then waits for."""
        if self._first_received is not None:
            self._receivers[self._first_received].expect()

    def next_instruction(self) -> Instruction | None:
        """The instruction that runs, or runs next; None at the end of the step."""
        instructions = self._parts.program.instructions
        return instructions[self.position] if self.position < len(instructions) else None

    def _failure(self, error: Exception) -> StepFailedError:
        instruction = self.instructions[self.position]
        code, node = self._code.get(self._code_key(instruction)), None
        if instruction.opcode is Opcode.FORWARD and code is not None:
            node = code.failing_node(error)
        return step_failed(error, self.where(), self.location(), self.nodes, node)

    def _bind(self, instruction: Instruction) -> Action:
        opcode, operand = instruction.opcode, instruction.operand
        if opcode is Opcode.FORWARD:
            return self._bind_forward(instruction)
        if opcode in BACKWARD or opcode in _SUMS:
            return self._backward.bind(instruction)
        if opcode is Opcode.FOLD:
            return bind_fold(self._plan, instruction, self._parts.state, self._source)
        if opcode is Opcode.SEND:
            return self._bind_send(self._plan.edges[operand], instruction.microbatch)
        if opcode is Opcode.RECEIVE:
            return self._bind_receive(self._plan.edges[operand], instruction.microbatch)
        updater = self._parts.updater
        if opcode is Opcode.ZERO_GRADIENTS:
            return lambda state: self._zero_gradients()
        if opcode is Opcode.OPTIMIZER:
            return lambda state: updater.step()
        return bind_reduce(opcode, updater, self._parts.program.worker)

    def _zero_gradients(self) -> None:
        self._parts.updater.zero_gradients()
        if self._parts.sums is not None:
            self._parts.sums.begin_step()

    def _code_key(self, instruction: Instruction) -> tuple[int, bool]:
        """A segment, and whether its weight gradients are computed apart."""
        segment, microbatch = instruction.operand, instruction.microbatch
        return segment, (segment, microbatch) in self._apart

    def _bind_forward(self, instruction: Instruction) -> Action:
        segment, microbatch = instruction.operand, instruction.microbatch
        key = self._code_key(instruction)
        if key not in self._code:
            pending = self._backward.pending[segment] if key[1] else None
            self._code[key] = build_code(self._plan, segment, self._parts.compiler, pending=pending)
        run = self._code[key].run
        if self._changing and self._is_microbatched:
            run = run_with_copies(run, self._changing)
        io = self._plan.io[segment]
        values = [self._reader(value, microbatch) for value in io.values]
        leaves = [
            (c, self._source(self._plan.contributions[c].value, microbatch)) for c in io.leaves
        ]
        outputs = [(position, self._plan.slot(position)) for position in io.outputs]
        roots = frozenset(io.roots)

        def forward(state: StepState) -> None:
            made = state.values[microbatch]
            arguments = [read(state) for read in values]
            own_leaves = state.leaves[microbatch]
            for contribution, read_source in leaves:
                leaf = _asking(read_source(state))
                own_leaves[contribution] = leaf
                arguments.append(leaf)
            results = run(*arguments)
            for (position, slot), result in zip(outputs, results, strict=True):
                if position in roots:
                    state.roots[microbatch][position] = result
                made[slot] = result.detach() if isinstance(result, torch.Tensor) else result

        if io.is_random and self._is_microbatched:
            is_first = self._plan.draws_first(segment)
            return with_own_generator(forward, microbatch, is_first=is_first)
        return forward

    def _reader(self, value: int, microbatch: int) -> Callable[[StepState], Any]:
        """The function that hands a segment a value without a gradient to send back.

        It asks for one all the same, if it does in eager mode: ``matmul`` chooses its kernel by
        that, inside ``no_grad`` too.
        """
        source, node = self._source(value, microbatch), self.nodes[value]
        if node.asks_grad and node.kind is NodeKind.OPERATION:
            return lambda state: _asking(source(state))
        return source

    def _source(self, value: int, microbatch: int) -> Callable[[StepState], Any]:
        """Where a segment finds a value from outside."""
        node = self.nodes[value]
        if node.kind is NodeKind.CONSTANT:
            constant = self._plan.placed.graph.constants[node.name]
            return lambda state: constant
        if node.kind is NodeKind.INPUT:
            index = self._input_index[value]
            return lambda state: state.inputs[microbatch][index]
        if node.kind is NodeKind.NUMBER:
            name = node.name
            return lambda state: state.numbers[name]
        if node.is_state and self._plan.placed.workers[value] == self._parts.program.worker:
            tensor = self._parts.state[value]
            return lambda state: tensor
        if is_held_once(self._plan, value):
            microbatch = 0
        slot = self._plan.slot(value)
        return lambda state: state.values[microbatch][slot]

    def _bind_send(self, edge: Edge, microbatch: int) -> Action:
        send = self._ends.sending(edge, self.nodes[edge.value])
        value = edge.value
        if edge.kind is EdgeKind.REDUCTION:
            return bind_send_reduction(self._plan, edge, send)
        if edge.kind is EdgeKind.BLOCK and self._parts.sums is not None:
            return bind_send_block(self._plan, edge, microbatch, self._parts.sums, send)
        if edge.kind is EdgeKind.BUFFERS:
            return bind_send_buffers(self._plan, edge, self._parts.state, send)
        if edge.kind in GENERATORS:
            return bind_send_generators(self._plan, edge, microbatch, send)
        if edge.kind is EdgeKind.GRADIENT:
            contributions = edge.contributions

            def send_gradient(state: StepState) -> None:
                collected = state.collected[microbatch]
                found = [collected.pop(c) for c in contributions]
                total = found[0] if len(found) == 1 else gradient_sum(found)
                if total is not None and total.layout is not torch.strided:
                    raise sparse_gradient(self.nodes[value], edge)
                send(total, step=state.step, microbatch=microbatch)

            return send_gradient
        if self.nodes[value].is_state:
            return bind_send_state(self._plan, edge, microbatch, self._parts.state, send)
        slot = self._plan.slot(value)
        return lambda state: send(
            state.values[microbatch][slot], step=state.step, microbatch=microbatch
        )

    def _bind_receive(self, edge: Edge, microbatch: int) -> Action:
        receive = self._ends.receiving(edge, self.nodes[edge.value])
        index, value = edge.index, edge.value
        slot = self._plan.slot(value)
        if edge.kind is EdgeKind.REDUCTION:
            return bind_receive_reduction(self._plan, edge, receive)
        if edge.kind is EdgeKind.BUFFERS:
            return bind_receive_buffers(self._plan, edge, self._parts.state, receive)
        if edge.kind in GENERATORS:
            return bind_receive_generators(self._plan, edge, microbatch, receive)

        def receive_value(state: StepState) -> None:
            state.values[microbatch][slot] = receive(step=state.step, microbatch=microbatch)

        def receive_gradient(state: StepState) -> None:
            state.received[microbatch][index] = receive(step=state.step, microbatch=microbatch)

        if edge.kind in (EdgeKind.GRADIENT, EdgeKind.BLOCK):
            return receive_gradient
        if self.nodes[value].is_state:
            return bind_receive_state(self._plan, edge, microbatch, receive)
        return receive_value


def _freeing(action: Action, held: Sequence[HeldValue]) -> Action:
    """Forget afterwards what nothing reads any more; see ``program.liveness``."""

    def run_and_free(state: StepState) -> None:
        action(state)
        for microbatch, value in held:
            if value == GENERATOR:
                del state.generators[microbatch]
            else:
                del state.values[microbatch][value]

    return run_and_free
