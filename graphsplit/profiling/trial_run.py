"""The costs of a plan's segments, tried in this process on one batch before training.

Each segment runs forward and backward as its worker would run it, one after the other, on copies of
what it modifies; then a new optimizer of the same class steps copies of each worker's parameters.
Before each, the process sleeps for as long as the largest message that its worker gets takes: what
runs behind a wait finds its caches cold, and takes a fifth to twice as long where it is short.
What messages take is known before or assumed, and so is what graphsplit does beside computing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphsplit.capture.graph import Mode, NodeKind
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.partition.checks.one_state import opaque_calls
from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.runtime.segments.code import build_code
from graphsplit.schedule.costs import Costs
from graphsplit.schedule.estimates import (
    BETWEEN_S,
    RECEIVE_S,
    SEND_S,
    estimated_costs,
    with_weights_apart,
)
from graphsplit.schedule.simulation.timeline import Timeline
from graphsplit.text import align
from graphsplit.viz.report import seconds_in_words

_MAX_RUNS = 4  # the first one warms up
_ENOUGH_S = 2.0
_LONGEST_WAIT_S = 0.01  # one that is longer makes nothing colder


class NotTriedError(Exception):
    """A plan cannot be tried in this process; says why."""


def tried_costs(
    plan: PartitionPlan,
    state: Mapping[str, torch.Tensor],
    inputs: Sequence[Any],
    optimizers: Sequence[torch.optim.Optimizer] = (),
    known: Costs | None = None,
) -> Costs:
    """Costs of computing, measured here; those of moving as they are known.

    Leaves nothing behind: no gradients, no other parameters, buffers and random numbers.

    Args:
        plan: The plan.
        state: Parameters and buffers by name.
        inputs: The flattened inputs.
        optimizers: They step the parameters. Those of ``torch.optim`` are tried.
        known: Has the links and the hosts; what is assumed everywhere if None.

    Raises:
        NotTriedError: Something that the plan needs is not here, or would leave a trace.
    """
    whole = [call.label for _, call in opaque_calls(plan)]
    if whole:
        raise NotTriedError(f"{whole[0]} is kept whole, and may leave something behind")
    known = known or estimated_costs(plan)
    with torch.random.fork_rng(devices=()):
        trial = _Trial(plan, _values(plan, state, inputs), _waits(plan, known))
        began = time.perf_counter()
        for run in range(_MAX_RUNS):
            trial.run(is_timed=run > 0 or time.perf_counter() - began > _ENOUGH_S)
            if run and time.perf_counter() - began > _ENOUGH_S:
                break
        optimizer_s = _optimizer_seconds(plan, state, optimizers)
    found = replace(
        known,
        forward=trial.forward,
        backward_input=trial.backward,
        backward_weight={},
        backward_whole={},
        optimizer=optimizer_s,
        send=dict.fromkeys(range(len(plan.edges)), SEND_S),
        receive=dict.fromkeys(range(len(plan.edges)), RECEIVE_S),
        between=dict.fromkeys(range(plan.num_workers), BETWEEN_S),
        source="measured on this batch",
    )
    return with_weights_apart(plan, found)


def is_tried(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a new one may be made of it: what users wrote could leave something behind."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _optimizer_seconds(
    plan: PartitionPlan,
    state: Mapping[str, torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[int, float]:
    """Seconds that each worker's optimizers take for what it trains."""
    placed, found = plan.placed, dict[int, float]()
    trained = [
        (placed.workers[position], state[node.target])
        for position, node in enumerate(placed.graph.nodes)
        if node.is_state and node.asks_grad
    ]
    for worker, optimizer in itertools.product(range(plan.num_workers), optimizers):
        own = {id(tensor) for owner, tensor in trained if owner == worker}
        groups = [
            {**group, "params": [_with_gradient(p) for p in group["params"] if id(p) in own]}
            for group in optimizer.param_groups
        ]
        groups = [group for group in groups if group["params"]]
        if groups and is_tried(optimizer):
            make: Any = type(optimizer)
            step = make(groups).step
            seconds = [_timed(step)[0] for _ in range(_MAX_RUNS)]
            found[worker] = found.get(worker, 0.0) + min(seconds[1:])
    return found


def _with_gradient(parameter: torch.Tensor) -> torch.Tensor:
    found = parameter.detach().clone().requires_grad_()
    found.grad = torch.zeros_like(found)
    return found


