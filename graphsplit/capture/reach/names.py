"""The names that a piece of code uses, in functions inside it as well."""

from __future__ import annotations

import dis
import functools
import re
import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import resolve_name
from types import ModuleType
from typing import Any, NamedTuple

from graphsplit.guards.code_facts import facts_of

_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME")


class CodeNames(NamedTuple):
    """Names in code.

    Attributes:
        globals: Those of globals.
        every: All names.
        stored: Those of attributes that it sets.
        texts: Those that it may look up: all short texts.
        imports: Modules that it imports, or takes by a text; as ``resolve_name`` takes them.
    """

    globals: frozenset[str]
    every: frozenset[str]
    stored: frozenset[str]
    texts: frozenset[str]
    imports: frozenset[str]


@functools.lru_cache(maxsize=1 << 15)
def names_in(code: types.CodeType) -> CodeNames:
    """The names that code uses."""
    instructions = [*dis.get_instructions(code)]
    own = CodeNames(
        frozenset(i.argval for i in instructions if i.opname in _OF_GLOBALS),
        frozenset(code.co_names),
        frozenset(i.argval for i in instructions if i.opname == "STORE_ATTR"),
        frozenset(one for one in code.co_consts if type(one) is str and one.isidentifier()),
        frozenset(facts_of(code).imports),
    )
    inside = [names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return CodeNames(*(names.union(*more) for names, *more in zip(own, *inside, strict=True)))


def modules_in(names: CodeNames, held: Mapping[str, Any]) -> list[ModuleType]:
    """The modules that code imports, or takes from ``sys.modules``, as far as they are there.

    Args:
        names: The names in the code.
        held: Its globals.
    """
    found = {held.get("__name__", "")} if "modules" in names.every else set()
    for name in names.imports:
        with suppress(ImportError, TypeError):
            whole = resolve_name(name, held.get("__package__"))
            found.update(whole[: dot.start()] for dot in re.finditer(r"\.|$", whole))
    there = (sys.modules.get(name) for name in sorted(found))
    return [module for module in there if isinstance(module, ModuleType)]
