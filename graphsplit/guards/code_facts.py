"""Names that a piece of code may read and write besides its arguments, by its instructions.

A global, a variable of a closure or an attribute that is at once asked for one item
(``CONFIG["beta"]``, ``self.table[i]``, ``self.settings.rate``) is read in that item only. Wherever
a container is taken for anything else, all of it counts as read.
"""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import getclosurevars
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from graphsplit.errors import CaptureError
from graphsplit.frames import is_own, is_users, where_defined
from graphsplit.guards.classes import is_watchable, is_watchable_module
from graphsplit.guards.hidden import presence_of
from graphsplit.guards.places import Place, PlaceKind, entry, named_place
from graphsplit.guards.values import CONTAINERS, MISSING

_LOADS_GLOBAL = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
_STORES_GLOBAL = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "DELETE_NAME"))
_ATTRIBUTES = frozenset(
    ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR", "IMPORT_FROM")
)
_SUBSCRIBES = frozenset(("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR"))
# ``vars(settings)["beta"]`` by other words: a text in the code may be the name of what is read.
_TAKING_NAMES = frozenset(("__dict__", "__globals__", "modules", "import_module"))
# A closure's variables by other words.
_TAKING_LOCALS = frozenset(("locals", "vars", "dir", "eval", "exec", "f_locals"))
# What a function consists of, though it does not run.
_LOOKING_INTO = frozenset(
    ("__defaults__", "__kwdefaults__", "__code__", "__closure__", "signature", "getfullargspec")
)
_OF_CELLS = frozenset(dis.opname[number] for number in dis.hasfree) | {"LOAD_FAST"}
_ASKS_ATTRIBUTE = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"))
_COPIES = frozenset(("COPY", "DUP_TOP", "DUP_TOP_TWO"))
_IGNORED = frozenset(("CACHE", "PRECALL", "EXTENDED_ARG", "PUSH_NULL"))
_MAX_KNOWN = 20_000


@dataclass(frozen=True)
class Item:
    """The item that an instruction's container is at once asked for.

    Attributes:
        key: The key, position or attribute, if it stands in the code.
        local: The name of the local variable that holds the key; empty if it stands in the code.
        is_attribute: Whether it is asked for by ``.name``.
        then: The item that this one is at once asked for.
    """

    key: Any = None
    local: str = ""
    is_attribute: bool = False
    then: Item | None = None


@dataclass(frozen=True)
class CodeFacts:
    """Names that a piece of code may touch.

    Attributes:
        globals_read: Every global name that it loads, with the only items of it that are read;
            None where the value is taken for more than that.
        cells_read: The variables of its closure, likewise.
        globals_written: Every global name that it assigns or deletes.
        attributes: Every attribute name that it uses.
        items: By offset of a loading instruction, the item that is at once asked for.
        nested: Code of functions that it makes.
        imports: Modules that it imports, as ``importlib.util.resolve_name`` takes them.
        looks_into_functions: Whether it may ask functions for their defaults or variables.
    """

    globals_read: Mapping[str, tuple[Item, ...] | None]
    cells_read: Mapping[str, tuple[Item, ...] | None]
    globals_written: frozenset[str]
    attributes: frozenset[str]
    items: Mapping[int, Item]
    nested: tuple[CodeType, ...]
    imports: tuple[str, ...] = ()
    looks_into_functions: bool = False


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
    read: dict[str, tuple[Item, ...] | None] = {}
    cells: dict[str, tuple[Item, ...] | None] = {}
    written: set[str] = set()
    attributes: set[str] = set()
    items: dict[int, Item] = {}
    imports: list[str] = []
    for position, instruction in enumerate(instructions):
        kind, name = instruction.opname, instruction.argval
        item = _item_asked_for(instructions, position)
        if item is not None and kind.startswith("LOAD_"):
            items[instruction.offset] = item
        if kind in _LOADS_GLOBAL:
            _add(read, name, item)
        elif name in code.co_freevars and kind in _OF_CELLS:
            _add(cells, name, item if kind == "LOAD_DEREF" else None)
        elif kind in _STORES_GLOBAL:
            written.add(name)
        elif kind in _ATTRIBUTES:
            attributes.add(name)
        elif kind == "MATCH_CLASS":
            attributes.add("__match_args__")
        elif kind == "IMPORT_NAME":
            level = instructions[position - 2].argval if position > 1 else 0
            imports.append("." * level + name if isinstance(level, int) else name)
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}
    if attributes & _TAKING_NAMES:
        attributes |= texts
        imports += texts
    if "get_type_hints" in (*read, *attributes):
        attributes.add("__annotations__")
    nested = tuple(c for c in code.co_consts if isinstance(c, CodeType))
    if not _TAKING_LOCALS.isdisjoint((*read, *attributes)):
        cells = dict.fromkeys(code.co_freevars)
    return CodeFacts(
        read,
        cells,
        frozenset(written),
        frozenset(attributes),
        items,
        nested,
        tuple(imports),
        looks_into_functions=not _LOOKING_INTO.isdisjoint((*read, *attributes)),
    )


