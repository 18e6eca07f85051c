"""Whether everything that a captured graph depends on is still as it was; before every step.

What was read is compared by identity, places of one kind all at once (``compiled``): some 25 ns a
place. Only where an identity differs are types and bits compared; if those are the same, the new
objects are the ones to look for from then on.

CPython 3.10 and 3.11 number the writes to all dictionaries (PEP 509). Where the number of one is
what it was, nothing in it is another object: of 150 places that a network reads, in some twenty
dictionaries, the memory of twenty is looked at. From 3.12 on, all places are compared.
"""

from __future__ import annotations

import decimal
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from operator import attrgetter, is_
from types import FunctionType
from typing import Any

import torch

from graphsplit.guards.class_names import ClassNames, names_of_class
from graphsplit.guards.classes import own_dictionary
from graphsplit.guards.compiled import (
    GIVES,
    HAS_CLASS,
    HAS_DICTIONARY,
    HAS_IN_ORDER,
    HAS_LENGTH,
    HAS_VERSION,
    IS_AT,
    IS_FIELD,
    IS_IN_CELL,
    IS_NOT_IN,
    OF_GIVES,
    conjunctions,
)
from graphsplit.guards.places import Place, PlaceKind, entry, inside
from graphsplit.guards.values import (
    MISSING,
    Frozen,
    ValueDifference,
    Written,
    differences,
    entries_of,
    freeze,
    holder_of,
    is_mapping,
    is_scalar,
    keys_of,
    kind_of,
    number_of,
    paired,
    reference_of,
    same,
    shown,
    values_of,
)
from graphsplit.torch_ext.attributes import GLOBAL_HOOKS, WRITES, writes_of
from graphsplit.torch_ext.function_modes import default_devices
from graphsplit.torch_ext.private import SWITCHES, dict_version, num_function_modes

_number_of = dict_version or len  # where there are no numbers, no dictionary is asked for one
_MOST_CHANGES = 3  # of a dictionary, after which it is always compared: globals of a script, say
_Rows = Mapping[str, Sequence[tuple[Any, ...]]]


@dataclass(frozen=True, eq=False)
class Watched:
    """A place that was read, and what was there.

    Attributes:
        place: The place.
        value: The snapshot of its value; a container itself where only some of its items were
            read, which are places of their own.
        is_structure: Whether it is a table of a module (its parameters, children, hooks) or what a
            cache holds: no value of the user's own.
        contents: The snapshot of such a container; ``MISSING`` where ``value`` is one.
    """

    place: Place
    value: Any
    is_structure: bool = False
    contents: Any = MISSING

    def now(self) -> Watched:
        """The same place with the value that it has now."""
        value = self.place.read()
        return replace(self, value=freeze(value) if self.contents is MISSING else value)

    def containers(self) -> Iterator[tuple[Any, Any]]:
        """The user's containers that were read, each with what is there now."""
        value = self.value if self.contents is MISSING else Frozen(self.value)
        return iter(()) if self.is_structure else paired(value, self.place.read())


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


def named_failure(label: str, old: Any, new: Any) -> Failure:
    """A change of something that nothing writes by its place."""
    return Failure(Place(PlaceKind.FIELD, None, label, label), old, new)


