"""A graph as text, with numbers in place of the nodes that give them: two that compute the same.

A tensor that code makes of numbers is a constant where they are plain, and several operations where
they are lifted::

    torch.tensor([0.5, 0.25])    lift_fresh_copy(constant)
    torch.tensor([beta, 0.25])   stack([scalar_tensor(beta), scalar_tensor(0.25)])

In the text it is a tensor with its values either way. A tensor of one element that the user keeps
in an attribute is a constant, or made of a lifted number; it stands where it is used.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphsplit.capture.graph import CapturedGraph, Node, NodeKind
from graphsplit.frames import short_path
from graphsplit.guards.changes import value_of
from graphsplit.guards.values import Frozen, thaw, with_leaves


def canonical_lines(
    graph: CapturedGraph, lifted: Sequence[Any] = (), batch: Sequence[Any] = ()
) -> list[tuple[str, str]]:
    """The lines of the text, each with what is told of it to a person.

    Args:
        graph: The graph.
        lifted: The values of its lifted numbers.
        batch: The leaves of an example of the batch: numbers made of its sizes, or of lifted ones,
            are told by their values.
    """
    numbers: Mapping[str, Any] = {}
    if graph.sizes is not None and batch:
        symbols = graph.sizes.bind(batch, lifted)
        numbers = (graph.sizes.compute(symbols) if symbols is not None else None) or {}
    shown_as: dict[int, str] = {}
    lines: list[tuple[str, str]] = []
    made = TensorsOfNumbers.of(graph)
    for position, node in enumerate(graph.nodes):
        if node.kind is NodeKind.NUMBER and node.name in numbers:
            shown_as[position] = repr(numbers[node.name])
            continue
        if position in made.parts:
            continue
        if position in made.kept:
            shown_as[position] = f"tensor {made.values(position, numbers)} {node.meta}"
            continue
        shown_as[position] = f"%{len(lines)}"
        if position in made.tensors:
            target, arguments = "tensor", str(made.values(position, numbers))
        else:
            target = node.target
            arguments = re.sub(r"%(\d+)", lambda m: shown_as[int(m[1])], node.arguments)
        line = (
            f"{node.kind.value} {target}({arguments}) {node.meta} {node.module_path} "
            f"{node.source} {node.annotation} {node.region} {node.requires_grad} {node.is_random} "
            f"{node.changes_inputs} {[shown_as[p] for p in node.runs_after if p in shown_as]}"
        )
        where = f", {short_path(node.source)}" if node.source else ""
        lines.append((line, f"{target}({arguments}){where}"))
    others = [
        *graph.code_of_branches(),
        *(
            f"constant {name} {value.detach().cpu().reshape(-1).tolist()}"
            for name, value in sorted(graph.constants.items())
            if graph.positions[name] not in made.parts | made.kept
        ),
        *(
            f"leaves {change.place.label} {[_text_of(one, lifted) for one in change.with_names()]}"
            for change in graph.changes
        ),
        *(repr(out.constant) if out.node is None else shown_as[out.node] for out in graph.outputs),
    ]
    return [*lines, *((line, line) for line in others)]


@dataclass
class TensorsOfNumbers:
    """The nodes of a graph that make tensors of nothing but numbers.

    Attributes:
        graph: The graph.
        tensors: The positions of what makes one.
        parts: Those of what is made for that alone, and of checks of it.
        kept: Those of tensors of one element that the user keeps somewhere.
    """

    graph: CapturedGraph
    tensors: set[int] = field(default_factory=set)
    parts: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, graph: CapturedGraph) -> TensorsOfNumbers:
        """Find them."""
        found, readers = cls(graph), defaultdict(list)
        for position, node in enumerate(graph.nodes):
            for read in node.reads:
                readers[read].append(position)
        for position, node in enumerate(graph.nodes):
            if node.target == _CHECK:
                found.parts.add(position)
            elif _is_single(node) and (
                _is_constant(node)
                or (not node.source and node.target == _SCALAR)
                or (not node.source and node.target == _STACK and found.kept.issuperset(node.reads))
            ):
                found.kept.add(position)
            elif (
                node.target == _SCALAR
                or (node.target == _COPY and _is_constant(graph.nodes[node.reads[0]]))
                or (node.target == _STACK and found.tensors.issuperset(node.reads))
            ):
                found.tensors.add(position)
        for position, node in enumerate(graph.nodes):
            is_part = position in found.tensors or _is_constant(node)
            if is_part and readers[position] and found.tensors.issuperset(readers[position]):
                found.parts.add(position)
        return found

    def forms(self) -> Iterator[tuple[Any, ...]]:
        """Kind, target and mark of each node, without the numbers."""
        for position, node in enumerate(self.graph.nodes):
            if node.kind is not NodeKind.NUMBER and position not in self.parts | self.kept:
                target = "tensor" if position in self.tensors else node.target
                yield node.kind, target, node.requires_grad

    def values(self, position: int, numbers: Mapping[str, Any]) -> Any:
        """The elements of a tensor, in lists."""
        node = self.graph.nodes[position]
        if node.target == _STACK:
            return [self.values(read, numbers) for read in node.reads]
        if node.target == _COPY:
            name = self.graph.nodes[node.reads[0]].name
            return self.graph.constants[name].detach().cpu().tolist()
        if _is_constant(node):
            return self.graph.constants[node.name].detach().cpu().tolist()
        assert node.meta is not None
        number: Any = node.arguments.partition(",")[0]
        try:
            read = self.graph.nodes[node.reads[0]].name if node.reads else None
            number = ast.literal_eval(number) if read is None else numbers[read]
            return torch.scalar_tensor(number, dtype=node.meta.dtype).item()
        except (LookupError, ValueError):  # made of a size, or not finite
            return number


def _is_constant(node: Node) -> bool:
    return node.kind is NodeKind.CONSTANT


def _is_single(node: Node) -> bool:
    return node.meta is not None and all(size == 1 for size in node.meta.shape)


_COPY, _SCALAR, _STACK, _CHECK = (
    f"aten.{name}"
    for name in (
        "lift_fresh_copy.default",
        "scalar_tensor.default",
        "stack.default",
        "_assert_tensor_metadata.default",
    )
)


def _text_of(new: Any, lifted: Sequence[Any]) -> str:
    value = with_leaves(new, lambda leaf: value_of(leaf, lifted))
    return repr(thaw(value)) if isinstance(value, Frozen) else repr(value)
