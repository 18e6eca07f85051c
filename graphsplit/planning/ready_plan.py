"""A plan that all workers have agreed on, and what it does to a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from graphsplit.capture.graph import ErrorAtEnd, Mode, NodeKind
from graphsplit.capture.operations.memory_calls import GiveBackVersion
from graphsplit.capture.reach.holders import Holder
from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.lower import WHOLE_STEP, StepPart, WorkerProgram
from graphsplit.runtime.runner import ProgramRunner


@dataclass(frozen=True)
class ReadyPlan:
    """An agreed plan, ready to run on this worker.

    Attributes:
        plan: The plan, equal on all workers.
        programs: All workers' programs.
        runner: Runs this worker's program.
        consumers: Workers that read the loader's batches, the earliest in the pipeline first.
        woken_by_values: Workers that can do nothing in a step before a value has come.
        numbers: Numbers made of the batch's sizes, where the plan holds for several.
        written_inputs: Flattened inputs that it writes to, each with the workers that have the
            outcome.
        left_by_calls: Python state that calls kept whole may change, by their worker and by name.
        wants_costs: Whether it would be lowered otherwise if costs were measured.
        part: Which part of a step it runs.
        mode: What it was recorded for: train, eval or predict.
        asks: Whether it gives a value that the step depends on, and is no step itself.
        ending: The error that comes after what it runs; None: none does.
    """

    plan: PartitionPlan
    programs: tuple[WorkerProgram, ...]
    runner: ProgramRunner
    consumers: tuple[int, ...]
    woken_by_values: frozenset[int]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    written_inputs: tuple[tuple[int, tuple[int, ...]], ...] = ()
    left_by_calls: Mapping[int, Mapping[Any, Holder]] = field(default_factory=dict)
    wants_costs: bool = False
    part: StepPart = WHOLE_STEP
    mode: Mode = Mode.TRAIN
    asks: bool = False
    ending: ErrorAtEnd | None = None

    @property
    def home_of_answer(self) -> int:
        """The worker that has the values that it gives."""
        (output,) = self.plan.placed.graph.outputs
        assert output.node is not None
        return self.plan.placed.workers[output.node]

    @cached_property
    def no_inputs(self) -> tuple[None, ...]:
        """The graph's inputs where they are not here."""
        nodes = self.plan.placed.graph.nodes
        return (None,) * sum(node.kind is NodeKind.INPUT for node in nodes)

    @cached_property
    def asking_inputs(self) -> tuple[tuple[int, int, int], ...]:
        """The inputs that ask for a gradient and get one: node, place, and who adds it up."""
        plan, nodes = self.plan, self.plan.placed.graph.nodes
        return tuple(
            (value, int(nodes[value].target), plan.worker_of_sum(value))
            for value in sorted(plan.gradient_sums)
            if nodes[value].kind is NodeKind.INPUT
        )

    @cached_property
    def microbatches_read(self) -> tuple[tuple[int, ...], ...]:
        """For each worker, the microbatches of which it consumes an input."""
        plan, microbatches = self.plan, range(self.part.num_microbatches)
        nodes = plan.placed.graph.nodes
        is_handed_out = any(
            nodes[output.node].kind is NodeKind.INPUT
            or (output.part is not None and output.part.input is not None)
            for output in plan.placed.graph.outputs
            if output.node is not None
        )
        if is_handed_out or self.asks:  # every worker hands them out, or may need them
            return (tuple(microbatches),) * plan.num_workers
        found: list[set[int]] = [set() for _ in range(plan.num_workers)]
        for segment, io in zip(plan.segments, plan.io, strict=True):
            values = {*io.values, *(plan.contributions[leaf].value for leaf in io.leaves)}
            inputs = [value for value in values if nodes[value].kind is NodeKind.INPUT]
            read = (m for m in microbatches if any(plan.is_in(m, value) for value in inputs))
            found[segment.worker].update(read)
        if plan.placed.graph.mode is Mode.EVAL:  # somebody needs the targets
            found[plan.home].update(set(microbatches).difference(*found))
        return tuple(tuple(sorted(parts)) for parts in found)

    @cached_property
    def needed_by(self) -> frozenset[int]:
        """The workers that consume an input of a microbatch."""
        return frozenset(worker for worker, parts in enumerate(self.microbatches_read) if parts)


def written_inputs(plan: PartitionPlan) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Which of the flattened inputs are written to, each with the workers that have the outcome."""
    graph, workers = plan.placed.graph, plan.placed.workers
    ranks: dict[int, set[int]] = {}
    for value, touching in graph.touching.items():
        writes = {workers[p] for p in touching if graph.nodes[p].changes_inputs}
        ranks.setdefault(value, set()).update(writes)
    for position, node in enumerate(graph.nodes):
        found = graph.fx_nodes.get(node.name)
        if found is not None and isinstance(found.target, GiveBackVersion):
            ranks.setdefault(node.reads[0], set()).add(workers[position])
    return tuple(
        (int(graph.nodes[value].target), tuple(sorted(ranks[value])))
        for value in sorted(ranks)
        if graph.nodes[value].kind is NodeKind.INPUT
    )
