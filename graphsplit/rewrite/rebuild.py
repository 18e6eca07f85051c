"""Nodes for a graph that was made from a captured one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch.fx import Graph
from torch.fx import Node as FxNode

from graphsplit.capture.graph import CapturedGraph, Node
from graphsplit.capture.nodes import NodeBuilder
from graphsplit.capture.operations.shared_outputs import MemoryPart


def rebuilt(
    graph: CapturedGraph,
    fx_graph: Graph,
    *,
    origins: Mapping[str, str] = MappingProxyType({}),
    runs_after: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> CapturedGraph:
    """A captured graph with another one in its place, in which names stay the same.

    Args:
        graph: The captured graph.
        fx_graph: The new graph.
        origins: For every node that was added, by name, the node it was made for.
        runs_after: By name, what else a node must run after.
    """
    built = _Rebuilder(graph, fx_graph, origins, runs_after).built()
    return dataclasses.replace(
        graph, nodes=tuple(built.nodes), fx_graph=fx_graph, outputs=built.outputs
    )


class _Rebuilder(NodeBuilder):
    """Takes from the old nodes what is not in the new graph."""

    def __init__(
        self,
        graph: CapturedGraph,
        fx_graph: Graph,
        origins: Mapping[str, str],
        runs_after: Mapping[str, Sequence[str]],
    ) -> None:
        program: Any = SimpleNamespace(
            graph=fx_graph, graph_signature=SimpleNamespace(input_specs=()), constants={}
        )
        super().__init__(program, {}, graph.mode.records_gradients)
        self._old = {node.name: node for node in graph.nodes}
        self._old_outputs = graph.outputs
        self._origins = origins
        self._more_runs_after = runs_after

    def add(self, fx_node: FxNode) -> None:
        num_before = len(self.nodes)
        super().add(fx_node)
        if fx_node.op == "call_function" and len(self.nodes) > num_before:
            self.nodes[-1] = self._as_before(self.nodes[-1])

    def _add_placeholder(self, fx_node: FxNode) -> None:
        old = self._old.get(fx_node.name)
        if old is not None:  # else: a tied tensor, whose first placeholder stands for all
            self._append(fx_node, old)

    def _parts(self, leaves: Sequence[Any]) -> Sequence[MemoryPart | None]:
        return [output.part for output in self._old_outputs]

    def _as_before(self, node: Node) -> Node:
        positions = (
            {made.name: p for p, made in enumerate(self.nodes)}
            if (node.name in self._more_runs_after)
            else {}
        )
        after = [positions[name] for name in self._more_runs_after.get(node.name, ())]
        old = self._old.get(self._origins.get(node.name, node.name))
        if old is None or old.is_state:
            return node
        return dataclasses.replace(
            node,
            runs_after=tuple(sorted({*node.runs_after, *after})),
            module_path=old.module_path,
            source=old.source,
            annotation=old.annotation,
        )
