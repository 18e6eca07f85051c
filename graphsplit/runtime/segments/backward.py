"""Backward instructions, bound to what they work on."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from graphsplit.capture.graph import NodeKind
from graphsplit.capture.operations.opaque_call import (
    drawing_nothing,
    leaves_state,
    leaving_what_is_read,
)
from graphsplit.optimizers.parameter_hooks import HookState, KeptValues, hooks_leave
from graphsplit.optimizers.update import Updater
from graphsplit.partition.checks.one_state import opaque_calls, shared_elsewhere
from graphsplit.partition.plan import PartitionPlan, SumTerm
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import made_leaves
from graphsplit.runtime.segments.autograd import (
    accumulate,
    accumulate_all,
    edge_of,
    gradient_sum,
    keep_apart,
    run_tensor_hooks,
)
from graphsplit.runtime.segments.blocks import bind_add_block, bind_part
from graphsplit.runtime.segments.early import EarlyRun
from graphsplit.runtime.segments.part_sums import PartSums
from graphsplit.runtime.segments.weights_apart import ANCHOR, Pending
from graphsplit.runtime.step_state import Action, Gradient, StepState
from graphsplit.torch_ext.attributes import OwnHooks
from graphsplit.torch_ext.private import run_backward as run_torchs_backward

_GIVING = (Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT, Opcode.ACCUMULATE)


@dataclass(eq=False)
class BackwardBinder:
    """Binds a worker's backward instructions.

    Args:
        plan: The plan.
        state: Parameters and buffers of this worker, by node.
        updater: Knows the gradient with which the backward of a loss begins.
        hook_state: Python state that hooks on parameters of several workers share; more may come.
        sums: Adds the gradients of microbatches; None: one after the other, in ``.grad``.
        overtaken: The instructions before which later microbatches have computed their values.
        early: What can run inside a backward, by the backward.
    """

    _plan: PartitionPlan
    _state: Mapping[int, torch.Tensor]
    _updater: Updater
    _hook_state: Sequence[HookState]
    _sums: PartSums | None
    _overtaken: Container[Instruction]
    _early: Mapping[Instruction, EarlyRun]

    def __post_init__(self) -> None:
        nodes = self._plan.placed.graph.nodes
        self._kept = KeptValues({str(nodes[n].target): t for n, t in self._state.items()})
        # For each segment whose backward runs in two parts: what the first part leaves.
        self.pending: dict[int, list[Pending]] = {}

    def bind(self, instruction: Instruction) -> Action:
        """Bind an instruction: a function of the step's state."""
        sums, held = self._sums, self._hook_state
        if instruction.opcode is Opcode.ADD_UP:
            return lambda state: None if sums is None else sums.end_batch()
        if sums is not None and instruction.opcode is Opcode.ADD_BLOCK:
            return bind_add_block(self._plan, instruction, sums, self._state)
        is_sum = instruction.opcode is Opcode.ACCUMULATE
        if sums is not None and is_sum and self._plan.blocks_of(instruction.operand) is not None:
            return bind_part(self._plan, instruction, sums, self._state, _terms)
        run = self._bind(instruction)
        given_to = self._given_to(instruction) if sums is not None else ()
        if sums is not None and given_to:
            run = _apart(run, sums, given_to, instruction.microbatch)
        hooked = self._given_to(instruction) if instruction in self._overtaken else []

        def run_watching(state: StepState) -> None:
            if not held and not hooked:
                run(state)
                return
            with hooks_leave(held), self._kept.left_by(hooked):
                run(state)

        return run_watching

    def _bind(self, instruction: Instruction) -> Action:
        if instruction.opcode is Opcode.ACCUMULATE:
            return self._bind_accumulate(instruction.operand, instruction.microbatch)
        if instruction.opcode is Opcode.BACKWARD_WEIGHT:
            return self._bind_weight(instruction)
        run = _watching(self._bind_backward(instruction), self._plan, instruction.operand)
        if instruction.opcode is Opcode.BACKWARD_INPUT:
            return self._leaving_weights(instruction, run)
        return run

    def _given_to(self, instruction: Instruction) -> list[torch.Tensor]:
        """The parameters to whose gradient an instruction adds a microbatch's part."""
        operand, nodes = instruction.operand, self._plan.placed.graph.nodes
        if instruction.opcode is Opcode.ACCUMULATE:
            found = {operand}
        else:
            found = set(self._plan.io[operand].parameters)
            if instruction.opcode is not Opcode.BACKWARD:
                later = {
                    nodes[use.position].reads[index]
                    for use in self._plan.splits[operand].uses
                    for index, leaf in zip(use.operands, use.leaves, strict=True)
                    if leaf < 0
                }
                is_later = instruction.opcode is Opcode.BACKWARD_WEIGHT
                found = later if is_later else found - later
        return [self._state[p] for p in sorted(found) if nodes[p].kind is NodeKind.PARAMETER]

    def _bind_backward(self, instruction: Instruction) -> Action:
        segment, microbatch = instruction.operand, instruction.microbatch
        io, is_microbatched = self._plan.io[segment], self._plan.is_microbatched
        sums = [(root, self._plan.gradient_sums.get(root, ())) for root in io.roots]
        loss, given = self._plan.placed.graph.loss_node, self._plan.placed.graph.given_roots
        losses = {root for root in io.roots if self._plan.in_first_lane(root) == loss}
        parameters = [self._state[p] for p in io.parameters]
        leaves, loss_gradient = io.leaves, self._updater.loss_gradient
        nodes, contributions = self._plan.placed.graph.nodes, self._plan.contributions
        state_leaves = [nodes[contributions[c].value].is_state for c in leaves]
        made = frozenset(made_leaves(self._plan, instruction))
        is_apart, early = instruction.opcode is Opcode.BACKWARD_INPUT, self._early.get(instruction)
        pending = self.pending[segment] if is_apart else []
        asking = [*parameters, ANCHOR] if is_apart else parameters
        seeds = [
            (index, self._plan.seeds[leaf])
            for index, leaf in enumerate(leaves)
            if leaf in self._plan.seeds
        ]

        def run_backward(state: StepState) -> None:
            tensors, incoming = [], []
            is_kept, roots, own = state.is_kept, state.roots[microbatch], state.leaves[microbatch]
            roots, own = (roots.copy(), own.copy()) if is_kept else (roots, own)
            for root, terms in sums:
                tensor = roots.pop(root)
                if root in given:
                    later = _terms(state, microbatch, terms)
                    gradient = gradient_sum((state.given.get(root), *later))
                else:
                    gradient = _gradient_sum(state, microbatch, terms)
                if root in losses:
                    one = loss_gradient(tensor)
                    if state.microbatches is not None:
                        one = one * state.microbatches.weights[microbatch]
                    gradient = one if gradient is None else gradient_sum((one, gradient))
                if gradient is not None and tensor is not None and tensor.requires_grad:
                    tensors.append(tensor)
                    incoming.append(gradient)
            inputs = [own.pop(c) for c in leaves]
            for index, terms in seeds:
                gradient = _gradient_sum(state, microbatch, terms)
                if gradient is not None and inputs[index] is not None:
                    tensors.append(inputs[index])
                    incoming.append(gradient)
            if state.totals is not None:
                apart = _backward_apart(tensors, incoming, inputs, parameters, state.totals, state)
                state.collected[microbatch].update(zip(leaves, apart, strict=True))
                return
            fresh = [parameter for parameter in parameters if parameter.grad is None]
            came = early.begin(state, microbatch, leaves, inputs) if early else frozenset()
            results = backward(tensors, incoming, inputs, asking, state_leaves, state)
            found = zip(leaves, results, strict=True)
            state.collected[microbatch].update((c, g) for c, g in found if c in made - came)
            if fresh and (is_microbatched or pending):  # what waits must not change meanwhile
                waiting = results if is_microbatched else []
                keep_apart(fresh, [*waiting, *(later.gradient for later in pending)])

        return run_backward

    def _leaving_weights(self, instruction: Instruction, run_backward: Action) -> Action:
        segment, microbatch = instruction.operand, instruction.microbatch
        pending = self.pending[segment]

        def backward_input(state: StepState) -> None:
            run_backward(state)
            state.pending[microbatch][segment] = tuple(pending)
            pending.clear()

        return backward_input

    def _bind_weight(self, instruction: Instruction) -> Action:
        segment, microbatch = instruction.operand, instruction.microbatch
        split, nodes = self._plan.splits[segment], self._plan.placed.graph.nodes
        parameters = {
            use.position: [
                self._state[nodes[use.position].reads[operand]] if leaf < 0 else None
                for operand, leaf in zip(use.operands, use.leaves, strict=True)
            ]
            for use in split.uses
        }
        nothing: dict[int, Gradient] = dict.fromkeys(split.leaves)

        def backward_weight(state: StepState) -> None:
            collected = state.collected[microbatch]
            collected.update(nothing)
            for later in state.pending[microbatch].pop(segment):
                found = later.compute()
                own: list[tuple[torch.Tensor, Gradient]] = []
                owned = parameters[later.use.position]
                for leaf, parameter, gradient in zip(later.use.leaves, owned, found, strict=True):
                    if parameter is None:
                        collected[leaf] = gradient
                    else:
                        own.append((parameter, gradient))
                accumulate_all([p for p, _ in own], [g for _, g in own], (later.gradient,))

        return backward_weight

    def _bind_accumulate(self, value: int, microbatch: int) -> Action:
        terms = self._plan.gradient_sums[value]
        if self._plan.placed.graph.nodes[value].kind is NodeKind.INPUT:
            key = value, microbatch
            return lambda state: state.of_inputs.update(
                {key: gradient_sum((state.given.get(value), *_terms(state, microbatch, terms)))}
            )
        own = [index for index, term in enumerate(terms) if term.contribution is not None]
        parameter = self._state[value]

        def accumulate_shared(state: StepState) -> None:
            found = _terms(state, microbatch, terms)
            if state.totals is not None:
                total = gradient_sum((state.totals.get(id(parameter)), *found))
                if total is not None:
                    state.totals[id(parameter)] = total
                return
            gradient = gradient_sum(found)
            if gradient is not None:
                # A term of this worker may be the gradient of another parameter as well.
                is_shared = any(gradient is found[index] for index in own)
                gradient = run_tensor_hooks(parameter, gradient)
                accumulate(parameter, gradient, is_shared=is_shared)

        return accumulate_shared


