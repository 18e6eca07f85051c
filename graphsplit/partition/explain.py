"""Explain a plan to a person: every operation with its worker, the reason, and what crosses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import PurePath

from graphsplit.capture.graph import Node, NodeKind
from graphsplit.partition.dump import human_bytes
from graphsplit.partition.folding import Row, align, fold_repetitions
from graphsplit.partition.plan import Edge, EdgeKind, PartitionPlan

_ROOT = "(network)"


def explain_plan(plan: PartitionPlan) -> str:
    """Describe a plan to a person.

    Returns:
        Totals per worker; parameters and buffers with their owners; every operation in program
        order with its result, worker, reason and the user's line; everything that crosses between
        workers, with totals per pair of workers. Sizes are those of one microbatch. Modules that
        repeat on one worker are shown once, as ``layers.{3..17}``.
    """
    sections = [
        ("Workers, per step", _totals(plan)),
        ("Parameters and buffers", _by_module(_state_rows(plan))),
        ("Operations, in program order", _by_module(_operation_rows(plan))),
        ("What crosses between workers, per step", _crossings(plan)),
    ]
    parts = [_headline(plan)]
    parts += ["\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections]
    return "\n\n".join(parts)


def _headline(plan: PartitionPlan) -> str:
    nodes = plan.placed.graph.nodes
    operations = sum(node.kind is NodeKind.OPERATION for node in nodes)
    return (
        f"{plan.placed.graph.mode.value} graph on {plan.num_workers} worker(s): "
        f"{operations} operations in {len(plan.segments)} segment(s), {len(plan.edges)} edge(s), "
        f"{human_bytes(sum(edge.meta.size_bytes for edge in plan.edges))} cross per step"
    )


def _totals(plan: PartitionPlan) -> list[str]:
    header = (
        *("worker", "parameters", "bytes", "buffers", "bytes", "operations"),
        *("activations", "segments", "receives", "sends"),
    )
    table = [header, *(_totals_of(plan, worker) for worker in range(plan.num_workers))]
    return align(table, right=frozenset(range(len(header))))


def _totals_of(plan: PartitionPlan, worker: int) -> tuple[str, ...]:
    workers = plan.placed.workers
    nodes = [
        n for n, where in zip(plan.placed.graph.nodes, workers, strict=True) if where == worker
    ]
    parameters = [n for n in nodes if n.kind is NodeKind.PARAMETER]
    buffers = [n for n in nodes if n.kind is NodeKind.BUFFER]
    operations = [n for n in nodes if n.kind is NodeKind.OPERATION]
    return (
        str(worker),
        str(len(parameters)),
        human_bytes(_size(parameters)),
        str(len(buffers)),
        human_bytes(_size(buffers)),
        str(len(operations)),
        human_bytes(_size(operations)),
        str(len(plan.segments_of(worker))),
        human_bytes(sum(e.meta.size_bytes for e in plan.edges if e.destination == worker)),
        human_bytes(sum(e.meta.size_bytes for e in plan.edges if e.source == worker)),
    )


def _size(nodes: Iterable[Node]) -> int:
    return sum(node.meta.size_bytes for node in nodes if node.meta is not None)


def _state_rows(plan: PartitionPlan) -> list[Row]:
    borrowers: dict[int, list[int]] = {}
    for edge in plan.edges:
        if edge.kind is EdgeKind.VALUE and plan.placed.graph.nodes[edge.value].is_state:
            borrowers.setdefault(edge.value, []).append(edge.destination)
    rows = []
    for position, node in enumerate(plan.placed.graph.nodes):
        if not node.is_state:
            continue
        name, *others = plan.placed.graph.state_names.get(position, (node.target,))
        notes = [plan.placed.reasons[position]]
        if others:
            notes.append(f"is also {', '.join(others)}")
        if position in borrowers:
            notes.append(f"borrowed by {_list_workers(borrowers[position])}")
        cells = (
            name.rpartition(".")[2],
            str(node.meta),
            f"worker {plan.placed.workers[position]}",
            "; ".join(notes),
        )
        rows.append(Row(node.module_path, cells, frozenset({3})))
    return rows


def _list_workers(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"


def _operation_rows(plan: PartitionPlan) -> list[Row]:
    rows = []
    for position, node in enumerate(plan.placed.graph.nodes):
        if node.kind is not NodeKind.OPERATION:
            continue
        reason = plan.placed.reasons[position]
        if node.annotation is not None:
            reason = reason.replace(node.annotation.source, _short(node.annotation.source))
        cells = (
            _named(node),
            str(node.meta) if node.meta is not None else "(no tensor)",
            f"worker {plan.placed.workers[position]}",
            reason,
            _short(node.source),
        )
        rows.append(Row(node.module_path, cells, frozenset({0, 3})))
    return rows


def _named(node: Node) -> str:
    """The node's name, and the operation where the name does not say it already."""
    parts = node.target.split(".")
    operation = parts[1] if len(parts) == 3 else node.target  # aten.conv2d.default
    return node.name if node.name.startswith(operation) else f"{node.name} = {operation}"


