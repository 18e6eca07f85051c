"""Show once what a long model repeats: ``layers.3`` to ``layers.17``, which differ by number only.

Rows are grouped by the first number in their module path. Consecutive groups become one if, with
the number left out, they read the same::

    layers.3.fc  linear  worker 1          layers.{3..5}.fc  linear  worker 1
    layers.4.fc  linear  worker 1    ->
    layers.5.fc  linear  worker 1

Numbers further inside (``layers.3.experts.0``) are folded first, by the same rule.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

# The number that torch.fx appends to the name of the second `linear`, the third, and so on.
_NODE_NUMBER = re.compile(r"(?<=[A-Za-z0-9_])_\d+\b")


@dataclass(frozen=True)
class Row:
    """One line of a table, under the path of a module.

    Attributes:
        path: The module's path.
        cells: The columns.
        names: Indices of the cells that mention nodes or modules by name.
    """

    path: str
    cells: tuple[str, ...]
    names: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Group:
    """Consecutive rows under one numbered module, or under none.

    Attributes:
        prefix: Path up to the number; "" where there is no number.
        first: The number of the first module folded into it; -1 where there is none.
        last: The number of the last one.
        rows: The rows of the first one.
    """

    prefix: str
    first: int
    last: int
    rows: tuple[Row, ...]


def fold_repetitions(rows: Sequence[Row], *, depth: int = 0) -> list[Row]:
    """Fold consecutive modules whose rows differ by their number only.

    Args:
        rows: All rows, in program order.
        depth: Which number of a path to fold by: 0 for the first.
    """
    folded: list[_Group] = []
    for (prefix, number), members in groupby(rows, key=lambda row: _numbered(row.path, depth)):
        group = tuple(members)
        if number >= 0:
            group = tuple(fold_repetitions(group, depth=depth + 1))
        current = _Group(prefix, number, number, group)
        if folded and _repeats(folded[-1], current):
            folded[-1] = replace(folded[-1], last=number)
        else:
            folded.append(current)
    return [row for group in folded for row in _rows_of(group)]


def _numbered(path: str, depth: int) -> tuple[str, int]:
    """The path up to its number of that depth, and the number; ``("", -1)`` without one."""
    parts = path.split(".")
    positions = [i for i, part in enumerate(parts) if part.isdigit()]
    if depth >= len(positions):
        return "", -1
    return ".".join(parts[: positions[depth]]), int(parts[positions[depth]])


def _repeats(earlier: _Group, later: _Group) -> bool:
    return (
        later.first >= 0
        and earlier.prefix == later.prefix
        and earlier.last + 1 == later.first
        and _renumbered(earlier, "{}") == _renumbered(later, "{}")
    )


def _rows_of(group: _Group) -> tuple[Row, ...]:
    if group.first == group.last:
        return group.rows
    return _renumbered(group, f"{{{group.first}..{group.last}}}")


def _renumbered(group: _Group, number: str) -> tuple[Row, ...]:
    """The rows with another number, and without the numbers of nodes."""
    dot = "." if group.prefix else ""
    old = re.compile(rf"(?<![\w.]){re.escape(f'{group.prefix}{dot}{group.first}')}(?![\w])")
    new = f"{group.prefix}{dot}{number}"
    return tuple(
        Row(
            old.sub(lambda _: new, row.path),
            tuple(
                _NODE_NUMBER.sub("", old.sub(lambda _: new, cell)) if i in row.names else cell
                for i, cell in enumerate(row.cells)
            ),
            row.names,
        )
        for row in group.rows
    )