def _add(read: dict[str, tuple[Item, ...] | None], name: str, item: Item | None) -> None:
    """Add a read of one item of what has a name, or of all of it."""
    before = read.get(name, ())
    only = _in_code(item)
    read[name] = None if before is None or only is None else (*before, only)


def _item_asked_for(instructions: Sequence[dis.Instruction], position: int) -> Item | None:
    """``LOAD container; LOAD key; BINARY_SUBSCR`` or ``LOAD container; LOAD_ATTR name``.

    Also as in ``container[key] += 1`` and ``container.name += 1``.
    """
    at = _past_copies(instructions, position + 1)
    if at < len(instructions) and instructions[at].opname in _ASKS_ATTRIBUTE:
        then = _item_asked_for(instructions, at) if at == position + 1 else None
        return Item(instructions[at].argval, is_attribute=True, then=_in_code(then))
    at = _past_copies(instructions, position + 2)
    if at >= len(instructions) or instructions[at].opname not in _SUBSCRIBES:
        return None
    key = instructions[position + 1]
    if key.opname == "LOAD_CONST":
        return Item(key.argval, then=_in_code(_item_asked_for(instructions, at)))
    return Item(local=key.argval) if key.opname == "LOAD_FAST" else None


def _in_code(item: Item | None) -> Item | None:
    """An item whose key stands in the code; None for others."""
    return None if item is None or item.local else item


def _past_copies(instructions: Sequence[dis.Instruction], at: int) -> int:
    while at < len(instructions) and instructions[at].opname in _COPIES:
        at += 1
    return at


# Functions of libraries that code calls by name: a script may put others there (F.relu = f), and
# numbers and texts of its own (np.scale = 2.0).

HUNG_THERE = (int, float, complex, str)


def library_places(code: CodeType, held: Mapping[str, Any]) -> Iterator[Place]:
    """The places of Python's own functions, and of those and of plain values of libraries.

    Those that code names.

    Args:
        code: What ran.
        held: Its globals.
    """
    for name, items in facts_of(code).globals_read.items():
        if name in held:
            yield from _functions_in(held[name], items or ())
        elif callable(vars(builtins).get(name)):
            yield entry(vars(builtins), name, f"builtins.{name}")


def _functions_in(module: Any, items: Iterable[Item]) -> Iterator[Place]:
    if not isinstance(module, ModuleType) or is_watchable_module(module):
        return  # what is read of the user's own modules is noted as it is read
    for item in items:
        value = vars(module).get(item.key)
        if _is_function(value) or isinstance(value, HUNG_THERE):
            yield entry(vars(module), item.key, f"{module.__name__}.{item.key}")
        elif item.then is not None:
            inner = module if item.key == "__dict__" else value
            yield from _functions_in(inner, (item.then,))


def is_hung(value: Any) -> bool:
    """Whether a value in a library may be the script's: a container, its own object or class.

    The table of all modules is none: imports change it.
    """
    kind = value if isinstance(value, type) else type(value)
    return (isinstance(value, CONTAINERS) and value is not sys.modules) or is_watchable(kind)


