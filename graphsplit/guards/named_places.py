"""Find a place again by its name, in a process that has not seen it read."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import nn

from graphsplit.frames import short_path
from graphsplit.guards.classes import own_dictionary
from graphsplit.guards.places import Place, PlaceKind, cell, entry

_GLOBAL = re.compile(r"^(?P<file>.*\.py): (?P<name>\w+)(?P<rest>.*)$", re.DOTALL)
_CLOSURE = re.compile(r"^'(?P<name>\w+)' in the closure of (?P<function>.+)$")
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
    found = _CLOSURE.match(label)
    if found is not None:
        return _variable(roots.get("loss_fn"), found["name"], found["function"], label)
    root = next((name for name in roots if re.match(rf"{name}[.\[]", label)), None)
    if root is not None:
        return _below(roots[root], label[len(root) :], label)
    return _of_class(label, roots)


def _global(file: str, name: str, rest: str, label: str) -> Place | None:
    for module in list(sys.modules.values()):
        where = getattr(module, "__file__", None)
        if isinstance(where, str) and short_path(where) == file and name in vars(module):
            held = vars(module)
            return _below(held[name], rest, label) if rest else entry(held, name, label)
    return None


def _variable(function: Any, name: str, of: str, label: str) -> Place | None:
    if not isinstance(function, FunctionType) or function.__qualname__ != of:
        return None
    held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    return cell(held[name], label) if name in held else None


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
        return entry(held, key, label)
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
    if isinstance(one, nn.Module) and key in one._modules:
        return one._modules[key]
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
