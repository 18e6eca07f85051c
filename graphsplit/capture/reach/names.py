"""The names that a piece of code uses, in functions inside it as well."""

from __future__ import annotations

import dis
import functools
import types
from typing import NamedTuple

_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME")


class CodeNames(NamedTuple):
    """Names in code.

    Attributes:
        globals: Those of globals.
        every: All names.
        stored: Those of attributes that it sets.
    """

    globals: frozenset[str]
    every: frozenset[str]
    stored: frozenset[str]


@functools.lru_cache(maxsize=1 << 15)
def names_in(code: types.CodeType) -> CodeNames:
    """The names that code uses."""
    instructions = [*dis.get_instructions(code)]
    own = CodeNames(
        frozenset(i.argval for i in instructions if i.opname in _OF_GLOBALS),
        frozenset(code.co_names),
        frozenset(i.argval for i in instructions if i.opname == "STORE_ATTR"),
    )
    inside = [names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return CodeNames(*(names.union(*more) for names, *more in zip(own, *inside, strict=True)))
