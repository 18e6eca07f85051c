"""A graph as text, with numbers in place of the nodes that give them: two that compute the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from graphsplit.capture.graph import CapturedGraph, NodeKind
from graphsplit.frames import short_path
from graphsplit.guards.changes import Computed, value_of
from graphsplit.guards.values import Frozen, thaw


def canonical_lines(
    graph: CapturedGraph, lifted: Sequence[Any] = (), batch: Sequence[Any] = ()
) -> list[tuple[str, str]]:
    """The lines of the text, each with what is told of it to a person.

    Args:
        graph: The graph.
        lifted: The values of its lifted numbers.
        batch: The leaves of an example of the batch, where values are lifted.
    """
    numbers: Mapping[str, Any] = {}
    if graph.sizes is not None and lifted:
        symbols = graph.sizes.bind(batch, lifted)
        numbers = (graph.sizes.compute(symbols) if symbols is not None else None) or {}
    shown_as: dict[int, str] = {}
    lines: list[tuple[str, str]] = []
    for position, node in enumerate(graph.nodes):
        if node.kind is NodeKind.NUMBER and node.name in numbers:
            shown_as[position] = repr(numbers[node.name])
            continue
        shown_as[position] = f"%{len(lines)}"
        arguments = re.sub(r"%(\d+)", lambda m: shown_as[int(m[1])], node.arguments)
        line = (
            f"{node.kind.value} {node.target}({arguments}) {node.meta} {node.module_path} "
            f"{node.source} {node.annotation} {node.region} {node.requires_grad} {node.is_random} "
            f"{node.changes_inputs} {[shown_as[p] for p in node.runs_after]}"
        )
        where = f", {short_path(node.source)}" if node.source else ""
        lines.append((line, f"{node.target}({arguments}){where}"))
    others = [
        *graph.code_of_branches(),
        *(
            f"constant {name} {value.detach().cpu().reshape(-1).tolist()}"
            for name, value in sorted(graph.constants.items())
        ),
        *(
            f"leaves {change.place.label} {_text_of(change.new, lifted)}"
            for change in graph.changes
        ),
        *(repr(out.constant) if out.node is None else shown_as[out.node] for out in graph.outputs),
    ]
    return [*lines, *((line, line) for line in others)]


def _text_of(new: Any, lifted: Sequence[Any]) -> str:
    value = value_of(new, lifted) if isinstance(new, Computed) else new
    return repr(thaw(value)) if isinstance(value, Frozen) else repr(value)
