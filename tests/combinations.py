"""Which combinations of a test's parameters run.

Where tests train networks, one takes about a second. There each value of each parameter runs, and
each pair of values where a test has three parameters or more (pairwise testing, as in D. R. Kuhn,
R. N. Kacker and Y. Lei, «Practical Combinatorial Testing», NIST SP 800-142): others for each test,
the same in every run. With ``ALL_COMBINATIONS`` all of them run: ``make test-all``.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

FOLDERS = frozenset({"distribute", "equivalence", "recovery", "train"})
Values = tuple[tuple[str, Any], ...]  # of one combination: each parameter, and its value's identity


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The tests that show nothing that others of the same function do not show."""
    if "ALL_COMBINATIONS" in os.environ:
        return set()
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent.name in FOLDERS:
            by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {
        group[index]
        for group in by_function.values()
        for index in redundant([(item.nodeid, _values(item)) for item in group])
    }


def redundant(every: Sequence[tuple[str, Values]]) -> set[int]:
    """The places of those that are not needed to see each value, or each pair of values.

    Args:
        every: A name, which decides between combinations that show as much, and the values.
    """
    strength = 1 if len(every[0][1]) < 3 else 2
    shown = [set(combinations(values, strength)) for _, values in every]
    if not every[0][1]:  # no parameters: one test
        return set()
    rest = sorted(range(len(every)), key=lambda index: zlib.crc32(every[index][0].encode()))
    to_see = set().union(*shown)
    while to_see:
        best = max(rest, key=lambda index: len(to_see & shown[index]))
        to_see -= shown[best]
        rest.remove(best)
    return set(rest)


def _values(item: pytest.Item) -> Values:
    """Parameters that are given together count as one."""
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    found: list[tuple[str, Any]] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
        found.append((",".join(names), tuple(id(params[name]) for name in names)))
    return tuple(found)
