"""Operations that run whole on one worker, though the modules inside may be placed apart.

Branches, loops and calls kept whole are one operation of the graph. The modules inside are known
by the parameters that they bring along. Branches whose modules are placed apart are taken apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from graphsplit.capture.branching import is_branching, why_together
from graphsplit.capture.graph import LOSS_PATH, CapturedGraph, NodeKind
from graphsplit.capture.operations.opaque_call import OpaqueCall
from graphsplit.marks.annotations import Annotation
from graphsplit.torch_ext.private import HigherOrderOperator


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
    """The fault of an operation that runs whole, if its modules are placed apart."""
    if not _is_apart(inside):
        return None
    node = graph.nodes[position]
    called = graph.fx_nodes.get(node.name)  # graphs made by hand have none
    reason = ""
    if called is not None and is_branching(called):
        reason = f": {why_together(graph, called)}"
    where = ", ".join(f"{path or '(network)'} on {found.rank}" for path, found in inside.items())
    places = "".join(f"\n    {found.source}" for found in inside.values())
    return (
        f"{node.target} runs whole on one worker{reason}, but the modules in and around it are "
        f"placed apart: {where}; place them on one worker, or put gs.place around the call\n"
        f"    {node.source}{places}"
    )


def _is_apart(inside: Mapping[str, Annotation]) -> bool:
    return len({annotation.rank for annotation in inside.values()}) > 1


def branches_placed_apart(
    graph: CapturedGraph, modules: Mapping[str, Annotation], decided: Collection[int]
) -> frozenset[str]:
    """Names of the branches whose modules are placed apart, and that can be taken apart.

    Args:
        graph: The graph.
        modules: Annotation of every placed module, by module path.
        decided: Positions of operations that a rule places whole.
    """
    names = [
        graph.nodes[position].name
        for position, inside in modules_inside(graph, modules).items()
        if graph.nodes[position].annotation is None and position not in decided
        if _is_apart(inside)
    ]
    called = [graph.fx_nodes[name] for name in names if name in graph.fx_nodes]
    return frozenset(n.name for n in called if is_branching(n) and not why_together(graph, n))


def branches_and_loops(graph: CapturedGraph) -> list[int]:
    """Positions of the operations that run whole and are neither modules nor functions."""
    return [
        position
        for position in _running_whole(graph)
        if (called := graph.fx_nodes.get(graph.nodes[position].name)) is not None
        and not isinstance(called.target, OpaqueCall)
    ]


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
