"""What runs whole on one worker, though the modules inside it may be placed apart.

Branches, loops and calls kept whole are one operation of the graph. The modules inside are known
by the parameters that they bring along.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._ops import HigherOrderOperator

from graphsplit.capture.graph import LOSS_PATH, CapturedGraph, NodeKind
from graphsplit.capture.opaque import OpaqueCall
from graphsplit.placement.annotations import Annotation


def nearest(modules: Mapping[str, Annotation], path: str) -> tuple[str, Annotation] | None:
    """The nearest placed module around a module path, itself included."""
    inside_loss = path.partition(".")[0] == LOSS_PATH  # the loss is no part of the network
    while path:
        if path in modules:
            return path, modules[path]
        path = path.rpartition(".")[0]
        if not path and inside_loss:
            return None
    return ("", modules[""]) if "" in modules else None


def modules_inside(
    graph: CapturedGraph, modules: Mapping[str, Annotation]
) -> dict[int, dict[str, Annotation]]:
    """For each operation that runs whole: the placed modules in it, and the one around it."""
    found: dict[int, dict[str, Annotation]] = {}
    for position in _running_whole(graph):
        node = graph.nodes[position]
        states = [graph.nodes[r].module_path for r in node.reads if graph.nodes[r].is_state]
        placed = [nearest(modules, path) for path in (*states, node.module_path)]
        found[position] = dict(entry for entry in placed if entry is not None)
    return found


def torn_apart(graph: CapturedGraph, position: int, inside: Mapping[str, Annotation]) -> str | None:
    """What is wrong with an operation that runs whole, if its modules are placed apart."""
    if len({annotation.rank for annotation in inside.values()}) < 2:
        return None
    node = graph.nodes[position]
    where = ", ".join(f"{path or '(network)'} on {found.rank}" for path, found in inside.items())
    places = "".join(f"\n    {found.source}" for found in inside.values())
    return (
        f"{node.target} runs whole on one worker, but the modules in and around it are placed "
        f"apart: {where}; place them on one worker, or put gs.place around the call\n"
        f"    {node.source}{places}"
    )


def _running_whole(graph: CapturedGraph) -> list[int]:
    candidates = [
        position
        for position, node in enumerate(graph.nodes)
        if node.kind is NodeKind.OPERATION
        and not node.with_producer
        and not node.target.startswith("aten.")
    ]
    if not candidates:
        return []
    targets = {fx_node.name: fx_node.target for fx_node in graph.fx_graph.nodes}
    return [
        p for p in candidates if _is_whole(graph.nodes[p].target, targets.get(graph.nodes[p].name))
    ]


def _is_whole(target: str, called: object) -> bool:
    if isinstance(called, OpaqueCall):
        return not called.label.endswith(".apply")  # a custom function has no modules inside
    if isinstance(called, HigherOrderOperator):
        return True
    return "." not in target and hasattr(torch.ops.higher_order, target)
