"""Which nodes of a graph look at which memory, and how to look at another version of it alike."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.fx import Node as FxNode

from graphsplit.capture.graph import CapturedGraph
from graphsplit.capture.operations.effects import alias_roots, aliased_operands, written_operands
from graphsplit.capture.operations.memory_calls import (
    ITSELF,
    Changed,
    Detached,
    Outside,
    Placed,
    Step,
    Strided,
    Taken,
    filled,
)
from graphsplit.errors import PlacementError
from graphsplit.torch_ext.attributes import base_of
from graphsplit.torch_ext.fakes import on_fakes, value_of
from graphsplit.torch_ext.private import FakeTensor, OpOverload, has_kernel, pytree


class SharedMemory:
    """The memories of a graph that are to be made functional, and the nodes that share them.

    Args:
        graph: The graph.
        names: Names of the nodes that made these memories.

    Attributes:
        notes: The graph's nodes, by name.
        fx_nodes: The same as the printed graph has them.
    """

    def __init__(self, graph: CapturedGraph, names: AbstractSet[str]) -> None:
        self.notes = {node.name: node for node in graph.nodes}
        self.fx_nodes = {node.name: node for node in graph.fx_graph.nodes}
        self._roots = alias_roots(graph.fx_graph)
        self._made = self._closed({self.fx_nodes[name] for name in names})
        self._same: dict[FxNode, FxNode] = {}
        self._returned: dict[FxNode, list[FxNode]] = {}
        self._views: dict[FxNode, bool] = {}

    def _closed(self, memories: set[FxNode]) -> set[FxNode]:
        """All that is written together with these memories belongs to them."""
        writes = [
            {root for operand in written for root in self._roots[operand]}
            for node in self.fx_nodes.values()
            if (written := written_operands(node))
        ]
        while True:
            more = {r for w in writes if not w.isdisjoint(memories) for r in w} - memories
            if not more:
                return memories
            memories |= more

    def is_written_by(self, node: FxNode) -> bool:
        """Whether an operation modifies one of these memories."""
        return any(not self._roots[n].isdisjoint(self._made) for n in written_operands(node))

    def root(self, node: FxNode) -> FxNode | None:
        """The node that made the memory, if a node shares one of these.

        Raises:
            PlacementError: It may share several.
        """
        found = self._roots[node] & self._made
        if not found:
            return None
        if len(self._roots[node]) > 1 and isinstance(node.meta.get("val"), torch.Tensor):
            raise self.refusal(node, "may share memory with several values")
        return next(iter(found))

    def share(self, node: FxNode, memories: Sequence[FxNode]) -> bool:
        """Whether a node shares one of some memories."""
        return not self._roots[node].isdisjoint(memories)

    def check(self, root: FxNode) -> None:
        """Refuse memory of which no copy can stand for it."""
        value = root.meta.get("val")
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
            raise self.refusal(root, "has no memory of which a copy could be modified")

    def is_view_inside(self, root: FxNode) -> bool:
        """Whether what made a memory gave a view of what it has inside, as ``linear`` on rows does.

        Eager mode makes the function of such a value anew at each write, as that of every view.
        """
        if root not in self._views:
            note, target = self.notes[root.name], root.target
            is_composed = isinstance(target, OpOverload) and has_kernel(
                target.name(), "CompositeImplicitAutograd"
            )
            self._views[root] = is_composed and note.requires_grad and _gives_view(root)
        return self._views[root]

    def note_same(self, node: FxNode, operand: FxNode) -> None:
        """An in-place operation returned its operand: the very same tensor."""
        operand = self.canonical(operand)
        self._same[node] = operand
        self._returned.setdefault(operand, []).append(node)

    def is_same(self, node: FxNode) -> bool:
        """Whether a node is what an in-place operation returned."""
        return node in self._same

    def canonical(self, node: FxNode) -> FxNode:
        """The node that first stood for the same tensor."""
        return self._same.get(node, node)

    def users(self, node: FxNode) -> list[FxNode]:
        """All that reads a tensor, whichever node stands for it there."""
        nodes = (node, *self._returned.get(node, ()))
        return [user for same in nodes for user in same.users]

    def steps(
        self, node: FxNode, root: FxNode, outside: Callable[[FxNode], Outside]
    ) -> tuple[Step, ...]:
        """How to take a view of memory.

        Args:
            node: What shares the memory.
            root: What made it.
            outside: Told of further operands of views; returns what stands for them.
        """
        path: list[FxNode] = []
        while node is not root:
            path.append(node)
            node = self.canonical(self._parent(node, root))
        if not path and self.is_view_inside(root):
            return (Strided(()),)
        steps: list[Step] = []
        plain: list[Taken] = []
        for view in reversed(path):
            if not _can_be_repeated(view):
                return (self._placed(path[0], root),)
            parent = self._parent(view, root)
            taken, kind = self._taken(view, parent, outside), _kind_of(view, parent)
            if kind is Strided:
                plain.append(taken)
                continue
            if plain:
                steps.append(Strided(tuple(plain)))
                plain = []
            steps.append(Detached() if kind is Detached else Changed(taken))
        return (*steps, Strided(tuple(plain))) if plain else tuple(steps)

    def _parent(self, node: FxNode, root: FxNode) -> FxNode:
        return next(n for n in aliased_operands(node) if root in self._roots[n])

    def _taken(self, view: FxNode, parent: FxNode, outside: Callable[[FxNode], Outside]) -> Taken:
        parent = self.canonical(parent)

        def marker(operand: FxNode) -> Any:
            return ITSELF if self.canonical(operand) is parent else outside(operand)

        assert callable(view.target)
        args, kwargs = filled((view.args, view.kwargs), marker, FxNode)
        return Taken(view.target, args, kwargs)

    def _placed(self, node: FxNode, root: FxNode) -> Placed:
        view, memory = node.meta.get("val"), root.meta["val"]
        if not isinstance(view, FakeTensor):
            raise self.refusal(node, "is no tensor")
        layout = [*view.shape, *view.stride(), view.storage_offset(), memory.storage_offset()]
        if view.dtype != memory.dtype or not all(isinstance(size, int) for size in layout):
            raise self.refusal(node, "shares memory in a way that cannot be repeated")
        offset = view.storage_offset() - memory.storage_offset()
        return Placed(tuple(view.shape), view.stride(), offset)

    def refusal(self, node: FxNode, why: str, or_else: str = "") -> PlacementError:
        """The error for memory that cannot be made functional; and one more way out."""
        note = self.notes.get(node.name)
        target, source = (note.target, note.source) if note is not None else (node.target, "")
        return PlacementError(
            f"{node.name} ({target}) {why}, and operations that are placed apart modify its memory "
            f"in place\n  {source}\n"
            f"  Fix: {or_else}place the operations that use it on one worker, or use operations "
            f"that return new tensors."
        )


def _gives_view(node: FxNode) -> bool:
    target: Any = node.target
    operands = torch.fx.map_arg((node.args, node.kwargs), value_of)

    def run() -> Any:
        with torch.enable_grad():
            args, kwargs = pytree.tree_map_only(torch.Tensor, _with_gradient, operands)
            return target(*args, **kwargs)

    found = on_fakes(node, run)
    return isinstance(found, torch.Tensor) and base_of(found) is not found


def _with_gradient(operand: torch.Tensor) -> torch.Tensor:
    operand = operand.detach()
    return operand.requires_grad_() if operand.is_floating_point() else operand


def _can_be_repeated(view: FxNode) -> bool:
    maker = view.args[0] if view.target is operator.getitem else view
    return isinstance(maker, FxNode) and isinstance(maker.target, OpOverload)


def _kind_of(view: FxNode, parent: FxNode) -> type[Step]:
    if view.target is torch.ops.aten.detach.default:
        return Detached
    ours, its = view.meta.get("val"), parent.meta.get("val")
    if not isinstance(ours, torch.Tensor) or not isinstance(its, torch.Tensor):
        return Strided  # a tuple of views, or one of them
    looks = [(value.dtype, value.is_conj(), value.is_neg()) for value in (ours, its)]
    return Strided if looks[0] == looks[1] else Changed
