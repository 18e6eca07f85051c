"""Calls of a network: forward over all workers now, backward when the script asks for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Function

from graphsplit.batches.microbatches import Division
from graphsplit.batches.signature import Arguments, leaves
from graphsplit.capture.graph import Mode
from graphsplit.capture.operations.shared_outputs import MemoryPart
from graphsplit.distribute.values import LoopValue
from graphsplit.distribute.workers.loop import Loop, empty_as
from graphsplit.distribute.workers.twins import OUTPUT, Twin, sharing
from graphsplit.errors import ConfigurationError, RaisedInEagerError
from graphsplit.feeding.left_by_steps import note_left, share_left, share_written
from graphsplit.planning.ready_plan import ReadyPlan
from graphsplit.planning.step_plan import StepPhase
from graphsplit.planning.task import named_state
from graphsplit.runtime.step_state import StepState
from graphsplit.tensor_meta import DynamicSize
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass, pop_mode
from graphsplit.train.asking import answered
from graphsplit.train.cluster_engine import ClusterEngine
from graphsplit.train.outputs import unflatten_outputs


class NetworkCalls(ClusterEngine):
    """Runs the calls of one network; every method is called by all workers in the same order."""

    @property
    def is_casting(self) -> bool:
        """Whether calls run under autocast."""
        return self._task.autocast is not None

    def forward(self, arguments: Arguments) -> Call:
        """Run forward; with gradients, where the script records them."""
        mode = Mode.CALL if torch.is_grad_enabled() else Mode.LOOK
        division = Division(arguments, (arguments,))
        self._job.member.position.calls.pass_milestone()  # all are in the same one, or never meet
        self.planner.writes.pass_over_own()  # an operation is compared where it runs
        try:
            return self._call(mode, division)
        except RaisedInEagerError as error:
            self._let_go_on(error, mode)
            raise

    def _call(self, mode: Mode, division: Division) -> Call:
        planned = self._leading.given(mode, division, self._step)
        step, self._step = self._step, self._step + 1
        self._job.has_stepped = True
        (phase,) = planned.phases(division)
        known: AbstractContextManager[StepPhase] = nullcontext(phase)
        if phase.planned.asks:
            known = answered(phase, division, step, self.planner, self._job, self.progress)
        with DisableTorchFunctionSubclass(), known as phase:
            plan = phase.planned
            if plan.asks:
                self._end_in_error(phase, step)
            with self._sharing_left(plan) if plan.left_by_calls else nullcontext():
                state = plan.runner.run_forward(step, phase.inputs, plan.numbers)
            if plan.written_inputs:
                share_written(self._job.control, plan, phase.inputs[0], self._job.ranks)
        self.planner.writes.after_step()
        return Call(self, plan, state)

    def planner_tensors(self) -> Mapping[str, torch.Tensor]:
        """The network's parameters and buffers, by name."""
        return named_state(self._task.network, None)

    def load_network(self, state: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Load what this worker owns, as ``load_state_dict`` with these options does."""
        return self._gatherer().load_network(state, **options)

    def backward(self, call: Call, given: Mapping[int, torch.Tensor], loop: Loop) -> None:
        """Run the backward of a call, with the gradients of its outputs."""
        call.state.given = given
        modes = pop_mode() if loop.is_followed else nullcontext()
        is_left = bool(call.plan.left_by_calls)
        shared = self._sharing_left(call.plan) if is_left else nullcontext()
        with self._job.reporting(), DisableTorchFunctionSubclass(), modes, shared:
            call.plan.runner.run_backward(call.state, meanwhile=loop.tell)

    @contextmanager
    def _sharing_left(self, plan: ReadyPlan) -> Iterator[None]:
        """Give all workers what calls kept whole leave in Python inside."""
        before = note_left(plan, self._job.rank)
        yield
        share_left(self._job.control, plan, before)


@dataclass(eq=False)
class Call:
    """A call that has run forward.

    Attributes:
        network: Who runs it.
        plan: Its plan.
        state: What forward has left for backward.
        spent: Operations of which a backward has freed what autograd had saved.
        used: Outputs from which the backward under way comes.
        entered: Inputs that gradients flow into, as the script gave them, by node.
        passed: Those among them whose later uses come through this call, by their place.
    """

    network: NetworkCalls
    plan: ReadyPlan
    state: StepState
    spent: frozenset[int] = frozenset()
    used: frozenset[int] = frozenset()
    entered: dict[int, Any] = field(default_factory=dict)
    passed: list[int] = field(default_factory=list)

    def begin_backward(self, used: frozenset[int], *, retains: bool) -> None:
        """Take note of a backward that comes; what it leaves for later ones is kept."""
        behind = self.plan.plan.behind
        if self.passed:  # later uses of inputs come through it as well
            used = self.plan.plan.placed.graph.given_roots
        freed = self.spent if retains else self.spent | behind(used)
        left = self.plan.plan.placed.graph.given_roots - used
        self.state.retains, self.used = retains, used
        self.state.is_kept = retains or any(freed.isdisjoint(behind({one})) for one in left)

    def is_whole_behind(self, used: frozenset[int]) -> bool:
        """Whether no backward has freed what one from outputs needs."""
        return not self.passed and self.spent.isdisjoint(self.plan.plan.behind(used))

    def end_backward(self) -> None:
        """The backward has come to the call: what it goes through is freed."""
        if not self.state.retains:
            self.spent |= self.plan.plan.behind(self.used)

    @property
    def sums_of_inputs(self) -> list[tuple[int, int]]:
        """Inputs whose gradient is a sum: its place among those that entered, and the node."""
        plan = self.plan.plan
        return [
            (index, node)
            for index, node in enumerate(self.entered)
            if len(uses := plan.gradient_uses.get(node, ())) > 1
            or any(node in plan.placed.graph.nodes[p].repeated for p, _ in uses)
        ]

    def _passed(self) -> list[int]:
        """Inputs that are given on: what later uses give is the first term of their sum here."""
        nodes, uses = self.plan.plan.placed.graph.nodes, self.plan.plan.gradient_uses
        times = Counter(id(v.held) for v in self.entered.values() if isinstance(v, LoopValue))
        return [
            index
            for index, node in self.sums_of_inputs
            if isinstance(value := self.entered[node], LoopValue)
            and times[id(value.held)] == 1
            and not any(node in nodes[p].repeated for p, _ in uses[node])
        ]

    def outputs(self, given: Arguments, loop: Loop) -> Any:
        """The outputs, in the network's own structure; each value on the worker that made it.

        Args:
            given: The arguments, as the script gave them.
            loop: The workers.
        """
        placed = self.plan.plan.placed
        graph, made = placed.graph, self.state.values[0]
        nodes = list(dict.fromkeys(o.node for o in graph.outputs if o.node is not None))
        nodes = [n for n in nodes if not graph.nodes[n].is_everywhere]
        found = [self._output(node, made, loop) for node in nodes]
        arguments = leaves(given)
        if graph.has_gradients:
            self.entered = {node: arguments[place] for node, place in graph.entered.items()}
            anchor = torch.zeros((), requires_grad=True)
            entered = [v.held if isinstance(v, LoopValue) else v for v in self.entered.values()]
            self.passed = self._passed()
            found = list(_called(self, loop, nodes, found, anchor, *entered))
            for index in reversed(self.passed):
                [*self.entered.values()][index].pass_through(found.pop())
        made.clear()
        number = loop.taken.next()
        values: dict[int, Any] = {
            node: LoopValue.of(
                tensor, placed.workers[node], loop, ("output", node, "of call", number)
            )
            for node, tensor in zip(nodes, found, strict=True)
        }
        if graph.has_gradients:
            uses = self.plan.plan.gradient_uses
            for node, value in values.items():
                value.goes_on = bool(uses.get(node))
            self._note_apart(values, arguments, loop)
        outputs = unflatten_outputs(graph, values, arguments, self.plan.numbers)
        if graph.state.handed:
            outputs, left = outputs
            loop.left.put(graph.state.handed, left)
        return outputs

    def _note_apart(
        self, values: Mapping[int, LoopValue], arguments: Sequence[Any], loop: Loop
    ) -> None:
        """Take note of values with a history that in one process have the memory of another one."""
        memories: dict[int, dict[int, MemoryPart]] = {}
        for output in self.plan.plan.placed.graph.outputs:
            part = output.part_with(self.plan.numbers)
            if part is not None and output.node is not None and output.node in values:
                memories.setdefault(part.memory, {})[output.node] = part
        for parts in memories.values():
            given = next(iter(parts.values())).input
            found = {node: values[node].held for node in parts}
            if given is None:
                if any(value.requires_grad for value in found.values()):
                    begins = [part.begin for part in parts.values()]
                    for value in sharing(list(found.values()), begins):
                        loop.twins.add(None, Twin(OUTPUT, value))
            elif (base := arguments[given]).requires_grad:
                for value in found.values():
                    loop.twins.add(None, Twin.of_input(value, base))

    def give_later(self, gradients: Sequence[torch.Tensor | None], loop: Loop) -> dict[int, Any]:
        """Move what later uses of inputs gave to where its sum goes on; those that are here."""
        given, entered = {}, list(self.entered.items())
        for index, gradient in zip(self.passed, gradients, strict=True):
            node, value = entered[index]
            source = self.plan.plan.worker_of_sum(node)
            if not self.state.is_kept:
                value.take_back()
            if gradient is not None and source != value.home:
                gradient = loop.move(gradient, value.home, source)
            if gradient is not None and source == loop.rank:
                given[node] = gradient
        return given

    def gradient_of_input(self, node: int, loop: Loop) -> torch.Tensor | None:
        """The gradient of an input, where the input is: on its worker, or on all."""
        if node not in self.plan.plan.gradient_sums:
            return None
        source, value = self.plan.plan.worker_of_sum(node), self.entered[node]
        gradient = self.state.of_inputs.get((node, 0))
        told = "" if gradient is None else " ".join(["strides", *map(str, gradient.stride())])
        strides = loop.group.share(told, source=source).split()[1:]
        if (not told and loop.rank == source) or (not strides and value.dim()):
            return None
        held = gradient if gradient is not None else empty_as(value, tuple(map(int, strides)))
        if isinstance(value, LoopValue):
            return held if source == value.home else loop.move(held, source, value.home)
        return loop.share(held, source)

    def _output(self, node: int, made: Mapping[int, Any], loop: Loop) -> torch.Tensor:
        graph, home = self.plan.plan.placed.graph, self.plan.plan.placed.workers[node]
        if loop.rank == home:
            value: torch.Tensor = made[node]
            return value
        meta = graph.nodes[node].meta
        sizes: list[Any] = [
            size.of(self.plan.numbers) if isinstance(size, DynamicSize) else size
            for size in (() if meta is None else (*meta.shape, *meta.strides))
        ]
        if meta is None or None in sizes:
            raise ConfigurationError("forward returns a value whose shape depends on values")
        form = sizes[: len(meta.shape)], sizes[len(meta.shape) :]
        return torch.empty_strided(*form, dtype=meta.dtype, device="meta")


class _Called(Function):
    """A call, as one step of the script's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        loop: Loop,
        nodes: Sequence[int],
        found: Sequence[torch.Tensor],
        anchor: torch.Tensor,
        *entered: torch.Tensor,
    ) -> Any:
        ctx.graphsplit_call, ctx.loop, ctx.nodes = call, loop, nodes
        ctx.graphsplit_anchor = anchor
        ctx.set_materialize_grads(False)
        graph = call.plan.plan.placed.graph
        fixed = [f for n, f in zip(nodes, found, strict=True) if n not in graph.given_roots]
        ctx.mark_non_differentiable(*fixed)
        return *found, *(entered[index].detach() for index in call.passed)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call, workers = ctx.graphsplit_call, ctx.graphsplit_call.plan.plan.placed.workers
        own, later = gradients[: len(ctx.nodes)], gradients[len(ctx.nodes) :]
        if later and all(gradient is None for gradient in own):  # the call itself has no part
            passed = dict(zip(call.passed, later, strict=True))
            return None, None, None, None, None, *map(passed.get, range(len(call.entered)))
        given = {
            node: gradient
            for node, gradient in zip(ctx.nodes, own, strict=True)
            if gradient is not None and workers[node] == ctx.loop.rank
        }
        ctx.loop.totals_now()
        call.end_backward()
        given |= call.give_later(later, ctx.loop)
        call.network.backward(call, given, ctx.loop)
        inputs = [call.gradient_of_input(node, ctx.loop) for node in call.entered]
        return None, None, None, None, None, *inputs


_called: Callable[..., tuple[torch.Tensor, ...]] = _Called.apply
