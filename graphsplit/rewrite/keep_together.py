"""Memory that is modified in place must lie on one worker, in one segment; else it gets versions.

Where all operations that touch a modified memory run in one segment (a parameter or buffer: on its
owner), they stay as they are. The other memories are made functional
(`graphsplit.rewrite.functional`), and the graph is cut again, until no memory is torn apart.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node as FxNode

from graphsplit.capture.graph import CapturedGraph, NodeKind
from graphsplit.capture.operations.effects import alias_roots, written_operands
from graphsplit.partition.edges import segments_in_eager_order
from graphsplit.partition.segments import Segmentation
from graphsplit.placement.resolve import PlacedGraph
from graphsplit.rewrite.functional import make_functional
from graphsplit.torch_ext.attributes import operator_schema
from graphsplit.torch_ext.private import OpOverload

# Each round may move operations to other segments, and so tear further memories apart. After as
# many, all that are no parameters or buffers are made functional.
_MAX_CUTS = 5


def keep_memory_together(
    placed: PlacedGraph, also: frozenset[str] = frozenset()
) -> tuple[PlacedGraph, frozenset[str]]:
    """Make the modified memories functional that a placement tears apart.

    Args:
        placed: A graph with its placement.
        also: Further memories to make functional, as the placement of another lane tears them.

    Returns:
        A graph in which every modified memory lies in one segment, or, if it is a parameter or a
        buffer, on the worker that owns it; the same graph if it is like that already. And which
        memories were made functional.

    Raises:
        PlacementError: An operation writes to such a memory in a way that allows no copy.
    """
    if not any(node.shares_modified for node in placed.graph.nodes):
        return placed, also
    functional = also
    current = _with_versions(placed, functional) if functional else placed
    for cuts_left in reversed(range(_MAX_CUTS)):
        torn = _torn_memories(current, all_values=not cuts_left) - functional
        if not torn:
            break
        functional |= torn
        current = _with_versions(placed, functional)
    return current, functional


def _with_versions(placed: PlacedGraph, memories: frozenset[str]) -> PlacedGraph:
    made = make_functional(placed.graph, memories, readers=_readers(placed, memories))
    position = {node.name: p for p, node in enumerate(placed.graph.nodes)}
    workers, reasons = [], []
    for node in made.graph.nodes:
        origin = made.origins.get(node.name)
        before = position[node.name if origin is None else origin]
        workers.append(placed.workers[before])
        is_new = origin is not None and origin != node.name
        reasons.append(f"made for {origin}" if is_new else placed.reasons[before])
    return replace(placed, graph=made.graph, workers=tuple(workers), reasons=tuple(reasons))


def _readers(placed: PlacedGraph, memories: frozenset[str]) -> dict[str, list[list[str]]]:
    """For each input among these memories: the operations that read it, worker by worker."""
    nodes = placed.graph.nodes
    inputs = {
        p: n.name for p, n in enumerate(nodes) if n.kind is NodeKind.INPUT and n.name in memories
    }
    found: dict[str, dict[int, list[str]]] = {name: {} for name in inputs.values()}
    if not inputs:
        return {}
    for position, node in enumerate(nodes):
        for operand in set(node.reads) & inputs.keys():
            by_worker = found[inputs[operand]]
            by_worker.setdefault(placed.workers[position], []).append(node.name)
    return {name: list(by_worker.values()) for name, by_worker in found.items()}


def _torn_memories(placed: PlacedGraph, *, all_values: bool) -> frozenset[str]:
    memories = _Memories(placed.graph)
    torn = {*_returned(placed, memories), *_on_two_workers(placed, memories)}
    torn |= _viewed_on_two_workers(placed, memories) | _carrying_gradients(placed.graph, memories)
    if all_values:
        state = {node.name for node in placed.graph.nodes if node.is_state}
        torn |= {root for root in memories.modified if root.name not in state}
    elif any(not is_state for node in placed.graph.nodes for _, is_state in node.shares_modified):
        torn |= _in_two_segments(placed, segments_in_eager_order(placed)[0], memories)
    return frozenset(root.name for root in torn)


class _Memories:
    """Which memories each node touches, and which of them are modified."""

    def __init__(self, graph: CapturedGraph) -> None:
        self.fx_nodes = {n.name: n for n in graph.fx_graph.nodes}
        self.roots = alias_roots(graph.fx_graph) if self.fx_nodes else {}
        self.names = [node.name for node in graph.nodes]
        self.modified: set[FxNode] = set()
        for node in graph.fx_graph.nodes:
            for operand in written_operands(node):
                self.modified |= self.roots[operand]

    def shared_by(self, node: FxNode) -> set[FxNode]:
        """The modified memories that a node is, looks at or writes to."""
        written = (self.roots[operand] for operand in written_operands(node))
        return set(self.roots[node]).union(*written) & self.modified

    def touched(self, position: int) -> set[FxNode]:
        """The modified memories that a node uses, or makes."""
        node = self.fx_nodes.get(self.names[position])
        if node is None:
            return set()
        found = set(self.roots[node]).union(*(self.roots[n] for n in node.all_input_nodes))
        return found & self.modified


def _on_two_workers(placed: PlacedGraph, memories: _Memories) -> set[FxNode]:
    """Parameters and buffers that others than their owner modify, or use once modified."""
    torn: set[FxNode] = set()
    for position, node in enumerate(placed.graph.nodes):
        for shared, is_state in node.shares_modified:
            if is_state and placed.workers[shared] != placed.workers[position]:
                torn |= memories.touched(position) & memories.touched(shared)
    return torn


def _viewed_on_two_workers(placed: PlacedGraph, memories: _Memories) -> set[FxNode]:
    """Parameters, buffers and inputs of which there are views elsewhere, or writes to such views.

    A view that went to another worker and came back looks at a copy.
    """
    seen_on: dict[FxNode, set[int]] = {}
    for name, worker in zip(memories.names, placed.workers, strict=True):
        node = memories.fx_nodes.get(name)
        for root in memories.shared_by(node) if node is not None and worker >= 0 else ():
            if root.op == "placeholder":
                seen_on.setdefault(root, set()).add(worker)
    return {root for root, workers in seen_on.items() if len(workers) > 1}


def _in_two_segments(
    placed: PlacedGraph, segmentation: Segmentation, memories: _Memories
) -> set[FxNode]:
    torn: set[FxNode] = set()
    nodes, segment_of = placed.graph.nodes, segmentation.segment_of
    for position, node in enumerate(nodes):
        for shared, is_state in node.shares_modified:
            is_operation = nodes[shared].kind is NodeKind.OPERATION
            if not is_state and is_operation and segment_of[shared] != segment_of[position]:
                torn |= memories.touched(position) & memories.touched(shared)
    return torn


def _returned(placed: PlacedGraph, memories: _Memories) -> set[FxNode]:
    """Modified parameters, buffers and inputs that other workers are to know at the end."""
    if placed.num_workers == 1:
        return set()
    kept = {n for n in memories.modified if n.op == "placeholder"}
    torn: set[FxNode] = set()
    for output in placed.graph.outputs:
        if output.node is not None:
            torn |= memories.touched(output.node) & kept
    for name, readers in _readers(placed, frozenset(n.name for n in kept)).items():
        if len(readers) > 1:
            torn.add(memories.fx_nodes[name])
    return torn


def _carrying_gradients(graph: CapturedGraph, memories: _Memories) -> set[FxNode]:
    """Parameters and buffers to which something with a gradient is written.

    Running statistics, which no schema says are written to, never get one.
    """
    torn: set[FxNode] = set()
    for node in graph.nodes:
        if not node.changes_inputs or not node.requires_grad:
            continue
        write = memories.fx_nodes[node.name]
        if isinstance(write.target, OpOverload) and operator_schema(write.target).is_mutable:
            for operand in written_operands(write):
                torn |= {root for root in memories.roots[operand] if root.op == "placeholder"}
    return torn
