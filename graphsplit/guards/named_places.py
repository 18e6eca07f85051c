"""Find a place again by its name, in a process that has not seen it read."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

from torch import nn

from graphsplit.frames import short_path
from graphsplit.guards.classes import is_watchable, own_dictionary
from graphsplit.guards.places import NUMBER_OF, Place, PlaceKind, cell, entry
from graphsplit.torch_ext.attributes import BUFFERS, modules_of
from graphsplit.torch_ext.steering import let_steer

_GLOBAL = re.compile(r"^(?P<file>.*\.py): (?P<name>\w+)(?P<rest>.*)$", re.DOTALL)
_FUNCTION = re.compile(
    r"^('(?P<cell>\w+)' in the closure|(?P<field>defaults|kwdefaults|doc|annotations)) of "
    r"(?P<path>.+)$",
    re.DOTALL,
)
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<key>'(?:[^'\\]|\\.)*'|\"[^\"]*\"|-?\d+)\]")


def place_named(label: str, roots: Mapping[str, Any]) -> Place | None:
    """The place with a name; None if it cannot be found.

    Args:
        label: The name that it was given where it was read.
        roots: What names begin with: ``net`` and ``loss_fn``.
    """
    found = _GLOBAL.match(label)
    if found is not None:
        return _global(found["file"], found["name"], found["rest"], label)
    found = _FUNCTION.match(label)
    if found is not None:
        return _of_function(found, roots)
    if label.startswith(NUMBER_OF):
        return _number(place_named(label.removeprefix(NUMBER_OF), roots), label)
    root = next((name for name in roots if re.match(rf"{name}[.\[]", label)), None)
    if root is not None:
        return _below(roots[root], label[len(root) :], label)
    return _of_class(label, roots)


def _number(found: Place | None, label: str) -> Place | None:
    """The number of the buffer that an attribute's place names."""
    if found is None:
        return None
    let_steer(t for name, t in found.holder.get(BUFFERS, {}).items() if name == found.key)
    return replace(found, kind=PlaceKind.NUMBER, label=label)


def _global(file: str, name: str, rest: str, label: str) -> Place | None:
    for module in list(sys.modules.values()):
        where = getattr(module, "__file__", None)
        if isinstance(where, str) and short_path(where) == file and name in vars(module):
            held = vars(module)
            return _below(held[name], rest, label) if rest else entry(held, name, label)
    return None


def _of_function(found: re.Match[str], roots: Mapping[str, Any]) -> Place | None:
    """A variable of a function's closure, or its defaults; an item of them."""
    label, path = found[0], found["path"]
    names = {f.__qualname__: f for f in _functions(roots)}
    name = max(
        (name for name in names if re.match(rf"{re.escape(name)}($|[.\[])", path)),
        key=len,
        default=None,
    )
    if name is None:
        return None
    function, rest = names[name], path[len(name) :]
    if found["field"]:
        place = Place(PlaceKind.FIELD, function, f"__{found['field']}__", label)
    else:
        variables = function.__code__.co_freevars
        cells = dict(zip(variables, function.__closure__ or (), strict=False))
        if found["cell"] not in cells:
            return None
        place = cell(cells[found["cell"]], label)
    return _below(place.read(), rest, label) if rest else place


def _functions(roots: Mapping[str, Any]) -> Iterator[FunctionType]:
    """The functions of network and loss, of their classes, and of the files of these."""
    for root in roots.values():
        known = list(root.modules()) if isinstance(root, nn.Module) else [root]
        values = list(known)
        for one in known:
            values += (own_dictionary(one) or {}).values()
            values += getattr(one, "__globals__", {}).values()
        for kind in dict.fromkeys(kind for one in known for kind in type(one).__mro__):
            if is_watchable(kind):
                values += [*vars(kind).values(), *vars(sys.modules[kind.__module__]).values()]
        for value in values:
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType):
                yield function


def _below(one: Any, path: str, label: str) -> Place | None:
    """The place at the end of ``.name`` and ``[key]`` steps."""
    steps = list(_steps(path))
    if not steps or None in steps:
        return None
    for kind, key in steps[:-1]:  # type: ignore[misc]
        one = _step(one, kind, key)
        if one is None:
            return None
    kind, key = steps[-1]  # type: ignore[misc]
    if kind == "key":
        return entry(one, key, label) if isinstance(one, (dict, list)) else None
    held = own_dictionary(one)
    if held is not None:
        module = path.rpartition(".")[0].lstrip(".") if isinstance(one, nn.Module) else None
        return entry(held, key, label, module=module)
    return Place(PlaceKind.SLOT, one, key, label)


def _steps(path: str) -> Iterator[tuple[str, Any] | None]:
    at = 0
    while at < len(path):
        found = _STEP.match(path, at)
        if found is None:
            yield None
            return
        at = found.end()
        if found["name"] is not None:
            yield "name", found["name"]
        else:
            yield "key", ast.literal_eval(found["key"])


def _step(one: Any, kind: str, key: Any) -> Any:
    if kind == "key":
        is_list = isinstance(one, list) and isinstance(key, int) and -len(one) <= key < len(one)
        return one[key] if is_list else one.get(key) if isinstance(one, dict) else None
    if isinstance(one, nn.Module) and key in modules_of(one):
        return modules_of(one)[key]
    held = own_dictionary(one)
    return held.get(key) if held is not None else getattr(one, key, None)


def _of_class(label: str, roots: Mapping[str, Any]) -> Place | None:
    owner, _, name = label.rpartition(".")
    for root in roots.values():
        known = root.modules() if isinstance(root, nn.Module) else (root,)
        for kind in {kind for one in known for kind in type(one).__mro__}:
            if kind.__qualname__ == owner and name in vars(kind):
                return Place(PlaceKind.CLASS, kind, name, label)
    return None
