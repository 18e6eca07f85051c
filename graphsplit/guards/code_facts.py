"""What a piece of code may read and write besides its arguments, read off its instructions.

A global or an attribute that is subscripted at once (``CONFIG["beta"]``, ``self.table[i]``) is read
in that one entry only. Wherever a container is taken for anything else, all of it counts as read.
"""

from __future__ import annotations

import dis
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

_LOADS_GLOBAL = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
_STORES_GLOBAL = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "DELETE_NAME"))
_ATTRIBUTES = frozenset(
    ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR", "IMPORT_FROM")
)
_SUBSCRIBES = frozenset(("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR"))
# ``vars(settings)["beta"]`` by other words: a text in the code may be the name of what is read.
_TAKING_NAMES = frozenset(("__dict__", "__globals__", "modules", "import_module"))
_COPIES = frozenset(("COPY", "DUP_TOP_TWO"))
_IGNORED = frozenset(("CACHE", "PRECALL", "EXTENDED_ARG", "PUSH_NULL"))
_MAX_KNOWN = 20_000


@dataclass(frozen=True)
class Subscript:
    """The entry that an instruction's container is at once asked for.

    Attributes:
        constant: The key, if it stands in the code.
        local: The name of the local variable that holds the key; empty for a constant.
    """

    constant: Any = None
    local: str = ""


@dataclass(frozen=True)
class CodeFacts:
    """What a piece of code may touch.

    Attributes:
        globals_read: Every global name that it loads, with the only entries of it that are read;
            None where the value is taken for more than that.
        globals_written: Every global name that it assigns or deletes.
        attributes: Every attribute name that it uses.
        subscripts: By offset of a loading instruction, the entry that is at once asked for.
        nested: Code of functions that it makes.
        imports: Modules that it imports, as ``importlib.util.resolve_name`` takes them.
    """

    globals_read: Mapping[str, tuple[Any, ...] | None]
    globals_written: frozenset[str]
    attributes: frozenset[str]
    subscripts: Mapping[int, Subscript]
    nested: tuple[CodeType, ...]
    imports: tuple[str, ...] = ()


_known: dict[int, tuple[CodeType, CodeFacts]] = {}


def facts_of(code: CodeType) -> CodeFacts:
    """The facts of a piece of code; found once."""
    known = _known.get(id(code))
    if known is None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        known = _known[id(code)] = code, _read(code)
    return known[1]


def _read(code: CodeType) -> CodeFacts:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _IGNORED]
    read: dict[str, tuple[Any, ...] | None] = {}
    written: set[str] = set()
    attributes: set[str] = set()
    subscripts: dict[int, Subscript] = {}
    imports: list[str] = []
    for position, instruction in enumerate(instructions):
        kind, name = instruction.opname, instruction.argval
        entry = _entry_asked_for(instructions, position)
        if entry is not None and kind.startswith("LOAD_"):
            subscripts[instruction.offset] = entry
        if kind in _LOADS_GLOBAL:
            before = read.get(name, ())
            if entry is None or entry.local or before is None:
                read[name] = None
            else:
                read[name] = (*before, entry.constant)
        elif kind in _STORES_GLOBAL:
            written.add(name)
        elif kind in _ATTRIBUTES:
            attributes.add(name)
        elif kind == "IMPORT_NAME":
            level = instructions[position - 2].argval if position > 1 else 0
            imports.append("." * level + name if isinstance(level, int) else name)
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}
    if attributes & _TAKING_NAMES:
        attributes |= texts
        imports += texts
    nested = tuple(c for c in code.co_consts if isinstance(c, CodeType))
    return CodeFacts(
        read, frozenset(written), frozenset(attributes), subscripts, nested, tuple(imports)
    )


def _entry_asked_for(instructions: Sequence[dis.Instruction], position: int) -> Subscript | None:
    """``LOAD container; LOAD key; BINARY_SUBSCR``, also as in ``container[key] += 1``."""
    if position + 2 >= len(instructions):
        return None
    key, *following = instructions[position + 1 : position + 5]
    while following and following[0].opname in _COPIES:
        following = following[1:]
    if not following or following[0].opname not in _SUBSCRIBES:
        return None
    if key.opname == "LOAD_CONST":
        return Subscript(constant=key.argval)
    return Subscript(local=key.argval) if key.opname == "LOAD_FAST" else None
