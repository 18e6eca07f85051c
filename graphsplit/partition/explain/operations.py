"""Every parameter, operation and edge of a plan, a line each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from graphsplit.capture.graph import Node, NodeKind
from graphsplit.partition.dump import human_bytes
from graphsplit.partition.explain.folding import Row, fold_repetitions
from graphsplit.partition.plan import Edge, EdgeKind, PartitionPlan
from graphsplit.text import align, short_source

ROOT = "(network)"


def state_lines(plan: PartitionPlan) -> list[str]:
    """Parameters and buffers with their owners."""
    return _by_module(_state_rows(plan))


def operation_lines(plan: PartitionPlan) -> list[str]:
    """Every operation in program order, with its result, worker, reason and the user's line."""
    return _by_module(_operation_rows(plan))


def _state_rows(plan: PartitionPlan) -> list[Row]:
    borrowers: dict[int, list[int]] = {}
    for edge in plan.edges:
        if edge.kind is EdgeKind.VALUE and plan.placed.graph.nodes[edge.value].is_state:
            for value in edge.values:
                borrowers.setdefault(value, []).append(edge.destination)
    rows = []
    for position, node in enumerate(plan.placed.graph.nodes):
        if not node.is_state:
            continue
        name, *others = plan.placed.graph.state_names.get(position, (node.target,))
        notes = [plan.placed.reasons[position]]
        if others:
            notes.append(f"is also {', '.join(others)}")
        if position in borrowers:
            by = borrowers[position]
            notes.append(f"borrowed by worker{'s' * (len(by) > 1)} {', '.join(map(str, by))}")
        cells = (
            name.rpartition(".")[2],
            str(node.meta),
            f"worker {plan.placed.workers[position]}",
            "; ".join(notes),
        )
        rows.append(Row(node.module_path, cells, frozenset({3})))
    return rows


def _operation_rows(plan: PartitionPlan) -> list[Row]:
    rows = []
    for position, node in enumerate(plan.placed.graph.nodes):
        if node.kind is not NodeKind.OPERATION:
            continue
        reason = plan.placed.reasons[position]
        if node.annotation is not None:
            reason = reason.replace(node.annotation.source, short_source(node.annotation.source))
        cells = (
            _named(node),
            str(node.meta) if node.meta is not None else "(no tensor)",
            f"worker {plan.placed.workers[position]}",
            reason,
            short_source(node.source),
        )
        rows.append(Row(node.module_path, cells, frozenset({0, 3})))
    return rows


def _named(node: Node) -> str:
    """The node's name, and the operation where the name does not say it already."""
    parts = node.target.split(".")
    operation = parts[1] if len(parts) == 3 else node.target  # aten.conv2d.default
    return node.name if node.name.startswith(operation) else f"{node.name} = {operation}"


def _by_module(rows: Sequence[Row]) -> list[str]:
    folded = fold_repetitions(rows)
    if not folded:
        return ["(none)"]
    lines = iter(align([row.cells for row in folded]))
    result: list[str] = []
    for path, members in groupby(folded, key=lambda row: row.path):
        result.append(path or ROOT)
        result += [f"  {next(lines)}" for _ in members]
    return result


def crossing_lines(plan: PartitionPlan) -> list[str]:
    """Everything that crosses between workers, with totals per pair of workers."""
    if not plan.edges:
        return ["(nothing)"]
    read = values_read(plan)
    lines = align(
        [
            (
                f"edge{edge.index}",
                what_crosses(plan, edge, read),
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


def values_read(plan: PartitionPlan) -> frozenset[tuple[int, int]]:
    """Which values are read by operations of which workers."""
    nodes, workers = plan.placed.graph.nodes, plan.placed.workers
    return frozenset((r, workers[p]) for p, node in enumerate(nodes) for r in node.reads)


def what_crosses(plan: PartitionPlan, edge: Edge, read: frozenset[tuple[int, int]]) -> str:
    """An edge's contents, in words.

    Args:
        plan: The plan.
        edge: One of its edges.
        read: What ``values_read`` found: a value that no operation of the receiver reads is there
            for the user.
    """
    if edge.kind is EdgeKind.REDUCTION:
        return "norms and checks of gradients"
    node = plan.placed.graph.nodes[edge.value]
    path = node.module_path or ROOT
    name = (
        node.target if node.is_state else f"{node.name} {path if path[0] == '(' else f'({path})'}"
    )
    if edge.kind in (EdgeKind.GRADIENT, EdgeKind.BLOCK):
        borrowed = f"borrowed {node.kind.value} " if node.is_state else ""
        return f"gradient of {borrowed}{name}"
    if edge.kind is EdgeKind.GENERATOR:
        return f"generator state after {name}"
    if edge.kind is EdgeKind.PROCESS_GENERATORS:
        return f"Python's and NumPy's generators after {name}"
    if edge.kind is EdgeKind.BUFFERS:
        chain = plan.chains[plan.in_first_lane(edge.value)]
        return f"{len(chain.buffers)} buffers in turn: {name}"
    if node.is_state:
        more = f" and {len(edge.members) - 1} more" if edge.members else ""
        return f"borrowed {node.kind.value} {name}{more}"
    return f"{'value' if (edge.value, edge.destination) in read else 'output'} {name}"
