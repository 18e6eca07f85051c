"""Turn one segment of a plan into a Python function."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphsplit.capture.graph import Node
from graphsplit.partition.plan import PartitionPlan


@dataclass(frozen=True)
class SegmentCode:
    """The code of one segment.

    Attributes:
        run: Takes the segment's values and leaves, in the order of ``SegmentIO``; returns the
            tuple of its outputs.
        text: Its Python source, for people.
        node_at_line: Which node each line of the source runs.
    """

    run: Callable[..., tuple[Any, ...]]
    text: str
    node_at_line: dict[int, Node]
    filename: str

    def failing_node(self, error: BaseException) -> Node | None:
        """The operation that raised an error, if it was one of this segment."""
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename == self.filename and frame.lineno is not None:
                return self.node_at_line.get(frame.lineno)
        return None


def build_code(plan: PartitionPlan, segment: int) -> SegmentCode:
    """Cut one segment's code out of the captured graph."""
    captured = plan.placed.graph
    io = plan.io[segment]
    position_of = {node.name: p for p, node in enumerate(captured.nodes)}
    fx_nodes = {n.name: n for n in captured.fx_graph.nodes}
    graph = fx.Graph()
    whole: dict[int, fx.Node] = {
        value: graph.placeholder(f"value_{captured.nodes[value].name}") for value in io.values
    }
    by_use: dict[tuple[int, int], fx.Node] = {}
    for leaf in io.leaves:
        contribution = plan.contributions[leaf]
        name = captured.nodes[contribution.value].name
        placeholder = graph.placeholder(f"leaf{leaf}_{name}")
        by_use.update(dict.fromkeys(contribution.uses, placeholder))
    lines: dict[fx.Node, Node] = {}
    for position in plan.segments[segment].nodes:
        old = fx_nodes[captured.nodes[position].name]
        new = _copy(graph, old, captured, position, whole, by_use, position_of)
        whole[position] = new
        lines[new] = captured.nodes[position]
    graph.output(tuple(whole[p] for p in io.outputs))
    module = fx.GraphModule(captured.fx_owner, graph, class_name=f"Segment{segment}")
    return SegmentCode(
        module.forward,
        module.code,
        _line_map(module, graph, lines),
        module.forward.__code__.co_filename,
    )


def _copy(
    graph: fx.Graph,
    old: fx.Node,
    captured: Any,
    position: int,
    whole: dict[int, fx.Node],
    by_use: dict[tuple[int, int], fx.Node],
    position_of: dict[str, int],
) -> fx.Node:
    """Copy one operation, each operand replaced by the value or leaf that stands for it here."""
    count = -1
    reads = captured.nodes[position].reads

    def operand(node: fx.Node) -> fx.Node:
        nonlocal count
        if node.op == "get_attr":
            return graph.get_attr(str(node.target))
        count += 1
        leaf = by_use.get((position, count))
        return leaf if leaf is not None else whole[reads[count]]

    args, kwargs = fx.map_arg((old.args, old.kwargs), operand)
    new = graph.create_node(old.op, old.target, args, kwargs, name=old.name)
    return new


def _line_map(
    module: fx.GraphModule, graph: fx.Graph, lines: dict[fx.Node, Node]
) -> dict[int, Node]:
    ordered = list(graph.nodes)
    first = module.forward.__code__.co_firstlineno
    offsets: dict[int, int | None] = getattr(module, "_lineno_map", None) or {}
    return {
        first + line: lines[ordered[index]]
        for line, index in offsets.items()
        if index is not None and index < len(ordered) and ordered[index] in lines
    }
