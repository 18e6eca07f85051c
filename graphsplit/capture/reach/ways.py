"""Names of Python state that another process finds again: the ways that lead there.

A way begins at a network or loss, and goes by attributes, entries, globals, cells and code. It is
found before that code has run, as the script has built all; a process that runs the script again
builds the same.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from graphsplit.capture.reach.contents import is_iterator
from graphsplit.capture.reach.holders import Holder
from graphsplit.capture.reach.reach import Walk
from graphsplit.torch_ext.attributes import BACKWARD_HOOKS, FORWARD_HOOKS, TABLES

_MOST = 1 << 16  # holders on one walk: a loss may hold a trainer
_LONGEST = 200
_OF_TORCH = tuple(f".{name}" for name in (*TABLES, *FORWARD_HOOKS, *BACKWARD_HOOKS))


class Ways:
    """The ways from some roots.

    Attributes:
        to: The way to each value that was met, by its identity.
        holders: What holds state, by the way to it, with what it held when it was met first.
    """

    def __init__(self) -> None:
        self.to: dict[int, str] = {}
        self.holders: dict[str, Holder] = {}
        self.things: dict[str, Any] = {}  # held, so that no other gets its number
        self._to_holders: dict[Any, str] = {}  # by their keys
        self._to_attributes: dict[tuple[int, str], str] = {}  # the dictionary may be another later

    def look(self, roots: Mapping[str, Any]) -> None:
        """Name what has no name yet; what has one keeps it.

        Args:
            roots: Where ways begin, by name.
        """
        walk = _NamedWalk()
        walk.follow(roots)
        for way, thing in walk.things.items():
            if id(thing) not in self.to and way not in self.things:
                self.things[way], self.to[id(thing)] = thing, way
        for holder in walk.found:
            way = walk.ways[holder.key]
            if holder.key not in self._to_holders and way not in self.holders:
                self.holders[way], self._to_holders[holder.key] = holder, way
                if holder.key != id(holder.of):
                    self._to_attributes[id(holder.of), holder.name] = way

    def note(self) -> None:
        """Note what all of it holds now."""
        for holder in self.holders.values():
            holder.note()

    def way_to(self, holder: Holder) -> str | None:
        """The way to what holds this state; None if there is none."""
        known = self._to_holders.get(holder.key)
        return known or self._to_attributes.get((id(holder.of), holder.name))

    def named(self, holders: Iterable[Holder]) -> Mapping[str, Holder]:
        """These holders, by way; those without one are left out, others found."""
        return _Named(self.holders, sorted(filter(None, map(self.way_to, holders))))


class _Named(dict[str, Holder]):
    def __init__(self, every: Mapping[str, Holder], ways: Iterable[str]) -> None:
        super().__init__((way, every[way]) for way in ways)
        self._every = every

    def __missing__(self, way: str) -> Holder:
        return self._every[way]


class _NamedWalk(Walk):
    """Knows by which way it came to each value. It goes past iterators, and tables of modules."""

    most = _MOST

    def __init__(self) -> None:
        super().__init__(())
        self.things: dict[str, Any] = {}
        self.ways: dict[Any, str] = {}  # to holders, by their keys
        self._to: dict[int, str] = {}
        self._here, self._is_dead_end = "", False
        self._steps: Counter[str] = Counter()

    @property
    def found(self) -> list[Holder]:
        """All that holds state."""
        return [holder for holder in self._found if holder.key in self.ways]

    def follow(self, roots: Mapping[str, Any]) -> None:
        """Go all ways from the roots, those of code that runs only in backward last."""
        for name, root in roots.items():
            self._push(root, name)
        self.run(())
        self._arrive("")
        for code in self._in_backward:
            self._push(code, "backward")
        self.run(())

    def _arrive(self, way: str) -> None:
        self._here, self._steps = way, Counter()

    def _step(self, name: str) -> str:
        number = self._steps[name]
        self._steps[name] += 1
        way = f"{self._here}/{name}" + (f" #{number}" if number else "")
        return way if len(way) <= _LONGEST else hashlib.sha256(way.encode()).hexdigest()

    def _push(self, value: Any, name: str) -> None:
        way = self._step(name)  # what is past counts, too: else numbers would depend on it
        if self._is_dead_end or isinstance(value, torch.Tensor) or id(value) in self.seen:
            return
        super()._push(value, name)
        if id(value) in self.seen:
            self.things[way], self._to[id(value)] = value, way

    def _visit(self, value: Any, name: str) -> None:
        self._arrive(self._to[id(value)])
        # The items of a set come in another order in each process.
        self._is_dead_end = isinstance(value, (set, frozenset))
        if not is_iterator(value):
            super()._visit(value, name)
        self._is_dead_end = False

    def _hold_fields(self, value: Any) -> None:
        self._arrive(self._to.get(id(value), ""))
        super()._hold_fields(value)

    def _hold(
        self, thing: Any, name: str, read: Callable[[], Any], write: Callable[[Any], None]
    ) -> None:
        if not name.endswith(_OF_TORCH):
            super()._hold(thing, name, read, write)
            self._name_holder(name)

    def _hold_global(self, held: dict[str, Any], name: str) -> None:
        super()._hold_global(held, name)
        self._name_holder(f"global {name}")

    def _name_holder(self, name: str) -> None:
        way = self._step(f"({name})")
        self.ways.setdefault(self._found[-1].key, way)


def reachable(roots: Iterable[Any]) -> set[Any]:
    """The keys of all that holds state and that some values lead to now."""
    walk = _NamedWalk()
    walk.follow({str(at): root for at, root in enumerate(roots)})
    return set(walk.ways)