class Dictionaries:
    """Places in dictionaries, and what was there: compared where one was written to.

    Args:
        rows: By comparison: the dictionary, and what it is compared with: a key, and what was
            there (where something was); or how long it was.
    """

    def __init__(self, rows: _Rows) -> None:
        by_holder: dict[int, dict[str, list[tuple[Any, ...]]]] = {}
        for comparison, some in rows.items():
            for row in some:
                own = by_holder.setdefault(id(row[0]), {})
                own.setdefault(comparison, []).append(row)
        self._restless = dict(rows) if dict_version is None else {}
        quiet = [] if dict_version is None else list(by_holder.values())
        self._quiet = [next(iter(own.values()))[0][0] for own in quiet]
        self._own = [_functions(own) for own in quiet]
        self._rows = quiet
        self._numbers: list[int] = [-1] * len(quiet)
        self._changes = [0] * len(quiet)
        self._always = _functions(self._restless)

    def hold(self) -> bool:
        """Whether all is as it was.

        Raises:
            KeyError: A key is gone.
        """
        for holds in self._always:
            if not holds():
                return False
        return self._numbers == list(map(_number_of, self._quiet)) or self._look()

    def _look(self) -> bool:
        """Compare what stands in dictionaries that were written to, and remember their numbers."""
        now = list(map(_number_of, self._quiet))  # before they are read
        changed = [i for i, number in enumerate(now) if number != self._numbers[i]]
        if not all(holds() for index in changed for holds in self._own[index]):
            return False
        for index in changed:
            self._numbers[index] = now[index]
            self._changes[index] += 1
        for index in reversed(changed):
            if self._changes[index] > _MOST_CHANGES:
                self._compare_always(index)
        return True

    def _compare_always(self, index: int) -> None:
        del self._quiet[index], self._own[index], self._numbers[index], self._changes[index]
        for comparison, some in self._rows.pop(index).items():
            self._restless[comparison] = [*self._restless.get(comparison, ()), *some]
        self._always = _functions(self._restless)


def _functions(rows: _Rows) -> list[Callable[[], bool]]:
    return [f for comparison, some in rows.items() for f in conjunctions(comparison, dict, some)]


