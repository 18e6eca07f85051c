"""Which rule decides over which operation of a captured graph, and which rules decide nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from graphsplit.capture.graph import LOSS_PATH, CapturedGraph, NodeKind
from graphsplit.marks.annotations import WORKER_ROLE
from graphsplit.marks.pattern import near_miss
from graphsplit.marks.rules import OperationRule
from graphsplit.marks.source import hidden_rules


def operation_name(target: str) -> str:
    """The name by which rules know an operation: ``softmax`` for ``aten.softmax.int``."""
    parts = target.split(".")
    return parts[1] if len(parts) == 3 else parts[-1]


@dataclass(frozen=True)
class Matched:
    """The answer of the rules of operations for a graph.

    Attributes:
        deciding: The rule that decides, by position of the operation.
        dead: Rules that match nothing, each with why.
        faults: Rules that are hidden, or contradict a ``gs.place`` in the code.
    """

    deciding: dict[int, OperationRule]
    dead: tuple[tuple[OperationRule, str], ...]
    faults: tuple[str, ...]


def match_rules(graph: CapturedGraph, rules: Sequence[OperationRule]) -> Matched:
    """Find the operations that each rule names; of several rules the later one decides.

    Elements of tuples are no operations of their own here: they are taken where the tuple is made.
    """
    if not rules:
        return Matched({}, (), ())
    own = operations_by_module(graph)
    deciding: dict[int, OperationRule] = {}
    matched: dict[OperationRule, list[int]] = {}
    for rule in rules:
        matched[rule] = [p for path in own if rule.reaches(path) for p in _named(rule, own[path])]
        deciding.update(dict.fromkeys(matched[rule], rule))
    dead = [(rule, _why_dead(rule, own)) for rule, positions in matched.items() if not positions]
    hidden = hidden_rules(
        {rule.rule: positions for rule, positions in matched.items()},
        {position: rule.rule for position, rule in deciding.items()},
    )
    return Matched(deciding, tuple(dead), (*hidden, *_contradictions(graph, deciding)))


def operations_by_module(graph: CapturedGraph) -> dict[str, list[tuple[int, str]]]:
    """Positions and names of each module's own operations, in program order."""
    own: dict[str, list[tuple[int, str]]] = {}
    for position, node in enumerate(graph.nodes):
        if node.kind is NodeKind.OPERATION and not node.with_producer:
            named = (position, operation_name(node.target))
            own.setdefault(node.module_path, []).append(named)
    return own


def _named(rule: OperationRule, operations: Sequence[tuple[int, str]]) -> list[int]:
    names = re.compile(rule.names)
    found = [position for position, name in operations if names.fullmatch(name)]
    if rule.which is None:
        return found
    if isinstance(rule.which, slice):
        return found[rule.which]
    return [found[rule.which]] if -len(found) <= rule.which < len(found) else []


def _why_dead(rule: OperationRule, own: dict[str, list[tuple[int, str]]]) -> str:
    paths = [path for path in own if rule.reaches(path)]
    if paths:
        names = {name for path in paths for _, name in own[path]}
        if any(re.fullmatch(rule.names, name) for name in names):
            return "no module that it names has so many of these operations"
        bare = rule.rule.operation.partition("[")[0]
        return f"the modules that it names run no such operation{near_miss(bare, names)}"
    named = {rule.loss.text} if rule.loss is not None else rule.modules
    inside = sorted(
        path
        for path, operations in own.items()
        if any(_is_inside(path, module) for module in named)
        and any(re.fullmatch(rule.names, name) for _, name in operations)
    )
    if inside:
        return f"the modules that it names run no operation themselves; {inside[0]!r} inside does"
    return "the modules that it names run no operation themselves in this graph"


def _is_inside(path: str, module: str) -> bool:
    return path.startswith(f"{module}.") or (not module and not path.startswith(LOSS_PATH))


def _contradictions(graph: CapturedGraph, deciding: dict[int, OperationRule]) -> list[str]:
    """Rules that disagree with ``gs.place`` in the code, each pair of lines once."""
    found: dict[tuple[OperationRule, str], str] = {}
    for position, rule in deciding.items():
        annotation = graph.nodes[position].annotation
        if annotation is not None and not annotation.is_like(rule.rule.placement):
            name, where = graph.nodes[position].name, annotation.where
            problem = (
                f"operation {name!r} is placed on {WORKER_ROLE} {where} by gs.place in the code"
            )
            found.setdefault((rule, annotation.source), rule.rule.fault(problem, annotation))
    return list(found.values())