def overtaken(plan: PartitionPlan, instructions: Sequence[Instruction]) -> frozenset[Instruction]:
    """The instructions that give a parameter its gradient after later microbatches have used it.

    A sum of what several workers give is late for all microbatches but the last: its parameter was
    sent to the others before the first one.
    """
    found, newest = set(), 0
    last = max((i.microbatch for i in instructions), default=0)
    for instruction in instructions:
        opcode, microbatch = instruction.opcode, instruction.microbatch
        if opcode is Opcode.FORWARD:
            newest = max(newest, microbatch)
        is_sum = opcode is Opcode.ACCUMULATE and plan.num_workers > 1
        if opcode in _GIVING and (microbatch < newest or (is_sum and microbatch < last)):
            found.add(instruction)
    return frozenset(found)


def _apart(
    run: Action, sums: PartSums, parameters: Sequence[torch.Tensor], microbatch: int
) -> Action:
    """Keep what an instruction gives to parameters for the sum of its parts."""

    def run_apart(state: StepState) -> None:
        start = state.microbatches.start if state.microbatches is not None else 0
        with sums.apart(parameters, start + microbatch):
            run(state)

    return run_apart


def _watching(run: Action, plan: PartitionPlan, segment: int) -> Action:
    """A segment's backward, in which hooks must not change what others can reach, nor draw."""
    watched = [
        (call, tuple(shared_elsewhere(plan, position, in_backward=True)))
        for position, call in opaque_calls(plan)
        if plan.segmentation.segment_of[position] == segment
    ]

    def run_watching(state: StepState) -> None:
        own = state.microbatches
        with ExitStack() as stack:
            for call, held in watched:
                stack.enter_context(leaves_state(f"backward of {call.label}", call.source, held))
                if plan.is_microbatched or not (own is None or own.are_last):
                    # In one process the next microbatch finds it changed.
                    stack.enter_context(leaving_what_is_read(call))
            stack.enter_context(drawing_nothing([call for call, _ in watched]))
            run(state)

    is_apart = plan.num_workers > 1 or plan.is_microbatched
    return run_watching if watched and is_apart else run


