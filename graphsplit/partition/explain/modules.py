"""The modules of a plan as a tree, shown down to where everything inside is on one worker.

module              worker  parameters    bytes  operations  activations  why
(network)           0, 1        10,192  39.8 KiB         235      80.1 KiB
  model             0, 1 ...
    layers.{0..2}   0    ...                                               placed
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graphsplit.capture.graph import LOSS_PATH, Node, NodeKind
from graphsplit.partition.dump import human_bytes
from graphsplit.partition.explain.folding import Row, fold_repetitions
from graphsplit.partition.explain.operations import ROOT
from graphsplit.partition.plan import PartitionPlan
from graphsplit.placement.resolve import EVERYWHERE
from graphsplit.text import align

_OWN = "(its own operations)"
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_UNPLACED = 12
_MAX_WORKERS = 6


@dataclass
class _Branch:
    """One module with what it holds itself: positions of operations, parameters and buffers."""

    path: str
    own: list[int] = field(default_factory=list)
    children: dict[str, _Branch] = field(default_factory=dict)

    def inside(self) -> list[int]:
        """Positions of everything in it."""
        found = list(self.own)
        for child in self.children.values():
            found += child.inside()
        return found


def module_lines(plan: PartitionPlan) -> list[str]:
    """The tree of modules. Lines of modules that repeat show the sum over all of them."""
    rows: list[Row] = []
    for top in _tree(plan):
        rows += _rows(plan, top, is_top=True)
    header = ("module", "worker", "parameters", "bytes", "operations", "activations", "why")
    lines: list[tuple[str, ...]] = [header]
    around: list[str] = []  # the paths of the modules around, as shown
    for row in fold_repetitions(rows):
        own, worker, *numbers, why = row.cells
        while around and not _is_inside(row.path, around[-1]):
            around.pop()
        if own:
            name = _OWN
        else:
            name = row.path.removeprefix(f"{around[-1]}.") if around else row.path
            name = name or ROOT
        depth = len(around)
        if not own:
            around.append(row.path)
        elements, size, operations, activations = (_times(row.path, n) for n in numbers)
        lines.append(
            (
                f"{'  ' * depth}{name}",
                worker,
                f"{elements:,}" if elements else "",
                human_bytes(size) if size else "",
                str(operations) if operations else "",
                human_bytes(activations) if activations else "",
                why,
            )
        )
    return align(lines, right=frozenset({2, 3, 4, 5}))


def _is_inside(path: str, module: str) -> bool:
    if not module:  # the network is around everything but the loss
        return path.partition(".")[0] != LOSS_PATH
    return path == module or path.startswith(f"{module}.")


def _times(path: str, number: str) -> int:
    """A number of one module, for all those that a folded path names."""
    ranges = (int(found[2]) - int(found[1]) + 1 for found in _RANGE.finditer(path))
    return int(number) * math.prod(ranges)


def _tree(plan: PartitionPlan) -> list[_Branch]:
    """The network, and the loss where it computes something."""
    network, loss = _Branch(""), _Branch(LOSS_PATH)
    for position in plan.counted():
        node = plan.placed.graph.nodes[position]
        if plan.placed.workers[position] == EVERYWHERE:
            continue
        parts = node.module_path.split(".") if node.module_path else []
        branch = network
        if parts and parts[0] == LOSS_PATH:
            branch, parts = loss, parts[1:]
        for part in parts:
            path = f"{branch.path}.{part}" if branch.path else part
            branch = branch.children.setdefault(part, _Branch(path))
        branch.own.append(position)
    return [branch for branch in (network, loss) if branch.own or branch.children]


def _rows(plan: PartitionPlan, branch: _Branch, *, is_top: bool = False) -> list[Row]:
    workers = plan.placed.workers
    inside = branch.inside()
    is_whole = len({workers[p] for p in inside}) == 1
    if (is_whole and not (is_top and branch.path == "")) or not branch.children:
        return [_row(plan, branch.path, inside)]
    rows: list[Row] = []
    if branch.own or is_top:
        rows.append(_row(plan, branch.path, inside, has_why=False))
    if branch.own:
        rows.append(_row(plan, branch.path, branch.own, is_own=True))
    for child in branch.children.values():
        rows += _rows(plan, child)
    return rows


def _row(
    plan: PartitionPlan,
    path: str,
    positions: Sequence[int],
    *,
    is_own: bool = False,
    has_why: bool = True,
) -> Row:
    nodes = [plan.placed.graph.nodes[p] for p in positions]
    parameters = [n for n in nodes if n.kind is NodeKind.PARAMETER]
    operations = [n for n in nodes if n.kind is NodeKind.OPERATION]
    elements = sum(n.meta.num_elements for n in parameters if n.meta is not None)
    num_lanes = max(1, len(plan.lanes))
    cells = (
        "own" if is_own else "",
        _list(sorted({plan.placed.workers[p] for p in positions})),
        str(elements),
        str(size_of(parameters)),
        str(len(operations) // num_lanes),
        str(size_of(operations) // num_lanes),
        _why(plan, path, positions) if has_why else "",
    )
    return Row(path, cells, frozenset({6}))


def size_of(nodes: Iterable[Node]) -> int:
    """Bytes of some nodes' values."""
    return sum(node.meta.size_bytes for node in nodes if node.meta is not None)


