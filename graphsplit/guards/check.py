"""Whether everything that a captured graph depends on is still as it was; before every step.

What was read is compared by identity, in a few calls that run in C: some 45 ns a place. Only where
an identity differs are types and bits compared; if those are the same, the new objects are the ones
to look for from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, contains, eq, getitem, is_
from types import FunctionType
from typing import Any

import torch

from graphsplit.guards.places import Place, PlaceKind, entry
from graphsplit.guards.values import (
    MISSING,
    Difference,
    Frozen,
    differences,
    freeze,
    is_mapping,
    keys_of,
    mapping_of,
    reference_of,
    same,
    shown,
    values_of,
)

_cell_contents = attrgetter("cell_contents")
_version = attrgetter("_version")


@dataclass(frozen=True, eq=False)
class Watched:
    """A place that was read, and what was there.

    Attributes:
        place: The place.
        value: The snapshot of its value.
        is_structure: Whether it is a table of a module: its parameters, children, hooks.
    """

    place: Place
    value: Any
    is_structure: bool = False


@dataclass(frozen=True)
class Failure:
    """A place that is not as it was.

    Attributes:
        place: The innermost place.
        old: The snapshot of what was there.
        new: What is there.
    """

    place: Place
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.place.label} was {shown(self.old)}, is {shown(self.new)}"


class Guards:
    """All that a captured graph depends on, but for its inputs.

    Args:
        watched: The places that were read.
        tensors: Tensors that are no state, but whose values code may have looked at.
        types: Objects, each with the class that it had.
        lifted: Places whose values are operands of the graph: only their types count.
        switches: Gives PyTorch's own switches, as something that can be compared.
    """

    def __init__(
        self,
        watched: Iterable[Watched],
        *,
        tensors: Collection[torch.Tensor] = (),
        types: Mapping[int, Any] | None = None,
        lifted: Sequence[Place] = (),
        switches: Callable[[], Any] | None = None,
    ) -> None:
        self.watched = tuple(watched)
        self.lifted = tuple(lifted)
        self._types = [type(place.read()) for place in self.lifted]
        self._free = {place.identity for place in self.lifted}
        self._objects = list((types or {}).values())
        self._classes = [type(o) for o in self._objects]
        self._tensors = list(tensors)
        self._versions = [t._version for t in self._tensors]
        self._switches = switches
        self._switched = switches() if switches is not None else None
        self._compile()

    def __len__(self) -> int:
        """How many places are compared."""
        return (
            len(self._holders)
            + len(self._containers)
            + len(self._absent)
            + len(self._cells)
            + len(self._objects)
            + sum(len(values) for _, _, values in self._getters)
            + len(self._others)
            + len(self._bulk)
            + len(self._arrays)
            + len(self._tensors)
        )

    def hold(self) -> bool:
        """Whether nothing has changed."""
        try:
            is_same = (
                all(map(is_, map(getitem, self._holders, self._keys), self._values))
                and all(map(eq, map(len, self._containers), self._lengths))
                and all(map(is_, map(_cell_contents, self._cells), self._cell_values))
                and all(map(is_, map(type, self._objects), self._classes))
                and all(map(eq, map(_version, self._tensors), self._versions))
                and not any(map(contains, self._absent, self._absent_keys))
                and self._rest_is_same()
            )
        except (LookupError, ValueError):  # an entry, or the contents of a cell, is gone
            is_same = False
        return (is_same and self._lifted_are_numbers()) or self._hold_by_value()

    def lifted_values(self) -> tuple[Any, ...]:
        """The present values of the lifted places."""
        return tuple([place.read() for place in self.lifted])

    def failures(self) -> list[Failure]:
        """All places that are not as they were, the innermost ones."""
        found: list[Failure] = []
        for watched in self.watched:
            for difference in differences(watched.value, watched.place.read()):
                place = _place_of(watched.place, difference)
                if place.identity not in self._free:
                    found.append(Failure(place, difference.old, difference.new))
        for place, kind in zip(self.lifted, self._types, strict=True):
            if type(place.read()) is not kind:
                found.append(Failure(place, kind, place.read()))
        found += self._changed_objects()
        return found

    def moved(self, move: Callable[[Place], Place]) -> Guards:
        """The same guards for other places, whose modules are copies of the ones here."""
        watched = [
            replace(w, place=place, value=freeze(place.read()) if w.is_structure else w.value)
            for w, place in ((w, move(w.place)) for w in self.watched)
        ]
        return Guards(
            watched,
            tensors=self._tensors,
            lifted=tuple(map(move, self.lifted)),
            switches=self._switches,
        )

    def settle(self) -> None:
        """Take the tables of modules as they are now: planning itself has moved tensors."""
        self.watched = tuple(
            replace(w, value=freeze(w.place.read())) if w.is_structure else w for w in self.watched
        )
        self._compile()

    # Comparing.

    def _rest_is_same(self) -> bool:
        for get, functions, values in self._getters:
            if not all(map(is_, map(get, functions), values)):
                return False
        for view, items in self._bulk:
            if not all(map(is_, view, items)):
                return False
        for frozen in self._arrays:
            if not same(frozen, frozen.container):
                return False
        for place, value in self._others:
            if place.read() is not value:
                return False
        return self._switches is None or self._switches() == self._switched

    def _lifted_are_numbers(self) -> bool:
        return all(type(p.read()) is kind for p, kind in zip(self.lifted, self._types, strict=True))

    def _hold_by_value(self) -> bool:
        if self.failures():
            return False
        if self._switches is not None and self._switches() != self._switched:
            return False
        self.watched = tuple(replace(w, value=freeze(w.place.read())) for w in self.watched)
        self._compile()
        return True

    def _changed_objects(self) -> Iterator[Failure]:
        for one, kind in zip(self._objects, self._classes, strict=True):
            if type(one) is not kind:
                place = Place(PlaceKind.FIELD, one, "__class__", f"the class of a {kind.__name__}")
                yield Failure(place, kind, type(one))
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                label = f"a {list(tensor.shape)} tensor that is neither parameter nor buffer"
                place = Place(PlaceKind.FIELD, tensor, "_version", label)
                yield Failure(place, f"version {version}", f"version {tensor._version}")

    # Making the flat lists that are compared.

    def _compile(self) -> None:
        self._holders: list[Any] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._containers: list[Any] = []
        self._lengths: list[int] = []
        self._absent: list[Any] = []
        self._absent_keys: list[Any] = []
        self._cells: list[Any] = []
        self._cell_values: list[Any] = []
        self._others: list[tuple[Place, Any]] = []
        self._fields: dict[str, tuple[list[Any], list[Any]]] = {}
        self._bulk: list[tuple[Iterable[Any], tuple[Any, ...]]] = []
        self._arrays: list[Frozen] = []
        self._added: set[Any] = set(self._free)
        for watched in self.watched:
            self._add(watched.place, watched.value, is_structure=watched.is_structure)
        self._getters = [(attrgetter(name), *pair) for name, pair in self._fields.items()]

    def _add(self, place: Place, value: Any, *, is_structure: bool) -> None:
        if place.identity not in self._added:
            self._added.add(place.identity)
            self._add_reference(place, reference_of(value))
        if isinstance(value, Frozen):
            self._add_container(value, is_structure=is_structure)

    def _add_reference(self, place: Place, value: Any) -> None:
        holder = vars(place.holder) if place.kind is PlaceKind.CLASS else place.holder
        in_table = place.kind in (PlaceKind.ENTRY, PlaceKind.CLASS)
        is_plain = type(holder) in (dict, list) or place.kind is PlaceKind.CLASS
        if in_table and is_plain and value is MISSING:
            self._absent.append(holder)
            self._absent_keys.append(place.key)
        elif in_table and is_plain:
            self._holders.append(holder)
            self._keys.append(place.key)
            self._values.append(value)
        elif place.kind is PlaceKind.CELL and value is not MISSING:
            self._cells.append(holder)
            self._cell_values.append(value)
        elif place.kind is PlaceKind.FIELD and isinstance(holder, FunctionType):
            functions, values = self._fields.setdefault(place.key, ([], []))
            functions.append(holder)
            values.append(value)
        else:
            self._others.append((place, value))

    def _add_container(self, frozen: Frozen, *, is_structure: bool) -> None:
        container = frozen.container
        if frozen.content is not None:
            self._arrays.append(frozen)
            return
        entries = [(entry(held, key, ""), item) for held, key, item in _entries(frozen)]
        if any(place.identity in self._free for place, _ in entries) or is_structure:
            self._note_length(container)
            if frozen.keys:
                self._bulk.append((keys_of(container), frozen.keys))
            for place, item in entries:
                self._add(place, item, is_structure=is_structure)
            return
        if not isinstance(container, (tuple, frozenset)):
            self._note_length(container)
            if frozen.items:
                references = tuple(map(reference_of, frozen.items))
                self._bulk.append((_view(container), references))
            if frozen.keys:
                self._bulk.append((keys_of(container), frozen.keys))
        for item in frozen.items:
            if isinstance(item, Frozen):
                self._add_container(item, is_structure=False)

    def _note_length(self, container: Any) -> None:
        self._containers.append(mapping_of(container) if is_mapping(container) else container)
        self._lengths.append(len(self._containers[-1]))


def _view(container: Any) -> Iterable[Any]:
    return values_of(container) if is_mapping(container) else container


def _entries(frozen: Frozen) -> Iterator[tuple[Any, Any, Any]]:
    """Holder, key and value of every entry that can be written one by one."""
    if is_mapping(frozen.container):
        held = mapping_of(frozen.container)
        for key, item in zip(frozen.keys, frozen.items, strict=True):
            yield held, key, item
    elif isinstance(frozen.container, list):
        for index, item in enumerate(frozen.items):
            yield frozen.container, index, item


def _place_of(place: Place, difference: Difference) -> Place:
    """The innermost place that differs: the watched one, or an entry of what is there."""
    held = difference.container
    if held is None or difference.key is None or isinstance(held, tuple):
        return place
    holder = mapping_of(held) if is_mapping(held) else held
    return entry(holder, difference.key, f"{place.label}[{difference.key!r}]", place.source)
