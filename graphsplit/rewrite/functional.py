"""Give memory that operations modify in place a new version at every write.

A pure pass over a captured graph; `graphsplit.capture.operations.memory_calls` shows what it does.
Eager autograd makes the gradient function of a view anew when the view is first used after a write,
and that of the written view at once. Gradients are summed in the order in which functions were
made, so views are taken again at just these places.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

from graphsplit.capture.graph import BufferUpdate, CapturedGraph
from graphsplit.capture.operations.effects import written_operands
from graphsplit.capture.operations.memory_calls import (
    Detached,
    GiveBackVersion,
    Inside,
    KeepVersion,
    MemoryCall,
    Outside,
    Step,
    ViewAgain,
    WriteToCopy,
)
from graphsplit.capture.operations.regions import region_of
from graphsplit.errors import InvariantError
from graphsplit.rewrite.in_place_calls import WrittenCall, describe_write, reads_its_own_write
from graphsplit.rewrite.rebuild import rebuilt
from graphsplit.rewrite.shared_memory import SharedMemory
from graphsplit.torch_ext.fakes import copy_notes, formed_like
from graphsplit.torch_ext.private import FakeTensor

_PURE = (operator.getitem, torch.ops.aten.alias.default)


@dataclass(frozen=True)
class Functional:
    """A graph in which some memories are never modified.

    Attributes:
        graph: The graph.
        origins: For every node that was added, by name, the node of the old graph on whose worker
            it runs.
    """

    graph: CapturedGraph
    origins: dict[str, str]


def make_functional(
    graph: CapturedGraph,
    memories: AbstractSet[str],
    *,
    readers: Mapping[str, Sequence[Sequence[str]]],
) -> Functional:
    """Let operations write to copies of some memories.

    Args:
        graph: The graph.
        memories: Names of the nodes that made these memories.
        readers: For inputs among them, by name: for each worker that reads it, the operations there
            that do. The last version is given back to the caller's tensor on each of them.

    Raises:
        PlacementError: An operation writes to such a memory in a way that allows no copy.
    """
    return _Functionaliser(graph, SharedMemory(graph, memories), readers).run()


@dataclass
class _Memory:
    """A memory while the graph is gone through.

    Attributes:
        node: Its current version in the new graph.
        version: How many writes there were.
        writer: Name of the operation that made the current version.
    """

    node: FxNode
    version: int
    writer: str


class _Functionaliser:
    """Copies a graph node by node."""

    def __init__(
        self,
        graph: CapturedGraph,
        shared: SharedMemory,
        readers: Mapping[str, Sequence[Sequence[str]]],
    ) -> None:
        self._graph = graph
        self._shared = shared
        self._readers = readers
        self._position = {node: i for i, node in enumerate(graph.fx_graph.nodes)}
        self._new = Graph()
        self._new.owning_module = graph.fx_owner  # type: ignore[assignment]
        self._taken_names = set(shared.fx_nodes)
        self._memories: dict[FxNode, _Memory] = {}
        self._env: dict[FxNode, FxNode] = {}  # what was copied -> its copy
        self._defined_at: dict[FxNode, int] = {}  # what shares memory -> the version it looks at
        self._again: dict[FxNode, tuple[int, FxNode]] = {}  # its latest view, and of which version
        self._results: dict[tuple[Any, ...], FxNode] = {}  # (operation, index) -> new memory
        self._origins: dict[str, str] = {}
        self._runs_after: dict[str, Sequence[str]] = {}

    def run(self) -> Functional:
        for node in self._graph.fx_graph.nodes:
            if node.op == "output":
                self._keep_versions()
                self._new.node_copy(node, lambda n: self._current(n, None))
            elif node.op == "call_function" and self._shared.is_written_by(node):
                self._write(node)
            elif not self._shared.is_same(node):
                self._copy(node)
        updates = [self._reading_versions(update) for update in self._graph.buffer_updates]
        self._drop_unused({name for update in updates for name in update.reads})
        origins, after = self._origins, self._runs_after
        graph = rebuilt(self._graph, self._new, origins=origins, runs_after=after)
        graph = dataclasses.replace(graph, buffer_updates=tuple(updates))
        return Functional(graph, origins)

    def _reading_versions(self, update: BufferUpdate) -> BufferUpdate:
        """An update that reads what its norms do; nothing writes to what it reads after that."""
        nodes = self._shared.fx_nodes
        norms = [n for n in self._env if n.target is torch.ops.aten.batch_norm.default]
        pairs = (zip(n.args, self._env[n].args, strict=True) for n in norms)
        known = {old: new for both in pairs for old, new in both if isinstance(new, FxNode)}
        reads = [nodes[name] for name in update.reads]
        found = (known[node] if node in known else self._current(node, None) for node in reads)
        return dataclasses.replace(update, reads=tuple(node.name for node in found))

    def _copy(self, node: FxNode) -> None:
        root = self._shared.root(node)
        is_element = node.target is operator.getitem
        if is_element and node.args[:2] in self._results:
            self._env[node] = self._results[node.args[:2]]
        elif is_element and root not in (None, node) and self._is_stale(node.args[0], root):
            assert root is not None
            self._env[node] = self._take_again(node, root)
        else:
            self._env[node] = self._new.node_copy(node, lambda n: self._current(n, node))
            if self._env[node].name != node.name:
                raise InvariantError(f"{node.name} would be called {self._env[node].name}")
        if root is node:
            self._shared.check(node)
            self._memories[node] = _Memory(self._env[node], 0, node.name)
            if self._shared.is_view_inside(node):  # what comes before a write goes through it
                self._env[node] = self._seen(node)
        if root is not None:
            self._defined_at[node] = self._memories[root].version

    def _seen(self, node: FxNode) -> FxNode:
        alias, name = torch.ops.aten.alias.default, f"{node.name}_seen"
        made = self._add(alias, (self._env[node],), name, origin=node.name, like=node)
        made.meta["val"] = node.meta["val"]
        return made

    def _is_stale(self, views: Any, root: FxNode | None) -> bool:
        """Whether a tuple of views was taken before the last write."""
        return root is not None and self._defined_at.get(views) != self._memories[root].version

    def _current(self, node: FxNode, user: FxNode | None) -> FxNode:
        """The node that now holds a node's value, for an operation of the old graph."""
        node = self._shared.canonical(node)
        root = self._shared.root(node)
        if root is None:
            return self._env[node]
        memory = self._memories[root]
        if node is root and not self._shared.is_view_inside(root):
            return memory.node
        if self._defined_at[node] == memory.version:
            return self._env[node]
        version, found = self._again.get(node, (-1, memory.node))
        if version == memory.version:
            return found
        found = self._take_again(node, root)
        # A use that makes no gradient does not make eager mode look at the view's function.
        notes = self._shared.notes
        if user is None or not self._graph.has_gradients or notes[user.name].requires_grad:
            self._again[node] = (memory.version, found)
        return found

    def _take_again(self, node: FxNode, root: FxNode) -> FxNode:
        memory = self._memories[root]
        operands: list[FxNode] = []

        def outside(operand: FxNode) -> Outside:
            operands.append(self._current(operand, None))
            return Outside(len(operands) - 1)

        call = ViewAgain(self._shared.steps(node, root, outside))
        made = self._add(
            call, (memory.node, *operands), f"{node.name}_again", origin=memory.writer, like=node
        )
        made.meta["val"] = _fake_view(made, node)
        return made

    def _write(self, node: FxNode) -> None:
        """Replace an in-place operation by one that writes to copies."""
        shared = self._shared
        written = list(dict.fromkeys(shared.canonical(n) for n in written_operands(node)))
        bases = list(dict.fromkeys(r for n in written if (r := shared.root(n)) is not None))
        call = describe_write(node, shares_written=lambda n: shared.share(n, bases))
        views: list[tuple[int, tuple[Step, ...]]] = []
        operands: list[FxNode] = []

        def outside(operand: FxNode) -> Outside:
            operands.append(self._current(operand, node))
            return Outside(len(operands) - 1)

        def marker(operand: FxNode, is_written: bool) -> Inside | Outside:
            operand = shared.canonical(operand)
            root = shared.root(operand)
            is_target = is_written and operand in written
            if root not in bases or not (
                is_target or operand is root or reads_its_own_write(node, operand, written)
            ):
                return outside(operand)
            assert root is not None
            steps = shared.steps(operand, root, outside)
            if is_target:
                self._check_gradient(node, steps)
            views.append((bases.index(root), steps))
            return Inside(len(views) - 1)

        args, kwargs = call.fill(marker)
        assert callable(node.target)
        write = WriteToCopy(
            node.target,
            args,
            kwargs,
            views=tuple(views),
            kept=call.kept,
            region=region_of(node),
            is_random=shared.notes[node.name].is_random,
        )
        memories = tuple(self._memories[base].node for base in bases)
        made = self._add(write, (memories, tuple(operands)), node.name, origin=node.name, like=node)
        self._take_results(node, made, call, bases)
        self._take_written_views(node, written)

    def _take_results(
        self, node: FxNode, made: FxNode, call: WrittenCall, bases: Sequence[FxNode]
    ) -> None:
        """Note what holds the operation's results, and the new versions."""
        values = (*call.kept_values, *(_like(base.meta["val"]) for base in bases))
        made.meta["val"] = values[0] if len(values) == 1 else values
        parts = [made] if len(values) == 1 else self._elements_of(made, len(values), node)
        fresh, versions = parts[: len(call.kept)], parts[len(call.kept) :]
        for base, version in zip(bases, versions, strict=True):
            number = self._memories[base].version
            self._memories[base] = _Memory(version, number + 1, node.name)
        for index, result in zip(call.kept, fresh, strict=True):
            self._results[node, index] = result
        for user in node.users:
            if user.target is operator.getitem and user.args[1] in call.same:
                self._shared.note_same(user, call.same[user.args[1]])
        if call.is_tuple or not isinstance(node.meta.get("val"), torch.Tensor):
            return
        if 0 in call.same:
            self._shared.note_same(node, call.same[0])
        elif fresh:
            self._env[node] = fresh[0]
        else:
            root = self._shared.root(node)
            assert root is not None
            self._env[node] = self._take_again(node, root)
            self._defined_at[node] = self._memories[root].version

    def _take_written_views(self, node: FxNode, written: Sequence[FxNode]) -> None:
        here = self._position[node]
        for operand in written:
            root = self._shared.root(operand)
            is_used = any(self._position[user] > here for user in self._shared.users(operand))
            if root is None or (root is operand and not self._shared.is_view_inside(root)):
                continue
            if is_used:
                version = self._memories[root].version
                self._again[operand] = (version, self._take_again(operand, root))

    def _elements_of(self, made: FxNode, number: int, like: FxNode) -> list[FxNode]:
        elements = []
        for index in range(number):
            name = f"{made.name}_{index}"
            element = self._add(operator.getitem, (made, index), name, origin=like.name, like=like)
            element.meta["val"] = made.meta["val"][index]
            elements.append(element)
        return elements

    def _check_gradient(self, node: FxNode, steps: Sequence[Step]) -> None:
        is_detached = any(isinstance(step, Detached) for step in steps)
        if is_detached and self._shared.notes[node.name].requires_grad:
            raise self._shared.refusal(
                node,
                "writes something with a gradient through a detached view",
                "write value.detach() there, if its gradient is not wanted, as into .data of a "
                "buffer; or ",
            )

    def _add(
        self, target: Any, args: tuple[Any, ...], name: str, *, origin: str, like: FxNode
    ) -> FxNode:
        while name in self._taken_names and name != like.name:
            name += "_"
        made = self._new.create_node("call_function", target, args, {}, name=name)
        self._taken_names.add(made.name)
        copy_notes(made, like)
        self._origins[made.name] = origin
        return made

    def _keep_versions(self) -> None:
        """At the end, put the last versions where eager mode leaves them."""
        for root, memory in self._memories.items():
            if root.op != "placeholder" or memory.version == 0:
                continue
            if self._shared.notes[root.name].is_state:
                self._add_end(KeepVersion(), root, memory, root.name)
            for operations in self._readers.get(root.name, ()):
                made = self._add_end(GiveBackVersion(), root, memory, operations[0])
                self._runs_after[made.name] = operations

    def _add_end(self, call: MemoryCall, root: FxNode, memory: _Memory, origin: str) -> FxNode:
        args = (self._env[root], memory.node)
        like = self._shared.fx_nodes[memory.writer]
        return self._add(call, args, f"{root.name}_{call.label}", origin=origin, like=like)

    def _drop_unused(self, kept: AbstractSet[str]) -> None:
        for node in reversed(list(self._new.nodes)):
            is_pure = isinstance(node.target, ViewAgain) or node.target in _PURE
            if node.name in self._origins and is_pure and not node.users and node.name not in kept:
                self._new.erase_node(node)
                del self._origins[node.name]


def _like(value: FakeTensor) -> torch.Tensor:
    with value.fake_mode, torch.no_grad():
        return formed_like(value)


def _fake_view(made: FxNode, like: FxNode) -> Any:
    """The look of a view of a version; it shares the version's memory."""
    values = [n.meta.get("val") for n in made.all_input_nodes]
    assert isinstance(values[0], FakeTensor)
    target: Any = made.target
    with values[0].fake_mode, torch.no_grad():
        found = target(*values)
    expected = like.meta.get("val")
    assert isinstance(expected, torch.Tensor)
    if found.dtype != expected.dtype or str(found.shape) != str(expected.shape):
        raise InvariantError(f"{like.name} would get another dtype or shape")
    return found
