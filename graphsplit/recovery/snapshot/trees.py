"""The contents of holders of Python state, in a form that can be written.

A value is a list that begins with what it is::

    value       ["v", 3]                    and whatever else can be written
    way         ["w", way]                  a thing that the script has built
    container   ["n", number, kind, ...]    made by code; what is met again is ["r", number]
    tuple       ["t", [...]]                and the way to its class, where it has one
    contents    ["l", [...]]                of the list, set or queue that is the holder itself
    generator   ["g", state]
    nothing     ["gone"]                    an empty cell, a global that was deleted
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphsplit.capture.reach.contents import NOTHING
from graphsplit.capture.reach.holders import Holder
from graphsplit.capture.reach.ways import Ways
from graphsplit.capture.state.kept_names import with_names, with_stand_ins
from graphsplit.checkpoint.generators import put_generator, state_of_generator
from graphsplit.errors import StateError
from graphsplit.guards.values import freeze, put_into, thaw
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.planning.python_values import can_be_written
from graphsplit.torch_ext.attributes import MODULES, PARAMETERS, is_of_user

Written = list[list[Any]]  # of each entry its key, and its value where that is not as it was built
_MADE = {kind.__name__: kind for kind in (dict, OrderedDict, list, set, deque)}


class UnwritableError(Exception):
    """Something cannot be written; says what."""


class TreeWriter:
    """Writes what several holders hold.

    Args:
        ways: The ways to what the script has built, by identity.
        network: Keeps the values of tensors that stand in Python.

    Attributes:
        numbers: Of containers and tensors that code has made, by identity.
    """

    def __init__(self, ways: Mapping[int, str], network: nn.Module) -> None:
        self._ways, self._network = ways, network
        self.numbers: dict[int, int] = {}
        self._held: list[Any] = []

    def written(self, holder: Holder) -> Written:
        """The contents of a holder.

        Raises:
            UnwritableError: Some of it cannot be written.
        """
        if holder.is_generator:
            return [["", ["g", state_of_generator(holder.generator)]]]
        if not holder.can_hold_again:
            raise UnwritableError("it cannot be put back")
        found, built = [], holder.noted_entries()
        for key, value in _own(holder.entries()).items():
            was = built.get(key, NOTHING)
            try:
                tree = self._content(value) if key == "" else self._tree(value)
            except UnwritableError as error:
                if value is not was:
                    where = "" if key == "" else f", under {key!r}"
                    raise UnwritableError(f"{error}{where}") from None
                tree = None
            if can_be_written(key):
                found.append([key] if tree is None else [key, tree])
            elif tree is not None and value is not was:
                raise UnwritableError(f"under a key of {type(key).__name__}")
        return found

    def _content(self, value: Any) -> list[Any]:
        if isinstance(value, (list, frozenset)):
            return ["l", [self._tree(item) for item in value]]
        return self._tree(value)

    def _tree(self, value: Any) -> list[Any]:
        kind = type(value)
        if value is NOTHING:
            return ["gone"]
        if id(value) in self._ways:
            return ["w", self._ways[id(value)]]
        if kind is tuple or (isinstance(value, tuple) and id(kind) in self._ways):
            of = [] if kind is tuple else [self._ways[id(kind)]]
            return ["t", [self._tree(item) for item in value], *of]
        if kind.__name__ in _MADE and kind is _MADE[kind.__name__]:
            return self._made(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if can_be_written(value):
            return ["v", thaw(freeze(value))]
        raise UnwritableError(f"it holds a {kind.__name__}")

    def _number(self, value: Any) -> int:
        self._held.append(value)
        return self.numbers.setdefault(id(value), len(self.numbers))

    def _made(self, value: Any) -> list[Any]:
        if id(value) in self.numbers:
            return ["r", self.numbers[id(value)]]
        made = ["n", self._number(value), type(value).__name__]
        if isinstance(value, dict):
            if not all(map(can_be_written, value)):
                raise UnwritableError("it holds a dictionary whose keys cannot be written")
            return [*made, [[key, self._tree(item)] for key, item in value.items()]]
        most = value.maxlen if isinstance(value, deque) else None
        return [*made, [self._tree(item) for item in value], most]

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        name = with_names(value, self._network)
        if isinstance(name, str):
            return ["v", name]
        if type(value) is not torch.Tensor or value.requires_grad or is_elsewhere(value):
            raise UnwritableError(f"it holds a {type(value).__name__} of a graph or of others")
        if id(value) in self.numbers:
            return ["r", self.numbers[id(value)]]
        return ["n", self._number(value), "tensor", value.detach().clone()]


class TreeReader:
    """Puts back what one ``TreeWriter`` has written.

    Args:
        ways: The ways to what the script has built.
        network: Keeps the values of tensors that stand in Python.
    """

    def __init__(self, ways: Ways, network: nn.Module) -> None:
        self._ways, self._network = ways, network
        self._made: dict[int, Any] = {}
        self._taken: set[int] = set()

    def put(self, holder: Holder, written: Written) -> None:
        """Let a holder hold what was written of it."""
        if holder.is_generator:
            put_generator(holder.generator, written[0][1][1])
            return
        there, built = holder.entries(), holder.noted_entries()
        own = _own(there)
        # What is PyTorch's stays; so does what has a key that cannot be written.
        held = {key: value for key, value in there.items() if key not in own}
        held |= {key: value for key, value in built.items() if not can_be_written(key)}
        for key, *tree in written:
            if not tree and key not in built:
                raise StateError(f"{holder.name} has {key!r} in a snapshot, and not here")
            held[key] = self._value(tree[0], there.get(key, NOTHING)) if tree else built[key]
        holder.hold_entries(held)

    def _value(self, tree: Sequence[Any], there: Any) -> Any:
        kind, *rest = tree
        if kind == "v":
            return with_stand_ins(put_into(freeze(rest[0]), there), self._network)
        if kind == "w":
            return self._thing(rest[0])
        if kind == "r":
            return self._made[rest[0]]
        if kind in ("t", "l"):
            old = list(there) if isinstance(there, (list, tuple)) else []
            items = self._items(rest[0], old)
            if kind == "l":
                return items
            return tuple.__new__(self._thing(rest[1]) if rest[1:] else tuple, items)
        return NOTHING if kind == "gone" else self._container(*rest, there=there)

    def _thing(self, way: str) -> Any:
        if way not in self._ways.things:
            raise StateError(f"{way} is in a snapshot, and was not found here")
        return self._ways.things[way]

    def _items(self, trees: Sequence[Any], old: Sequence[Any]) -> list[Any]:
        return [
            self._value(tree, old[at] if at < len(old) else NOTHING)
            for at, tree in enumerate(trees)
        ]

    def _container(
        self, number: int, kind: str, content: Any, most: int | None = None, *, there: Any
    ) -> Any:
        """In the container that is there, where it is such a one: plans may know it."""
        if kind == "tensor":
            self._made[number] = content
            return content
        is_free = id(there) not in self._taken and id(there) not in self._ways.to
        if type(there) is not _MADE[kind] or not is_free or getattr(there, "maxlen", None) != most:
            there = deque(maxlen=most) if kind == "deque" else _MADE[kind]()
        self._made[number] = there  # before its items, which may lead back to it
        self._taken.add(id(there))
        if isinstance(there, dict):
            old = dict(there)
            new = {key: self._value(tree, old.get(key, NOTHING)) for key, tree in content}
            there.clear()
            there.update(new)
            return there
        items = self._items(content, [] if isinstance(there, set) else list(there))
        there.clear()
        (there.update if isinstance(there, set) else there.extend)(items)
        return there


def _own(entries: dict[Any, Any]) -> dict[Any, Any]:
    """Without what PyTorch and graphsplit keep in the attributes of a module."""
    if not (MODULES in entries and PARAMETERS in entries):
        return entries
    return {
        name: value
        for name, value in entries.items()
        if is_of_user(name) and not name.startswith("_graphsplit")
    }
