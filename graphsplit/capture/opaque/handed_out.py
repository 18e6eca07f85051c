"""The memory that a value may lie in, where a call kept whole may have handed out its arguments.

``y = call(h)`` may be new, or ``h`` itself, or a view of it: that is known once it has run. It
makes a difference only where something is written to that memory later, in place::

    y = call(h)        is h changed as well?  In one segment that comes out by itself: all run in
    y += 1             program order, in place, as in eager mode. Elsewhere it must be as it was
    z = g(h)           when the network was captured, or the step fails.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphsplit.capture.operations.effects import alias_roots, aliased_operands, written_operands
from graphsplit.capture.operations.opaque_call import Pair, opaque_call

# In ``Node.meta`` of a call kept whole: a tuple of ``WrittenLater``.
WRITTEN_LATER = "graphsplit_written_later"

Memories = Mapping[Node, frozenset[Node]]


@dataclass(frozen=True)
class WrittenLater:
    """Two tensors of a call of which it matters whether they share memory.

    Attributes:
        pair: Their numbers; see ``opaque.Traits.sharing``.
        touching: Names of all operations that use the memory of one of them.
        writes: Names of those that write to it after the call.
        is_kept: Whether it is still looked at after the last operation.
    """

    pair: Pair
    touching: frozenset[str]
    writes: frozenset[str]
    is_kept: bool


def possible_memories(graph: Graph) -> dict[Node, frozenset[Node]]:
    """For every node, the nodes in whose memory it may lie; for results of calls also their own."""
    roots = alias_roots(graph)
    found: dict[Node, frozenset[Node]] = {}
    for node in graph.nodes:
        memories = set(roots[node])
        for operand in aliased_operands(node):
            if not roots[operand].isdisjoint(roots[node]):
                memories |= found[operand]
        if opaque_call(node) is not None:
            memories |= {node}.union(*(found[n] for n in _tensors(node)))
        elif _element_of_call(node) is not None:
            memories |= {node} | found[node.all_input_nodes[0]]
        found[node] = frozenset(memories)
    return found


def _tensors(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _element_of_call(node: Node) -> Node | None:
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return None
    return node.args[0] if opaque_call(node.args[0]) is not None else None


def note_written_later(graph: Graph) -> None:
    """Note at each call kept whole what must be known of the memory of its results."""
    calls = [node for node in graph.nodes if opaque_call(node) is not None]
    if not calls:
        return
    position = {node: i for i, node in enumerate(graph.nodes)}
    memories = possible_memories(graph)
    writes = [(n, set().union(*(memories[o] for o in written_operands(n)))) for n in graph.nodes]
    writes = [(node, written) for node, written in writes if written]
    for call in calls:
        later = [(n, written) for n, written in writes if position[n] > position[call]]
        if later:
            noted = _Pairs(call, memories, later).noted()
            call.meta[WRITTEN_LATER] = tuple(noted)


class _Pairs:
    """The tensors of one call, and what is written after it."""

    def __init__(self, call: Node, memories: Memories, later: list[tuple[Node, set[Node]]]) -> None:
        self._call = call
        self._memories = memories
        self._later = later
        self._users: dict[Node, frozenset[Node]] = {}

    def noted(self) -> list[WrittenLater]:
        tensors: dict[int, Node] = {
            i: n for i, n in enumerate(self._call.args) if isinstance(n, Node)
        }
        first = len(self._call.args)
        for output in self._outputs():
            index = 0 if output is self._call else output.args[1]
            assert isinstance(index, int)
            tensors[first + index] = output
        pairs = ((i, j) for j in tensors if j >= first for i in tensors if i < j)
        found = (self._written_later(pair, tensors[pair[0]], tensors[pair[1]]) for pair in pairs)
        return [pair for pair in found if pair is not None]

    def _outputs(self) -> list[Node]:
        if isinstance(self._call.meta.get("val"), torch.Tensor):
            return [self._call]
        return [user for user in self._call.users if user.target is operator.getitem]

    def _written_later(self, pair: Pair, other: Node, output: Node) -> WrittenLater | None:
        if not isinstance(other.meta.get("val"), torch.Tensor):
            return None
        of_output, of_other = self._users_of(output), self._users_of(other)
        mine = {n for n, _ in self._later if n in of_output}
        others = {n for n, _ in self._later if n in of_other}
        outlives = any(root.op == "placeholder" for root in self._memories[other])
        is_seen_elsewhere = bool(of_other - of_output - {self._call}) or outlives
        if not (mine and is_seen_elsewhere) and not (others - mine and of_output):
            return None
        touching = (of_output | of_other) - {self._call}
        is_kept = any(node.op == "output" for node in touching)
        return WrittenLater(
            pair,
            frozenset(node.name for node in touching if node.op == "call_function"),
            frozenset(node.name for node in mine | others),
            is_kept,
        )

    def _users_of(self, value: Node) -> frozenset[Node]:
        """All that uses the memory of a value: that it makes, or that it may have been given."""
        if value not in self._users:
            is_output = value in self._outputs()
            own = frozenset({value}) if is_output else self._memories[value]
            self._users[value] = frozenset(
                user
                for node, memories in self._memories.items()
                if not own.isdisjoint(memories)
                for user in node.users
                if not (user is self._call or _element_of_call(user) is self._call)
            )
        return self._users[value]