def places_asked(holder: Any, name: str | None, label: str) -> Iterator[Place]:
    """The places of what a module, a class, a function or all globals are asked for.

    Args:
        holder: Who is asked; of globals, their dictionary.
        name: The name, which was computed; None: all that it has may be read.
        label: The holder, for people.
    """
    holders = [holder]
    if isinstance(holder, type):
        holders = [kind for kind in holder.__mro__ if is_watchable(kind)]
    elif isinstance(holder, ModuleType):
        label = holder.__name__
        if not is_watchable_module(holder):
            value = vars(holder).get(name or "", MISSING)
            holders = [holder] * (is_hung(value) or isinstance(value, HUNG_THERE))
            if name is not None and value is MISSING:
                yield presence_of(vars(holder), name, label)
    for one in holders:
        held = one if isinstance(one, dict) else vars(one)
        for asked in list(held) if name is None else [name]:
            is_module = name is None and isinstance(held[asked], ModuleType)
            if not is_module and not (asked.startswith("__") and asked.endswith("__")):
                yield named_place(one, asked, f"{getattr(one, '__qualname__', label)}.{asked}")


def hung_on(holder: Any, items: Iterable[Item]) -> Iterator[tuple[Place, tuple[Item, ...] | None]]:
    """The places of what a script has hung on a library's module, its classes and functions.

    Numbers and texts of modules aside.

    Args:
        holder: The module, class or function.
        items: What code asks it for.

    Yields:
        A place, and the only items of it that are read; None for all.
    """
    for item in items:
        name, then = str(item.key), None if item.then is None else (item.then,)
        value = vars(holder).get(name)
        is_plain = isinstance(value, HUNG_THERE) and not isinstance(holder, ModuleType)
        if is_hung(value) or is_plain:
            yield named_place(holder, name, f"{holder.__name__}.{name}"), then
        elif isinstance(value, (ModuleType, type, FunctionType)) and then is not None:
            yield from hung_on(value, then)


def names_used_by(kinds: Iterable[type]) -> set[str]:
    """The attribute names in the functions of modules' classes, PyTorch's own included."""
    functions = (
        value
        for kind in {base for one in kinds for base in one.__mro__}
        if issubclass(kind, nn.Module) and kind is not nn.Module
        for value in vars(kind).values()
    )
    codes = (value.__code__ for value in functions if isinstance(value, FunctionType))
    return {name for code in codes for name in facts_of(code).attributes}


def torch_places(names: Iterable[str]) -> Iterator[Place]:
    """The places of PyTorch's functions and methods with these names.

    Raises:
        CaptureError: A function that calls the one that it stands for was put there.
    """
    for name in sorted(names):
        for holder, label in ((torch, "torch"), (F, "torch.nn.functional")):
            if _is_function(vars(holder).get(name)):
                yield entry(vars(holder), name, f"{label}.{name}")
        if _is_function(getattr(torch.Tensor, name, None)):
            yield Place(PlaceKind.CLASS, torch.Tensor, name, f"torch.Tensor.{name}")
        _check_not_wrapped(vars(F).get(name), name, "torch.nn.functional")
        _check_not_wrapped(vars(torch.Tensor).get(name), name, "torch.Tensor")


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (type, ModuleType))


def _check_not_wrapped(value: Any, name: str, where: str) -> None:
    """While torch records, these look themselves up by name: a wrapper would run many times."""
    if not isinstance(value, FunctionType) or not is_users(value.__code__.co_filename):
        return
    used = (value.__globals__.get(name) for name in facts_of(value.__code__).globals_read)
    cells = getclosurevars(value).nonlocals.values()
    if any(getattr(one, "__name__", "") == name for one in (*used, *cells, *_given(value))):
        raise CaptureError(
            f"{where}.{name} was replaced by a function that calls the original, which cannot be "
            f"recorded\n"
            f"  {where_defined(value.__code__)}\n"
            f"  Fix: leave {where}.{name} as it is, and call the function of your own by its name."
        )


def _given(function: FunctionType) -> tuple[Any, ...]:
    """Values in a function's defaults and attributes."""
    by_name = function.__kwdefaults__ or {}
    return (*(function.__defaults__ or ()), *by_name.values(), *vars(function).values())


def is_put_there(value: Any) -> bool:
    """Whether a global is one that stands there only while a step is recorded."""
    return (
        isinstance(value, FunctionType)
        and is_own(value.__code__.co_filename)
        and "__wrapped__" not in vars(value)  # gs.opaque's are the user's
    )