class Guards:
    """All that a captured graph depends on, but for its inputs.

    Args:
        watched: The places that were read.
        tensors: Tensors that are no state, but whose values code may have looked at.
        types: Objects that were read: each must have the class and the dictionary that it had.
        lifted: Places whose values are operands of the graph: only their types count.
        with_switches: Whether PyTorch's own switches count.
    """

    def __init__(
        self,
        watched: Iterable[Watched],
        *,
        tensors: Collection[torch.Tensor] = (),
        types: Mapping[int, Any] | None = None,
        lifted: Sequence[Place] = (),
        with_switches: bool = False,
    ) -> None:
        self.watched = tuple(watched)
        self.lifted = tuple(lifted)
        self._types = [kind_of(place.read()) for place in self.lifted]
        self._free = {place.identity for place in self.lifted}
        self._classes = [(one, type(one)) for one in (types or {}).values()]
        owners = [(one, own_dictionary(one)) for one, _ in self._classes]
        self._owners = [(one, held) for one, held in owners if held is not None]
        self._versions = [(t, writes_of(t), t.requires_grad) for t in tensors]
        # What is written to ``.data`` has no version, and code may have asked for the number.
        self._scalars = {id(t): (t, t.item()) for t in tensors if is_scalar(t)}
        self._names = ClassNames(one for one, _ in self._classes)
        self._switches = _switches() if with_switches else None
        self._compile()

    def __len__(self) -> int:
        """How many places are compared."""
        return self._num_rows + len(self._contents) + len(self._others) + len(self._arrays)

    def hold(self) -> bool:
        """Whether nothing has changed."""
        try:
            is_same = not any(self._empty) and self._dictionaries.hold()
            for holds in self._comparisons:
                is_same = is_same and holds()
            is_same = is_same and (not self._has_others or self._others_hold())
        except (LookupError, ValueError):  # an entry, or the contents of a cell, is gone
            is_same = False
        return is_same or self._hold_by_value()

    def lifted_values(self) -> tuple[Any, ...]:
        """The present numbers in the lifted places."""
        return tuple([number_of(place.read()) for place in self.lifted])

    def failures(self) -> list[Failure]:
        """All places that are not as they were, the innermost ones."""
        found: list[Failure] = []
        for watched in self.watched:
            for difference in differences(watched.value, watched.place.read()):
                place = _place_of(watched.place, difference)
                if place.identity not in self._free:
                    found.append(Failure(place, difference.old, difference.new))
        for place, kind in zip(self.lifted, self._types, strict=True):
            if kind_of(place.read()) != kind:
                found.append(Failure(place, kind, place.read()))
        found += self._changed_objects()
        found += self._changed_switches()
        return found or list(self._regrouped())

    def _regrouped(self) -> Iterator[Failure]:
        """Places whose containers are one by now and were not, or were one and are not."""
        by_old, by_now = dict[int, Any](), dict[int, Any]()
        for watched in self.watched:
            for old, now in watched.containers():
                known = by_old.setdefault(id(old), now), by_now.setdefault(id(now), old)
                if known[0] is not now or known[1] is not old:
                    yield Failure(watched.place, "an object", "another one, or one with others")

    def value_at(self, label: str) -> Any:
        """The value that was at a place with a name; ``MISSING`` if none has it."""
        if self._switches is not None and label in _SWITCHES:
            return self._switches[_SWITCHES.index(label)]
        named = (value for place, value in self._places() if place.label == label)
        return next(named, MISSING)

    def settle(self) -> None:
        """Take the tables of modules as they are now: planning itself has moved tensors."""
        self.watched = tuple(w.now() if w.is_structure else w for w in self.watched)
        self._compile()

    # Comparing.

    def _others_hold(self) -> bool:
        return (
            all(map(is_, chain.from_iterable(self._contents), self._items))  # lengths are same
            and all(same(frozen, frozen.container) for frozen in self._arrays)
            and all(place.read() is value for place, value in self._others)
            and all(same(number, tensor.item()) for tensor, number in self._scalars.values())
            and [kind_of(place.read()) for place in self.lifted] == self._types
        )

    def _hold_by_value(self) -> bool:
        if self.failures():
            return False
        self.watched = tuple(w.now() for w in self.watched)
        self._compile()
        return True

    def _changed_objects(self) -> Iterator[Failure]:
        for place in self._names.gained():
            yield Failure(place, MISSING, place.read())
        for one, kind in self._classes:
            if type(one) is not kind:
                place = Place(PlaceKind.FIELD, one, "__class__", f"the class of a {kind.__name__}")
                yield Failure(place, kind, type(one))
        for one, held in self._owners:
            if own_dictionary(one) is not held:
                label = f"the __dict__ of a {type(one).__name__}"
                place = Place(PlaceKind.FIELD, one, "__dict__", label)
                yield Failure(place, "one dictionary", "another one")
        for tensor, version, is_marked in self._versions:
            label = f"a {list(tensor.shape)} tensor that is neither parameter nor buffer"
            if tensor.requires_grad is not is_marked:
                place = Place(PlaceKind.FIELD, tensor, "requires_grad", f"requires_grad of {label}")
                yield Failure(place, is_marked, tensor.requires_grad)
            own = Place(PlaceKind.FIELD, tensor, WRITES, label)
            if id(tensor) in self._scalars:
                number = self._scalars[id(tensor)][1]
                if writes_of(tensor) != version or not same(number, tensor.item()):
                    yield Failure(self._place_with(tensor, own), Written(number), tensor)
            elif writes_of(tensor) != version:
                yield Failure(own, f"version {version}", f"version {writes_of(tensor)}")

    def _place_with(self, tensor: torch.Tensor, other: Place) -> Place:
        """A place that holds a tensor; else another one."""
        found = (place for place, value in self._places() if value is tensor)
        return next((place for place in found if place.read() is tensor), other)

    def _places(self) -> Iterator[tuple[Place, Any]]:
        return chain.from_iterable(_places_in(w.place, w.value) for w in self.watched)

    def _changed_switches(self) -> Iterator[Failure]:
        if self._switches is not None:
            for label, old, new in zip(_SWITCHES, self._switches, _switches(), strict=True):
                if old != new:
                    yield named_failure(label, old, new)

    # Making the flat lists that are compared.

    def _compile(self) -> None:
        # By comparison and class of the holders: holder (and key), and what was there.
        self._rows: dict[tuple[str, type], list[tuple[Any, ...]]] = defaultdict(list)
        self._empty: list[Any] = []  # containers
        self._contents: list[Iterable[Any]] = []  # of containers, one after the other
        self._items: list[Any] = []  # what was in all of them
        self._arrays: list[Frozen] = []
        self._others: list[tuple[Place, Any]] = []
        self._added: set[Any] = set(self._free)
        for watched in self.watched:
            self._add(watched.place, watched.value, is_structure=watched.is_structure)
        self._rows[HAS_CLASS, object] += self._classes
        asked = object.__getattribute__
        self._rows[HAS_DICTIONARY, object] += [(one, held, asked) for one, held in self._owners]
        self._rows[HAS_VERSION, torch.Tensor] += self._versions
        for names, length in self._names.rows():
            self._rows[HAS_LENGTH, type(names)].append((names, length))
        self._num_rows = sum(map(len, self._rows.values())) + len(self._empty)
        if self._switches is not None:
            self._add_switches(self._switches)
        kinds = IS_AT, IS_NOT_IN, HAS_LENGTH, HAS_IN_ORDER
        self._dictionaries = Dictionaries(
            {kind: self._rows.pop((kind, dict), []) for kind in kinds}
        )
        self._comparisons = [
            f for key, rows in self._rows.items() for f in conjunctions(*key, rows)
        ]
        others = self._contents, self._arrays, self._others, self._scalars, self.lifted
        self._has_others = any(others)

    def _add(self, place: Place, value: Any, *, is_structure: bool) -> None:
        if place.identity not in self._added:
            self._added.add(place.identity)
            self._add_reference(place, reference_of(value))
        if isinstance(value, Frozen):
            self._add_container(value, is_structure=is_structure)

    def _add_reference(self, place: Place, value: Any) -> None:
        holder = names_of_class(place.holder) if place.kind is PlaceKind.CLASS else place.holder
        kind = type(holder)
        if place.kind is PlaceKind.CLASS or (place.kind is PlaceKind.ENTRY and kind is dict):
            is_there = value is not MISSING
            row = (holder, place.key, value) if is_there else (holder, place.key)
            self._rows[IS_AT if is_there else IS_NOT_IN, kind].append(row)
        elif place.kind is PlaceKind.ENTRY and kind is list and value is not MISSING:
            self._rows[IS_AT, kind].append((holder, place.key, value))
        elif place.kind is PlaceKind.CELL and value is not MISSING:
            self._rows[IS_IN_CELL, kind].append((holder, value))
        elif place.kind is PlaceKind.FIELD and isinstance(holder, (type, FunctionType)):
            self._rows[IS_FIELD[place.key], kind].append((holder, value))
        else:
            self._others.append((place, value))

    def _add_switches(self, switches: tuple[Any, ...]) -> None:
        gives = dict(zip(_GETTERS, switches[len(_DECIMALS) :], strict=True))
        if gives[_hooks_on_all_modules] is None and not any(GLOBAL_HOOKS):  # as most often
            self._empty += GLOBAL_HOOKS
            del gives[_hooks_on_all_modules]
        if not (gives[default_devices] or num_function_modes()):
            gives[num_function_modes] = len(gives.pop(default_devices))
        self._rows[GIVES, object] = list(gives.items())
        self._rows[OF_GIVES, object] = [
            (_of_decimals, decimal.getcontext, switches[: len(_DECIMALS)])
        ]

    def _add_container(self, frozen: Frozen, *, is_structure: bool) -> None:
        container = frozen.container
        if frozen.content is not None:
            self._arrays.append(frozen)
            return
        entries = [(entry(held, key, ""), item) for held, key, item in entries_of(frozen)]
        if any(place.identity in self._free for place, _ in entries) or is_structure:
            self._add_keys(frozen, are_found=is_structure and len(entries) == 1)
            for place, item in entries:
                self._add(place, item, is_structure=is_structure)
            return
        if not isinstance(container, (tuple, frozenset)):
            self._add_keys(frozen)
            if frozen.items:
                view = values_of(container) if is_mapping(container) else container
                items = list(map(reference_of, frozen.items))
                self._add_contents(holder_of(container), view, items)
        for item in frozen.items:
            if isinstance(item, Frozen):
                self._add_container(item, is_structure=False)

    def _add_keys(self, frozen: Frozen, *, are_found: bool = False) -> None:
        """How many entries there are; of a mapping, its keys in order as well.

        Args:
            frozen: The container.
            are_found: Whether each is asked for by its key, and no two could change their order.
        """
        container = frozen.container
        held = holder_of(container)
        if type(held) in (dict, list, OrderedDict) and not frozen.items:
            self._empty.append(held)
            return
        self._rows[HAS_LENGTH, type(held)].append((held, len(frozen.items)))
        if frozen.keys and not are_found:
            self._add_contents(held, keys_of(container), frozen.keys)

    def _add_contents(self, held: Any, view: Iterable[Any], items: Sequence[Any]) -> None:
        if type(held) is dict:  # looked at where it was written to
            self._rows[HAS_IN_ORDER, dict].append((held, view, items, is_))
            return
        self._contents.append(view)
        self._items += items


