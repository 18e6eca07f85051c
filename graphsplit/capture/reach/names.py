"""The names in all code that some values lead to: what it may call, though nobody can run it."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

from graphsplit.capture.reach.reach import Walk, is_of_library, names_in


def names_within_reach(roots: Iterable[Any]) -> frozenset[str]:
    """All names in the code that some values lead to; that of libraries apart."""
    walk = Walk(())
    walk.run(roots)
    functions = (value for value in walk.seen.values() if isinstance(value, types.FunctionType))
    own = (function for function in functions if not is_of_library(function.__module__))
    return frozenset().union(*(names_in(function.__code__)[1] for function in own))
