"""Whether everything that a captured graph depends on is still as it was; before every step.

What was read is compared by identity, places of one kind all at once: some 40 ns a place. Only
where an identity differs are types and bits compared; if those are the same, the new objects are
the ones to look for from then on.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from operator import attrgetter, contains, eq, getitem, is_
from types import CodeType, FunctionType
from typing import Any

import torch

from graphsplit.guards.places import Place, PlaceKind, entry, inside
from graphsplit.guards.values import (
    MISSING,
    Difference,
    Frozen,
    differences,
    freeze,
    holder_of,
    is_mapping,
    keys_of,
    reference_of,
    same,
    shown,
    values_of,
)

Comparison = Callable[[Any, Any], bool]
_AT_ONCE = 32  # entries that one function compares
_getter = cache(attrgetter)  # one object a name: rows of one kind are found by it


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
        self._classes = [(one, type(one)) for one in (types or {}).values()]
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._switches = switches
        self._switched = switches() if switches is not None else None
        self._compile()

    def __len__(self) -> int:
        """How many places are compared."""
        in_rows = self._num_entries + sum(len(expected) for _, _, _, expected in self._checks)
        others = (self._empty, self._contents, self._others, self._arrays)
        return in_rows + sum(map(len, others))

    def hold(self) -> bool:
        """Whether nothing has changed."""
        try:
            is_same = self._is_identical()
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
            tensors=[tensor for tensor, _ in self._versions],
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

    def _is_identical(self) -> bool:
        if any(self._empty):
            return False
        for compare, get, columns, expected in self._checks:
            if not all(map(compare, map(get, *columns), expected)):
                return False
        for hold in self._entries:
            if not hold():
                return False
        if not all(map(is_, chain.from_iterable(self._contents), self._items)):  # lengths are same
            return False
        for frozen in self._arrays:
            if not same(frozen, frozen.container):
                return False
        for place, value in self._others:
            if place.read() is not value:
                return False
        return self._switches is None or self._switches() == self._switched

    def _lifted_are_numbers(self) -> bool:
        return [type(place.read()) for place in self.lifted] == self._types

    def _hold_by_value(self) -> bool:
        if self.failures():
            return False
        if self._switches is not None and self._switches() != self._switched:
            return False
        self.watched = tuple(replace(w, value=freeze(w.place.read())) for w in self.watched)
        self._compile()
        return True

    def _changed_objects(self) -> Iterator[Failure]:
        for one, kind in self._classes:
            if type(one) is not kind:
                place = Place(PlaceKind.FIELD, one, "__class__", f"the class of a {kind.__name__}")
                yield Failure(place, kind, type(one))
        for tensor, version in self._versions:
            if tensor._version != version:
                label = f"a {list(tensor.shape)} tensor that is neither parameter nor buffer"
                place = Place(PlaceKind.FIELD, tensor, "_version", label)
                yield Failure(place, f"version {version}", f"version {tensor._version}")

    # Making the flat lists that are compared.

    def _compile(self) -> None:
        # By what compares and what reads: holder (and key), and what was there.
        self._rows: dict[tuple[Comparison, Callable[..., Any]], list[tuple[Any, ...]]]
        self._rows = defaultdict(list)
        self._empty: list[Any] = []  # containers
        self._contents: list[Iterable[Any]] = []  # of containers, one after the other
        self._items: list[Any] = []  # what was in all of them
        self._arrays: list[Frozen] = []
        self._others: list[tuple[Place, Any]] = []
        self._added: set[Any] = set(self._free)
        for watched in self.watched:
            self._add(watched.place, watched.value, is_structure=watched.is_structure)
        self._rows[is_, type] += self._classes
        self._rows[eq, _getter("_version")] += self._versions
        rows = self._rows[is_, getitem]
        self._rows[is_, getitem] = [row for row in rows if type(row[0]) is not dict]
        in_dictionaries = [row for row in rows if type(row[0]) is dict]
        self._num_entries = len(in_dictionaries)
        self._entries = list(_entries_hold(in_dictionaries))
        self._checks = [
            (compare, get, columns[:-1], columns[-1])
            for (compare, get), rows in self._rows.items()
            if (columns := tuple(zip(*rows, strict=True)))
        ]

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
            self._rows[is_, contains].append((holder, place.key, False))
        elif in_table and is_plain:
            self._rows[is_, getitem].append((holder, place.key, value))
        elif place.kind is PlaceKind.CELL and value is not MISSING:
            self._rows[is_, _getter("cell_contents")].append((holder, value))
        elif place.kind is PlaceKind.FIELD and isinstance(holder, FunctionType):
            self._rows[is_, _getter(place.key)].append((holder, value))
        else:
            self._others.append((place, value))

    def _add_container(self, frozen: Frozen, *, is_structure: bool) -> None:
        container = frozen.container
        if frozen.content is not None:
            self._arrays.append(frozen)
            return
        entries = [(entry(held, key, ""), item) for held, key, item in _entries(frozen)]
        if any(place.identity in self._free for place, _ in entries) or is_structure:
            self._add_keys(frozen)
            for place, item in entries:
                self._add(place, item, is_structure=is_structure)
            return
        if not isinstance(container, (tuple, frozenset)):
            self._add_keys(frozen)
            if frozen.items:
                self._contents.append(_view(container))
                self._items += map(reference_of, frozen.items)
        for item in frozen.items:
            if isinstance(item, Frozen):
                self._add_container(item, is_structure=False)

    def _add_keys(self, frozen: Frozen) -> None:
        """How many entries there are; of a mapping, its keys in order as well."""
        container = frozen.container
        held = holder_of(container)
        if type(held) in (dict, list, OrderedDict) and not frozen.items:
            self._empty.append(held)
            return
        self._rows[eq, len].append((held, len(frozen.items)))
        if frozen.keys:
            self._contents.append(keys_of(container))
            self._items += frozen.keys


def _entries_hold(rows: Sequence[tuple[Any, ...]]) -> Iterator[Callable[[], bool]]:
    """Functions that say whether entries of dictionaries are as they were, some at a time."""
    code = _code_of_entries()
    for start in range(0, len(rows), _AT_ONCE):
        some = list(rows[start : start + _AT_ONCE])
        some += [some[-1]] * (_AT_ONCE - len(some))
        yield FunctionType(code, {}, "hold", tuple(chain.from_iterable(some)))


@cache
def _code_of_entries() -> CodeType:
    """``h0[k0] is v0 and h1[k1] is v1 …``: half the time of calls that do the same in C."""
    names = ", ".join(f"h{i}, k{i}, v{i}" for i in range(_AT_ONCE))
    comparisons = " and ".join(f"h{i}[k{i}] is v{i}" for i in range(_AT_ONCE))
    scope: dict[str, Any] = {}
    exec(f"def hold({names}): return {comparisons}", scope)
    code: CodeType = scope["hold"].__code__
    return code


def _view(container: Any) -> Iterable[Any]:
    return values_of(container) if is_mapping(container) else container


def _entries(frozen: Frozen) -> Iterator[tuple[Any, Any, Any]]:
    """Holder, key and value of every entry that can be written one by one."""
    if is_mapping(frozen.container):
        for key, item in zip(frozen.keys, frozen.items, strict=True):
            yield holder_of(frozen.container), key, item
    elif isinstance(frozen.container, list):
        for index, item in enumerate(frozen.items):
            yield frozen.container, index, item


def _place_of(place: Place, difference: Difference) -> Place:
    """The innermost place that differs: the watched one, or an entry of what is there."""
    held = difference.container
    if held is None or difference.key is None or isinstance(held, tuple):
        return place
    return inside(held, difference.key, place)