_DECIMALS = ("prec", "rounding", "Emin", "Emax", "clamp")
_of_decimals = attrgetter(*_DECIMALS)
_NAMES = [get.__name__.removeprefix("_get_") for get in SWITCHES]
_BY_USERS = {"deterministic_algorithms": "torch.are_deterministic_algorithms_enabled()"}
_SWITCHES = (
    *(f"decimal.getcontext().{name}" for name in _DECIMALS),
    "torch.get_default_dtype()",
    "torch.is_autocast_cache_enabled()",
    "the hooks on all modules",
    "torch's default devices",
    *(_BY_USERS.get(name, f"torch's switch {name}") for name in _NAMES),
)
_OF_ALL = ("float32_matmul_precision", "mkldnn_enabled", "deterministic_algorithms")


def _switches() -> tuple[Any, ...]:
    """State that PyTorch and ``decimal`` keep for all code, on which a graph depends."""
    return (*_of_decimals(decimal.getcontext()), *[get() for get in _GETTERS])


def switches_of_all() -> str:
    """The switches that no machine needs to have otherwise than the others, as text."""
    told = [f"{n} {get()}" for n, get in zip(_NAMES, SWITCHES, strict=True) if n in _OF_ALL]
    return f"torch's switches: {', '.join(told)}"


def _hooks_on_all_modules() -> tuple[tuple[Any, ...], ...] | None:
    """The user's; None if there are only graphsplit's own."""
    found = tuple([tuple(filter(_is_users, hooks.values())) for hooks in GLOBAL_HOOKS])
    return found if any(found) else None


def _is_users(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith("graphsplit.")


_GETTERS = (
    torch.get_default_dtype,
    torch.is_autocast_cache_enabled,
    _hooks_on_all_modules,
    default_devices,
    *SWITCHES,  # of kernels: the same graph has other bits
)


def _places_in(place: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    """The values that were at a place and in it, with the places that ``_place_of`` gives."""
    yield place, value
    if isinstance(value, Frozen):
        for key, item in zip(value.keys or count(), value.items, strict=False):
            if not isinstance(value.container, tuple):
                yield inside(value.container, key, place), item
            yield from _places_in(place, item)


def _place_of(place: Place, difference: ValueDifference) -> Place:
    """The innermost place that differs: the watched one, or an entry of what is there."""
    held = difference.container
    if held is None or difference.key is None or isinstance(held, tuple):
        return place
    return inside(held, difference.key, place)
