"""Results that were operands when the network was captured, where gradients need to know it.

What a call kept whole hands back is known when it has run, and need not be known before. But where
uses of an operand and of the result lie in several segments, their gradients may be added up in
eager's order only if both are one value of the graph. Then they are, and the call must go on
returning it.
"""

from __future__ import annotations

import dataclasses
import operator

from torch.fx import Graph
from torch.fx import Node as FxNode

from graphsplit.capture.graph import CapturedGraph
from graphsplit.capture.operations.opaque_call import OpaqueCall, Pair, opaque_call
from graphsplit.partition.checks.returned import KNOWN_SAME, limits_of
from graphsplit.partition.edges import partition
from graphsplit.placement.resolve import PlacedGraph
from graphsplit.rewrite.rebuild import rebuilt

_MAX_CUTS = 5


def with_known_results(placed: PlacedGraph) -> PlacedGraph:
    """Let results that were operands, or other results, be the same values, where that is needed.

    Args:
        placed: The graph, every node with its worker.
    """
    if not placed.graph.has_gradients:
        return placed
    calls = [n for n in placed.graph.fx_graph.nodes if _same_as_captured(n)]
    for _ in range(_MAX_CUTS if calls else 0):
        known = _needed(placed, calls)
        if not known:
            break
        placed = dataclasses.replace(placed, graph=_with_same(placed.graph, known))
        calls = [n for n in placed.graph.fx_graph.nodes if _same_as_captured(n)]
    return placed


def _same_as_captured(node: FxNode) -> frozenset[Pair]:
    call = opaque_call(node)
    return call.traits.same if call is not None else frozenset()


def _needed(placed: PlacedGraph, calls: list[FxNode]) -> dict[str, tuple[Pair, ...]]:
    plan, found = partition(placed), {}
    for call in calls:
        limits = limits_of(plan, placed.graph.positions[call.name])
        pairs = tuple(pair for pair in limits.distinct if pair in _same_as_captured(call))
        if pairs:
            found[call.name] = pairs
    return found


def _with_same(graph: CapturedGraph, known: dict[str, tuple[Pair, ...]]) -> CapturedGraph:
    """A copy of a graph in which some results are what they were captured as."""
    made = Graph()
    made.owning_module = graph.fx_owner  # type: ignore[assignment]
    copies: dict[FxNode, FxNode] = {}
    for node in graph.fx_graph.nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
    for node, copy in list(copies.items()):
        pairs = known.get(node.name, ())
        if not pairs:
            continue
        assert isinstance(copy.target, OpaqueCall)
        copy.meta = {**copy.meta, KNOWN_SAME: (*copy.meta.get(KNOWN_SAME, ()), *pairs)}
        for first, second in pairs:
            others = [n for n in _tensors(copy, first) if n is not None]
            for result in _tensors(copy, second):
                result.replace_all_uses_with(others[0])
    return rebuilt(graph, made)


def _tensors(call: FxNode, number: int) -> list[FxNode]:
    """The nodes that stand for an operand or output of a call, by its number."""
    if number < len(call.args):
        operand = call.args[number]
        return [operand] if isinstance(operand, FxNode) else []
    elements = [user for user in call.users if user.target is operator.getitem]
    found = [user for user in elements if user.args[1] == number - len(call.args)]
    return found if elements else [call]
