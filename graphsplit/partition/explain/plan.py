"""Explain a plan to a person: who holds and computes what, why, and what crosses."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from graphsplit.capture.graph import Node, NodeKind
from graphsplit.partition.dump import human_bytes
from graphsplit.partition.explain.folding import align
from graphsplit.partition.explain.modules import module_lines, unplaced_lines
from graphsplit.partition.explain.operations import crossing_lines, operation_lines, state_lines
from graphsplit.partition.explain.state import state_sections
from graphsplit.partition.explain.traffic import (
    borrowed_lines,
    gradient_lines,
    pair_lines,
    route_lines,
    traffic_lines,
)
from graphsplit.partition.plan import PartitionPlan
from graphsplit.placement.resolve import EVERYWHERE

Detail = Literal["modules", "operations", "state"]
WIDTH = 120
_MAX_STOPS = 12


def explain_plan(
    plan: PartitionPlan,
    *,
    detail: Detail = "modules",
    optimizer_copies: float | None = None,
    routes: Mapping[tuple[int, int], tuple[str, str]] | None = None,
    compute: Sequence[str] = (),
    messages: Sequence[str] = (),
    step_times: Sequence[str] = (),
    reading: str = "",
) -> str:
    """Describe a plan to a person, in lines of at most 120 characters.

    Sizes are those of one microbatch, and said to be. Modules that repeat are shown once, as
    ``layers.{3..17}``.

    Args:
        plan: The plan.
        detail: ``"modules"``: totals of each worker, the modules as a tree down to where everything
            inside is on one worker, and what crosses, the largest first. ``"operations"``: every
            parameter, operation and edge. ``"state"``: every Python value that the graph depends
            on, and what network and loss leave of them.
        optimizer_copies: How many numbers the optimizer keeps for each number that it trains.
        routes: How each pair of workers is connected, and why; of a running job only.
        compute: What is known of the seconds that each worker computes.
        messages: What is known of the seconds that messages take.
        step_times: What is known of the time that a step takes.
        reading: What is known of who reads which rows of a loader's batches.
    """
    per = _unit(plan)
    sections: list[tuple[str, list[str]]] = [(f"Workers, {per}", _totals(plan, optimizer_copies))]
    if detail == "operations":
        sections += [
            ("Parameters and buffers", state_lines(plan)),
            ("Operations, in program order", operation_lines(plan)),
            (f"What crosses between workers, {per}", crossing_lines(plan)),
        ]
    elif detail == "state":
        sections += state_sections(plan)
    else:
        sections += [
            ("Modules", module_lines(plan)),
            ("Placed by nobody", unplaced_lines(plan)),
            (f"What crosses between workers, {per}", traffic_lines(plan)),
            (f"Between each pair of workers, {per}", pair_lines(plan)),
            ("Borrowed parameters and buffers", borrowed_lines(plan)),
            ("Gradients that replicas send to owners, per step", gradient_lines(plan)),
        ]
    sections += [
        ("How workers are connected", route_lines(routes or {})),
        ("Reading of the loader", textwrap.wrap(reading, WIDTH - 2)),
        ("Longest chain of workers that wait for each other", _longest_chain(plan)),
        ("Compute, per step", list(compute)),
        ("Messages, per step", list(messages)),
        ("Step time", list(step_times)),
        ("Notes", [line for note in plan.placed.notes for line in note.splitlines()]),
    ]
    parts = [_headline(plan)]
    parts += ["\n".join([title, *(_indent(line) for line in ls)]) for title, ls in sections if ls]
    return "\n\n".join(parts)


def _indent(line: str) -> str:
    line = f"  {line}".rstrip()
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _unit(plan: PartitionPlan) -> str:
    """The unit of the sizes: a step, or a microbatch where a batch is split."""
    if plan.lanes:
        return f"per microbatch, {len(plan.lanes)} lanes together"
    return "per microbatch" if plan.is_microbatched else "per step"


def _headline(plan: PartitionPlan) -> str:
    nodes = plan.placed.graph.nodes
    operations = sum(node.kind is NodeKind.OPERATION for node in nodes)
    operations //= max(1, len(plan.lanes))
    return (
        f"{plan.placed.graph.mode.value} graph on {plan.num_workers} worker(s): "
        f"{operations} operations in {len(plan.segments)} segment(s), {len(plan.edges)} edge(s), "
        f"{human_bytes(sum(edge.meta.size_bytes for edge in plan.edges))} cross {_unit(plan)}"
    )


def _totals(plan: PartitionPlan, optimizer_copies: float | None) -> list[str]:
    """One line per worker; columns that are empty everywhere are left out."""
    header = (
        *("worker", "parameters", "bytes", "gradients", "optimizer", "buffers"),
        *("operations", "activations", "segments", "receives", "sends"),
    )
    rows = [_totals_of(plan, worker, optimizer_copies or 0.0) for worker in range(plan.num_workers)]
    kept = [
        i
        for i, name in enumerate(header)
        if name not in ("gradients", "optimizer", "buffers") or any(r[i] != "0 B" for r in rows)
    ]
    table = [[row[i] for i in kept] for row in (header, *rows)]
    return align(table, right=frozenset(range(len(kept))))


def _totals_of(plan: PartitionPlan, worker: int, optimizer_copies: float) -> tuple[str, ...]:
    workers, graph = plan.placed.workers, plan.placed.graph
    nodes = [graph.nodes[p] for p in plan.counted() if workers[p] == worker]
    parameters = [n for n in nodes if n.kind is NodeKind.PARAMETER]
    trained = [n for n in parameters if n.requires_grad and graph.has_gradients]
    operations = [n for n in nodes if n.kind is NodeKind.OPERATION]
    return (
        str(worker),
        f"{sum(n.meta.num_elements for n in parameters if n.meta is not None):,}",
        human_bytes(size_of(parameters)),
        human_bytes(size_of(trained)),
        human_bytes(size_of(trained) * optimizer_copies),
        human_bytes(size_of(n for n in nodes if n.kind is NodeKind.BUFFER)),
        str(len(operations)),
        human_bytes(size_of(operations)),
        str(len(plan.segments_of(worker))),
        human_bytes(sum(e.meta.size_bytes for e in plan.edges if e.destination == worker)),
        human_bytes(sum(e.meta.size_bytes for e in plan.edges if e.source == worker)),
    )


def size_of(nodes: Iterable[Node]) -> int:
    """Bytes of some nodes' values."""
    return sum(node.meta.size_bytes for node in nodes if node.meta is not None)


def _longest_chain(plan: PartitionPlan) -> list[str]:
    """The path through the graph that changes worker most often."""
    workers, nodes = plan.placed.workers, plan.placed.graph.nodes
    changes = [0] * len(nodes)
    before = [-1] * len(nodes)
    for position, node in enumerate(nodes):
        for operand in (*node.reads, *node.runs_after):
            if EVERYWHERE in (workers[operand], workers[position]):
                continue
            found = changes[operand] + (workers[operand] != workers[position])
            if found > changes[position]:
                changes[position], before[position] = found, operand
    if not any(changes):
        return []
    stops: list[int] = []
    position = changes.index(max(changes))
    while position >= 0:
        if not stops or stops[-1] != workers[position]:
            stops.append(workers[position])
        position = before[position]
    noun = "change" if max(changes) == 1 else "changes"
    return [f"{max(changes)} {noun}: worker {_chain(stops[::-1])}"]


def _chain(stops: Sequence[int]) -> str:
    shown = [str(stop) for stop in stops]
    if len(shown) > _MAX_STOPS:
        shown = [*shown[: _MAX_STOPS - 3], "...", *shown[-2:]]
    return " -> ".join(shown)