def _gradient_sum(state: StepState, microbatch: int, terms: tuple[SumTerm, ...]) -> Gradient:
    found = _terms(state, microbatch, terms)
    return found[0] if len(found) == 1 else gradient_sum(found)


def _terms(state: StepState, microbatch: int, terms: tuple[SumTerm, ...]) -> list[Gradient]:
    return [
        state.collected[microbatch].pop(term.contribution)
        if term.contribution is not None
        else state.received[microbatch].pop(term.edge)  # type: ignore[arg-type]
        for term in terms
    ]


def backward(
    roots: Sequence[torch.Tensor | GradientEdge],
    root_gradients: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor | None],
    parameters: Sequence[torch.Tensor],
    state_leaves: Sequence[bool] = (),
    state: StepState | None = None,
) -> list[Gradient]:
    """Backward of one segment.

    Autograd adds to ``.grad`` of each parameter as soon as its gradient is there, and frees it. So
    a segment never holds the gradients of all its weights a second time. Of a leaf that stands for
    a parameter ``.grad`` is taken, too: no backward goes on from there.

    Args:
        roots: Where it begins.
        root_gradients: Their gradients.
        leaves: What others sent. None stands for a value of a branch that was not taken.
        parameters: What gets a ``.grad``.
        state_leaves: For each leaf, whether it stands for a parameter; empty: none does.
        state: Whether another backward may come, and whether the same way; None: none comes.

    Returns:
        The gradient of each leaf; of values the raw one, with the strides autograd gave it: what
        ``.grad`` of a leaf holds may have been laid out anew, and other strides can mean other bits
        further on. None where nothing flows.
    """
    found: list[Gradient] = [None] * len(leaves)
    there = [leaf for leaf in leaves if leaf is not None]
    if not roots or not (there or parameters):
        return found
    # Kept until the end: a leaf where backward begins has no node but this.
    nodes = [
        _take_instead_of_adding(leaf, found, index)
        for index, leaf in enumerate(leaves)
        if leaf is not None and not (state_leaves and state_leaves[index])
    ]
    OwnHooks.count += len(nodes)
    # What torch.autograd.backward calls once it has checked its arguments, which takes it longer
    # than the backward of a small layer does.
    run_torchs_backward(
        tuple(roots),
        tuple(root_gradients),
        state is not None and state.retains,
        False,
        (*there, *[one if one.requires_grad else edge_of(one) for one in parameters]),
        True,
        accumulate_grad=True,
    )
    for _, hook in nodes if state is not None and state.is_kept else ():
        hook.remove()
    del nodes
    for index, leaf in enumerate(leaves if any(state_leaves) else ()):
        if leaf is not None and state_leaves[index]:
            found[index], leaf.grad = leaf.grad, None
    return found


