"""Comparing many places at once, by functions that do nothing else.

``h0[k0] is v0 and h1[k1] is v1 and …``: half the time of `map` with operators that do the same in
C. The code is compiled once a process; holders, keys and values are a function's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

from graphsplit.torch_ext.attributes import WRITES

# A comparison, with numbers for the columns of its rows.
IS_AT = "{0}[{1}] is {2}"
IS_NOT_IN = "{1} not in {0}"
IS_IN_CELL = "{0}.cell_contents is {1}"
IS_FIELD = {
    name: f"{{0}}.{name} is {{1}}"
    for name in (
        *("__code__", "__defaults__", "__kwdefaults__", "__doc__", "__annotations__"),
        *("__name__", "__qualname__", "__bases__"),
    )
}
HAS_CLASS = "type({0}) is {1}"
HAS_DICTIONARY = "{2}({0}, '__dict__') is {1}"  # by what asks without the class's own code
HAS_VERSION = f"{{0}}.{WRITES} == {{1}} and {{0}}.requires_grad is {{2}}"
GIVES = "{0}() == {1}"
OF_GIVES = "{0}({1}()) == {2}"
HAS_LENGTH = "len({0}) == {1}"
HAS_IN_ORDER = "all(map({3}, {1}, {2}))"  # a view of {0}, and what it gave
_AT_ONCE = 32  # rows that one function compares


def conjunctions(
    comparison: str, holder: type, rows: Sequence[tuple[Any, ...]]
) -> Iterator[Callable[[], bool]]:
    """Functions that say whether a comparison holds for rows, for some of them each.

    Args:
        comparison: One of those above.
        holder: The class of all holders: Python makes code fast for the class that it meets.
        rows: Holder, key (where it has one) and value; or what else stands in the comparison.
    """
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        code = _code(comparison, holder, len(some), len(some[0]))
        yield FunctionType(code, {}, "hold", tuple(chain.from_iterable(some)))


@cache
def _code(comparison: str, holder: type, num_rows: int, num_columns: int) -> CodeType:
    names = [[f"c{row}_{column}" for column in range(num_columns)] for row in range(num_rows)]
    conjunction = " and ".join(comparison.format(*row) for row in names)
    scope: dict[str, Any] = {}
    exec(f"def hold({', '.join(chain.from_iterable(names))}): return {conjunction}", scope)
    code: CodeType = scope["hold"].__code__
    return code