def _values(
    plan: PartitionPlan, state: Mapping[str, torch.Tensor], inputs: Sequence[Any]
) -> dict[int, Any]:
    """Values that are there before the first segment runs, by node."""
    graph, found = plan.placed.graph, dict[int, Any]()
    numbers: Mapping[str, Any] = {}
    if graph.sizes is not None:
        symbols = graph.sizes.bind(inputs)
        numbers = (graph.sizes.compute(symbols) if symbols is not None else None) or {}
    for position, node in enumerate(graph.nodes):
        if node.is_state:
            tensor = state[node.target]
            if is_elsewhere(tensor) or tensor.is_meta:
                raise NotTriedError("this process does not hold the whole network")
            own = tensor.detach().clone() if position in graph.modified else tensor.detach()
            found[position] = own.requires_grad_(node.asks_grad)
        elif node.kind is NodeKind.INPUT:
            given = inputs[int(node.target)]
            is_written = position in graph.modified
            found[position] = given.clone() if is_written else given
        elif node.kind is NodeKind.CONSTANT:
            found[position] = graph.constants[node.name]
        elif node.kind is NodeKind.NUMBER:
            if node.name not in numbers:
                raise NotTriedError("the step computes with numbers that only a job knows")
            found[position] = numbers[node.name]
    return found


def _waits(plan: PartitionPlan, known: Costs) -> dict[int, float]:
    """Seconds that each worker waits for the largest message that it gets."""
    waits: dict[int, float] = {}
    for edge in plan.edges:
        seconds = known.links[edge.source, edge.destination].seconds(edge.meta.size_bytes)
        longest = max(seconds, waits.get(edge.destination, 0.0))
        waits[edge.destination] = min(longest, _LONGEST_WAIT_S)
    return waits


class _Trial:
    """Runs all segments of a plan, and keeps the shortest times.

    Args:
        plan: The plan.
        given: Values that are there before the first segment runs, by node.
        waits: Seconds that each worker waits before it runs anything.
    """

    def __init__(
        self, plan: PartitionPlan, given: Mapping[int, Any], waits: Mapping[int, float]
    ) -> None:
        self._plan, self._given, self._waits = plan, given, waits
        self._code = [build_code(plan, s.index).run for s in plan.segments]
        self.forward: dict[int, float] = {}
        self.backward: dict[int, float] = {}

    def run(self, *, is_timed: bool) -> None:
        is_training = self._plan.placed.graph.mode is Mode.TRAIN
        values = dict(self._given)
        with torch.set_grad_enabled(is_training):
            for segment in self._plan.segments:
                index = segment.index
                seconds = self._segment(index, values, has_backward=is_training)
                for kept, taken in zip((self.forward, self.backward), seconds, strict=True):
                    if is_timed:
                        kept[index] = min(taken, kept.get(index, taken))

    def _segment(
        self, index: int, values: dict[int, Any], *, has_backward: bool
    ) -> tuple[float, float]:
        io, nodes = self._plan.io[index], self._plan.placed.graph.nodes
        wait_s = self._waits.get(self._plan.segments[index].worker, 0.0)
        read = [_asking(values[v], nodes[v].asks_grad and not nodes[v].is_state) for v in io.values]
        leaves = [_asking(values[self._plan.contributions[leaf].value]) for leaf in io.leaves]
        time.sleep(wait_s)
        forward_s, results = _timed(lambda: self._code[index](*read, *leaves))
        made = dict(zip(io.outputs, results, strict=True))
        values |= {
            position: result.detach() if isinstance(result, torch.Tensor) else result
            for position, result in made.items()
        }
        roots = [made[r] for r in io.roots if made[r] is not None and made[r].requires_grad]
        wanted = [t for t in leaves if t is not None] + [values[p] for p in io.parameters]
        if not has_backward or not roots or not wanted:
            return forward_s, 0.0
        ones = [torch.ones_like(root) for root in roots]
        time.sleep(wait_s)
        backward_s, _ = _timed(lambda: torch.autograd.grad(roots, wanted, ones, allow_unused=True))
        return forward_s, backward_s


def _asking(value: Any, is_asked: bool = True) -> Any:
    return value.detach().requires_grad_(True) if is_asked and value is not None else value


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = run()
    return time.perf_counter() - began, found


def compute_lines(plan: PartitionPlan, costs: Costs, num_microbatches: int) -> list[str]:
    """Seconds of compute on each worker in a step, as a table."""
    rows = [["worker", "forward", "backward", "both", "share"]]
    times = []
    for worker in range(plan.num_workers):
        segments = [s.index for s in plan.segments_of(worker)]
        forward = num_microbatches * sum(costs.forward.get(s, 0.0) for s in segments)
        backwards = (Instruction(Opcode.BACKWARD, segment) for segment in segments)
        both = forward + num_microbatches * sum(costs.seconds(one, worker) for one in backwards)
        times.append((forward, both))
    total = sum(both for _, both in times) or 1.0
    for worker, (forward, both) in enumerate(times):
        words = map(seconds_in_words, (forward, both - forward, both))
        rows.append([str(worker), *words, f"{both / total:.0%}"])
    return align(rows, right=frozenset(range(len(rows[0]))))


def bounding_line(timeline: Timeline) -> str:
    """The worker that is busy longest, which a step can take no less than."""
    busy = [timeline.busy_s(worker) for worker in range(len(timeline.workers))]
    worker = busy.index(max(busy))
    share = busy[worker] / timeline.step_s if timeline.step_s else 0.0
    return (
        f"worker {worker} bounds it: it is busy for {seconds_in_words(busy[worker])}, {share:.0%} "
        f"of the step"
    )