def _list(workers: Sequence[int]) -> str:
    shown = ", ".join(map(str, workers[:_MAX_WORKERS]))
    return f"{shown}, ... ({len(workers)})" if len(workers) > _MAX_WORKERS else shown


def _why(plan: PartitionPlan, path: str, positions: Sequence[int]) -> str:
    """Why a module is where it is: by its own placement, that of one around it, or otherwise."""
    reasons = plan.placed.reasons
    operations = [
        p
        for p in positions
        if plan.placed.graph.nodes[p].kind is NodeKind.OPERATION
        and not plan.placed.graph.nodes[p].with_producer
    ]
    kinds: Counter[str] = Counter()
    for position in operations or positions:
        kind = kind_of(reasons[position])
        module = placing_module(reasons[position])
        if kind == PLACED and module is not None and module != path and _is_inside(path, module):
            kind = f"with {module or ROOT}"
        kinds[kind] += 1
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(3))


def unplaced_lines(plan: PartitionPlan) -> list[str]:
    """Where operations went that nobody placed, module by module, with the first one's reason."""
    groups: dict[tuple[str, int], list[int]] = {}
    nodes, placed = plan.placed.graph.nodes, plan.placed
    for position, node in enumerate(nodes):
        if node.kind is not NodeKind.OPERATION or node.with_producer:
            continue
        if kind_of(placed.reasons[position]) == UNPLACED:
            key = (node.module_path, placed.workers[position])
            groups.setdefault(key, []).append(position)
    rows = [
        Row(
            path,
            (
                f"{len(positions)} operation{'s' if len(positions) > 1 else ''}",
                f"worker {worker}",
                placed.reasons[positions[0]] + (", ..." if len(positions) > 1 else ""),
            ),
            frozenset({2}),
        )
        for (path, worker), positions in groups.items()
    ]
    folded = fold_repetitions(rows)
    lines = align([(row.path or ROOT, *row.cells) for row in folded[:_MAX_UNPLACED]])
    if len(folded) > _MAX_UNPLACED:
        lines.append(f"... and {len(folded) - _MAX_UNPLACED} more lines; detail='operations'")
    return lines


PLACED, BLOCK, RULE, UNPLACED = "placed", "gs.place", "rule", "not placed"


def kind_of(reason: str) -> str:
    """The kind of a reason that ``placement.resolve`` gave for an operation."""
    if reason.startswith(("module ", "the network is placed")):
        return PLACED
    if reason.startswith("gs.place at "):
        return BLOCK
    return RULE if reason.startswith("rule ") else UNPLACED


def placing_module(reason: str) -> str | None:
    """Path of the module whose placement a reason names; ``""`` for the network."""
    if reason.startswith("the network is placed"):
        return ""
    return reason.split()[1] if reason.startswith("module ") else None