def _short(source: str) -> str:
    """``file:line`` with the last folder only: the same text on every machine."""
    return "/".join(PurePath(source).parts[-2:])


def _by_module(rows: Sequence[Row]) -> list[str]:
    folded = fold_repetitions(rows)
    if not folded:
        return ["(none)"]
    lines = iter(align([row.cells for row in folded]))
    result: list[str] = []
    for path, members in groupby(folded, key=lambda row: row.path):
        result.append(path or _ROOT)
        result += [f"  {next(lines)}" for _ in members]
    return result


def _crossings(plan: PartitionPlan) -> list[str]:
    if not plan.edges:
        return ["(nothing)"]
    lines = align(
        [
            (
                f"edge{edge.index}",
                _what(plan, edge),
                _pair(edge.source, edge.destination),
                str(edge.meta),
                human_bytes(edge.meta.size_bytes),
            )
            for edge in plan.edges
        ],
        right=frozenset({4}),
    )
    pairs: dict[tuple[int, int], list[Edge]] = {}
    for edge in plan.edges:
        pairs.setdefault((edge.source, edge.destination), []).append(edge)
    totals = [_total(_pair(*pair), pairs[pair]) for pair in sorted(pairs)]
    totals.append(_total("in all", plan.edges))
    return [*lines, "totals", *(f"  {t}" for t in align(totals, right=frozenset({1, 3})))]


def _pair(source: int, destination: int) -> str:
    return f"worker {source} -> worker {destination}"


def _total(name: str, edges: Sequence[Edge]) -> tuple[str, str, str, str]:
    noun = "edge" if len(edges) == 1 else "edges"
    size = sum(edge.meta.size_bytes for edge in edges)
    return name, str(len(edges)), noun, human_bytes(size)


def _what(plan: PartitionPlan, edge: Edge) -> str:
    node = plan.placed.graph.nodes[edge.value]
    path = node.module_path or _ROOT
    name = (
        node.target if node.is_state else f"{node.name} {path if path[0] == '(' else f'({path})'}"
    )
    if edge.kind is EdgeKind.GRADIENT:
        borrowed = f"borrowed {node.kind.value} " if node.is_state else ""
        return f"gradient of {borrowed}{name}"
    if edge.kind is EdgeKind.GENERATOR:
        return f"generator state after {name}"
    if node.is_state:
        return f"borrowed {node.kind.value} {name}"
    return f"output {name}" if _is_only_output(plan, edge) else f"value {name}"


def _is_only_output(plan: PartitionPlan, edge: Edge) -> bool:
    """Whether no operation of the receiver reads the value: it is there for the user."""
    nodes, workers = plan.placed.graph.nodes, plan.placed.workers
    return not any(
        workers[position] == edge.destination and edge.value in node.reads
        for position, node in enumerate(nodes)
    )