def _backward_apart(
    roots: list[torch.Tensor],
    root_gradients: list[torch.Tensor],
    leaves: Sequence[torch.Tensor | None],
    parameters: Sequence[torch.Tensor],
    totals: dict[int, torch.Tensor],
    state: StepState,
) -> list[Gradient]:
    """Backward of one segment that adds gradients of parameters to totals, not to ``.grad``.

    What later calls have given enters autograd first, so each use here is added by itself, as in
    eager mode.

    Args:
        roots: As for ``backward``; and so are the next three.
        root_gradients: Their gradients.
        leaves: What others sent.
        parameters: What gets a gradient.
        totals: The gradients so far, by the parameter's id.
        state: As for ``backward``.
    """
    edges = [edge_of(parameter) for parameter in parameters]
    begins: list[torch.Tensor | GradientEdge] = [*roots]
    for parameter, edge in zip(parameters, edges, strict=True):
        if roots and id(parameter) in totals:
            begins.append(edge)
            root_gradients.append(totals[id(parameter)])
    taken: list[Gradient] = [None] * len(parameters)
    hooks = [edge.node.register_prehook(_taking(taken, i)) for i, edge in enumerate(edges)]
    OwnHooks.count += len(hooks)
    found = backward(begins, root_gradients, leaves, parameters, state=state)
    for hook in hooks:  # the graphs of earlier calls hold the same nodes
        hook.remove()
    for parameter, total in zip(parameters, taken, strict=True):
        if total is not None:
            totals[id(parameter)] = total
    return found


def _take_instead_of_adding(
    leaf: torch.Tensor, found: list[Gradient], index: int
) -> tuple[Node, RemovableHandle]:
    node = get_gradient_edge(leaf).node
    return node, node.register_prehook(_taking(found, index))


def _taking(found: list[Gradient], index: int) -> Callable[[tuple[Gradient, ...]], tuple[None]]:
    def take(given: tuple[Gradient, ...]) -> tuple[None]:
        (found[index],) = given
        return (None,)

    return take
