"""Turn one segment of a plan into a Python function."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphsplit.capture.graph import Mode, Node
from graphsplit.capture.regions import ORDINARY, Region
from graphsplit.partition.plan import PartitionPlan
from graphsplit.runtime.region_modes import keeping_modes, modes_of, switch_modes


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
    regions = [captured.nodes[position].region for position in plan.segments[segment].nodes]
    devices = tuple(sorted({device for region in regions for device, _ in region.autocasts}))
    region = ORDINARY
    for position in plan.segments[segment].nodes:
        region = _enter(graph, region, captured.nodes[position].region, devices, captured.mode)
        old = captured.fx_nodes[captured.nodes[position].name]
        new = _copy(graph, old, captured, position, whole, by_use)
        whole[position] = new
        lines[new] = captured.nodes[position]
    graph.output(tuple(whole[p] for p in io.outputs))
    module = fx.GraphModule(captured.fx_owner, graph, class_name=f"Segment{segment}")
    run = module.forward
    return SegmentCode(
        run if set(regions) <= {ORDINARY} else keeping_modes(run, devices),
        module.code,
        _line_map(module, graph, lines),
        module.forward.__code__.co_filename,
    )


def _enter(
    graph: fx.Graph, before: Region, region: Region, devices: tuple[str, ...], mode: Mode
) -> Region:
    """Switch modes where an operation's region is not that of the one before."""
    grad_enabled = mode is Mode.TRAIN
    modes = modes_of(region, devices, grad_enabled=grad_enabled)
    if modes != modes_of(before, devices, grad_enabled=grad_enabled):
        graph.call_function(switch_modes, modes)
    return region


def _copy(
    graph: fx.Graph,
    old: fx.Node,
    captured: Any,
    position: int,
    whole: dict[int, fx.Node],
    by_use: dict[tuple[int, int], fx.Node],
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
