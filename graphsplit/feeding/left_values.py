"""Values that code kept whole leaves in Python, as they are sent to other workers.

Plain values as they are. All else is a list that begins with a mark: tensors, containers, new
objects of a class that the code leads to or of the class of what was there
(``self.seen = replace(self.seen, n=...)``), the names of objects that all workers have, and the
places of containers that stood there before (``self.table = dict(self.table)``).
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from graphsplit.capture.state.kept_value import KeptValue
from graphsplit.feeding.left_kinds import (
    BASES,
    MAKERS,
    MARK,
    OBJECTS,
    Known,
    in_library,
    is_plain_object,
    is_unknown,
    name_in_library,
    name_of_class,
    parts_of,
    unknown,
)
from graphsplit.feeding.left_there import LeftThere
from graphsplit.guards.changes import snapshots_in
from graphsplit.guards.classes import attributes_of, own_dictionary, put_attributes, slot_of
from graphsplit.guards.values import (
    MISSING,
    MUTABLE,
    Frozen,
    freeze,
    is_mapping,
    items_of,
    keys_of,
    put_back,
    put_into,
    reference_of,
    same,
    thaw,
    values_of,
)
from graphsplit.planning.python_values import can_be_written
from graphsplit.tensor_meta import DTYPES
from graphsplit.torch_ext.attributes import MODULES
from graphsplit.torch_ext.stand_ins import StandIn

_TENSOR, _THERE, _BEFORE = "tensor", "there", "before"
SAME = [MARK, "same"]  # stands for what is there
_MAPPING, _MEMBER, _LIBRARY, _NTH = "mapping", "member", "library", "nth"
_NEW, _AGAIN = "new", "again"  # of what is new, and of what was sent before: two places hold it
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, deque, set, frozenset)}
_IMMUTABLE = BASES[:8]
_USUAL = {kind.__new__ for kind in (object, list, dict, set, deque, *OBJECTS.values())}
_DEEPEST = 5


class Before:
    """The containers that stood in some places before a step, which all workers count alike.

    Args:
        held: The snapshots of what holders held, by their names.
        copied: The names of those that are containers themselves, and give a copy.
        known: The objects that all workers have.
    """

    def __init__(self, held: Mapping[Any, Frozen], copied: Container[Any], known: Known) -> None:
        self._known = known
        self._sent: list[Any] = []
        self._numbers: dict[int, int] = {}  # by identity
        self.arrived: dict[int, Any] = {}  # something new, by its number where it was sent
        self._snapshots = {
            (name, key): [*snapshots_in(item)][name in copied :]
            for name, of_one in held.items()
            for key, item in zip(of_one.keys, of_one.items, strict=True)
            if can_be_written(key) and key != MODULES  # made by code: workers compare them
        }
        self._first: dict[int, tuple[list[Any], Frozen]] = {}  # where each stood first
        for (name, key), snapshots in self._snapshots.items():
            if any(is_unknown(told(one.container, known)) for one in snapshots[:1]):
                continue  # others may have something else
            for number, one in enumerate(snapshots):
                place = [name, key, number, type(one.container).__name__]
                self._first.setdefault(id(one.container), (place, one))

    def number_of(self, value: Any) -> int | None:
        """The number under which something new was sent already."""
        return self._numbers.get(id(value))

    def add(self, value: Any) -> int:
        """Number something new that is sent."""
        self._sent.append(value)
        self._numbers[id(value)] = len(self._sent) - 1
        return len(self._sent) - 1

    def place_of(self, value: Any) -> list[Any] | None:
        """The place of a container; None for one that others may not have, and anything else."""
        return self._first[id(value)][0] if id(value) in self._first else None

    def at(self, name: Any, key: Any, number: int, kind: str) -> Frozen:
        """The snapshot of the container in a place that ``place_of`` gave on another worker.

        Raises:
            ConfigurationError: There is none.
        """
        snapshots = self._snapshots.get((name, key), [])
        if number >= len(snapshots) or type(snapshots[number].container).__name__ != kind:
            raise self._known.unlike(name)
        return snapshots[number]

    def is_as_before(self, old: Any, now: Any) -> bool:
        """Whether nothing has to be told of a value in the place of what a snapshot was taken of.

        Of a container that all workers have, what it holds by now is told apart.
        """
        is_known = isinstance(old, Frozen) and self.place_of(old.container) is not None
        return reference_of(old) is now if is_known else same(old, now)

    def news(self) -> list[list[Any]]:
        """The contents of those that hold something else by now, each with its place."""
        found = []
        for place, was in self._first.values():
            container = was.container
            if not self.has_changed(was, container):
                continue
            keys = (
                [told_key(key, self._known) for key in keys_of(container)]
                if is_mapping(container)
                else []
            )
            items = [*items_of(container)] if was.content is None else [thaw(freeze(container))]
            sent = [told(item, self._known, self) for item in items]
            found.append([place, keys, sent])
        return found

    def fill(self, news: Sequence[Sequence[Any]]) -> None:
        """Let them hold what ``news`` gave on another worker."""
        for place, keys, sent in news:
            was = self.at(*place)
            there = [*map(reference_of, was.items), *[MISSING] * len(sent)]
            where = self._known.where(place[0])
            items = [
                learned(one, old, where, self._known, self)
                for one, old in zip(sent, there, strict=False)
            ]
            if was.content is None:
                own = [learned_key(key, self._known) for key in keys]
                put_back(Frozen(was.container, tuple(items), tuple(own)))
            else:
                put_into(freeze(items[0]), was.container)

    def has_changed(self, was: Any, now: Any) -> bool:
        """Whether a container holds other things than one did, whatever these hold."""
        if not isinstance(was, Frozen) or was.content is not None:
            return not same(was, now)
        found = [*(keys_of(now) if is_mapping(now) else ()), *items_of(now)]
        old = [*was.keys, *was.items]
        return len(found) != len(old) or not all(map(self.is_as_before, old, found))


def told(
    value: Any, known: Known, before: Before | None = None, depth: int = 0, what: str = "something"
) -> Any:
    """A value as it is sent, all or in parts; what cannot be is told by where it is, ``what``."""
    if (known_as := known.name_of(value)) is not None:
        return [MARK, _THERE, known_as]
    if before is not None and (place := before.place_of(value)) is not None:
        return [MARK, _BEFORE, place]
    if before is not None and (number := before.number_of(value)) is not None:
        return [MARK, _AGAIN, number]
    kind: Any = type(value)
    if (known_as := known.name_of(kind)) is not None and isinstance(value, Enum):
        is_named = value.name in kind.__members__  # flags put together are their number
        return [MARK, _MEMBER, known_as, is_named, value.name if is_named else value.value]
    instead = value if can_be_written(value) else unknown(what, value)
    if instead is value and not _is_told_apart(value, known, before):
        if before is None or not isinstance(value, MUTABLE):
            return value
        return [MARK, _NEW, value, before.add(value)]
    keys: list[Any] = []
    name: Any = kind.__name__
    if kind in (torch.Tensor, nn.Parameter) and value.is_cpu and value.dtype in DTYPES.values():
        if value.layout is not torch.strided:
            return instead
        shape = [*value.shape] if value.requires_grad else None
        sent = value.detach() if shape is None else value.new_empty(())
        return [MARK, _TENSOR, sent, shape, before.add(value) if before is not None else 0]
    if (in_library := name_in_library(value)) is not None:
        return [MARK, _LIBRARY, *in_library]
    if (apart := parts_of(value)) is not None:
        name, parts = apart
    elif name in _SEQUENCES and _SEQUENCES[name] is kind:
        keys, parts = [value.maxlen] if kind is deque else [], [*value]
    elif kind is dict:
        name, keys, parts = _MAPPING, [told_key(k, known) for k in value], [*value.values()]
    elif is_plain_object(value):
        attributes = _attributes_of(value)
        own = name_of_class(kind) if kind in OBJECTS.values() else kind.__qualname__
        name = [own if known_as is None else known_as]
        keys, parts = [*attributes], [*attributes.values()]
        if (content := _content_of(value)) is not None:
            keys, parts = [*keys, ""], [*parts, content]
    else:
        return instead
    if depth == _DEEPEST:
        return instead
    number = before.add(value) if before is not None else 0
    inside = f"{what}, in a {kind.__name__}" if depth == 0 else what
    sent = [told(part, known, before, depth + 1, inside) for part in parts]
    return [MARK, name, keys, sent, number]


def told_key(key: Any, known: Known) -> Any:
    """A key as it is sent: one that is an object is told by its name. See ``told``."""
    sent = key if can_be_written(key) and not isinstance(key, Enum) else told(key, known)
    is_made = isinstance(sent, list) and sent[1] not in (_THERE, _MEMBER, _LIBRARY, "tuple")
    return unknown("a key", key) if is_made or has_unknown(sent) else sent


def has_unknown(sent: Any) -> bool:
    """Whether such a message is among what is sent."""
    is_one = isinstance(sent, (list, tuple))
    return is_one and (is_unknown(sent) or any(map(has_unknown, sent)))


def told_keys(keys: Iterable[Any], old: Sequence[Any], known: Known) -> list[Any]:
    """Keys of a holder as they are sent: one that was there, at least by its place among the old.

    Args:
        keys: The keys.
        old: The keys before the step, in order, which are alike on all workers.
        known: The objects that all workers have.
    """
    sent = [(key, told_key(key, known)) for key in keys]
    places = {key: place for place, key in enumerate(old)} if any(map(has_unknown, sent)) else {}
    return [
        [MARK, _NTH, places[key]] if is_unknown(one) and key in places else one for key, one in sent
    ]


def learned_key(sent: Any, known: Known, old: Sequence[Any] = (), where: str = "") -> Any:
    """The key that was sent. See ``told_keys``."""
    match sent:
        case ["\0left", "nth", int(place)]:
            return old[place]
        case list():
            return learned(sent, None, where, known)
    return sent


def _attributes_of(value: Any) -> dict[str, Any]:
    of_c = {"default_factory": value.default_factory} if isinstance(value, defaultdict) else {}
    return {**(attributes_of(value) or {}), **of_c}


def _content_of(value: Any) -> Any:
    """The content of a value whose class is derived from one of Python's own, in one of these."""
    base = next((base for base in BASES if isinstance(value, base)), None)
    if base is None:
        return None
    return dict(zip(keys_of(value), values_of(value), strict=True)) if base is dict else base(value)


def _is_told_apart(value: Any, known: Known, before: Before | None) -> bool:
    """Whether a plain value holds a container that others have, too, or that may be elsewhere.

    Or a member of an enumeration: several may have one name.
    """
    inside = [*snapshots_in(freeze(value))]
    if any(isinstance(one, Enum) for s in inside for one in (*s.keys, *s.items)):
        return True
    containers = [one.container for one in inside]
    if before is None:
        return any(known.name_of(one) is not None for one in containers)
    own = [one for one in containers if one is not value]
    return any(isinstance(one, MUTABLE) or before.place_of(one) is not None for one in own)


def learned(
    sent: Any,
    there: Any,
    where: str,
    known: Known,
    before: Before | None = None,
    *,
    is_filled: bool = False,
) -> Any:
    """The value that was sent.

    Args:
        sent: What ``told`` gave.
        there: What stands in its place here.
        where: Where it is, for errors.
        known: The objects of the worker that has sent it, as they are here.
        before: The containers that stood there before, as they are here.
        is_filled: Whether it is the object of before, with other contents.

    Raises:
        ConfigurationError: It names an object that is not here.
    """
    match sent:
        case ["\0left", "same"]:
            return there
        case ["\0left", "there", name]:
            if known.has(name):
                return known.there(name)
            return LeftThere(f"an object, {name}, which is not known here", where)
        case ["\0left", "before", place] if before is not None:
            return before.at(*place).container
        case ["\0left", "again", number] if before is not None:
            if number not in before.arrived:  # it holds itself
                before.arrived[number] = LeftThere("something that holds itself", where)
            return before.arrived[number]
        case ["\0left", "member", kind, is_named, name]:
            found = known.there(kind)
            return found[name] if is_named else found(name)
        case ["\0left", "unknown", str(what)]:
            return there if type(there) is LeftThere else LeftThere(what, where)
        case ["\0left", "library", str(module), str(name)]:
            return in_library(module, name)
        case ["\0left", [name], list(keys), list(parts), number]:
            contents = dict(zip(keys, parts, strict=True))
            content = learned(contents.pop("", None), None, where, known, before)
            kind = _class_of(name, there, known)
            made = _object(kind, content, there, is_filled=is_filled)
            if made is None:
                made = LeftThere(f"an object of {name}, which is not known here", where)
            if before is not None:
                before.arrived[number] = made
            if type(made) is kind:
                _fill(made, contents, where, known, before)
            return made
        case ["\0left", *rest, number]:
            made = _value(rest, there, where, known, before)
            if before is not None:
                before.arrived[number] = made
            return made
    return sent


def _value(sent: Sequence[Any], there: Any, where: str, known: Known, before: Before | None) -> Any:
    match sent:
        case ["tensor", torch.Tensor() as tensor, shape]:
            if isinstance(there, StandIn) and type(there) is not KeptValue:
                return there  # it has an owner
            if shape is None:
                return tensor
            return KeptValue.of(tensor.expand(shape), where, "has a history, which stays there")
        case ["new", value]:
            return value
        case [str(name), list(), list(parts)] if name in MAKERS:
            return MAKERS[name](*(learned(part, None, where, known, before) for part in parts))
    name, keys, parts = sent
    return _container(name, keys, parts, there, where, known, before)


def _class_of(name: Any, there: Any, known: Known) -> type | None:
    """The class of this name on this worker; None where it is not known here."""
    kind = type(there)
    if kind.__qualname__ == name or known.name_of(kind) == name:
        return kind
    found = known.named(name)
    return found if isinstance(found, type) else OBJECTS.get(name)


def _object(kind: Any, content: Any, there: Any, *, is_filled: bool) -> Any:
    """An object of a class, to be filled; None where there is no way to make one.

    Args:
        kind: The class; None where it is not known.
        content: The content of a container that it is.
        there: What stands in its place here.
        is_filled: Whether it is the object of before, with other contents.
    """
    if kind is not None and issubclass(kind, _IMMUTABLE):
        base: Any = next(base for base in BASES if issubclass(kind, base))
        return base.__new__(kind, content)
    if kind is type(there):
        made = there if is_filled else copy.copy(there)
    elif kind is not None and kind.__new__ in _USUAL:
        made = kind.__new__(kind)
    else:
        return None
    if isinstance(made, MUTABLE) and content is not None:
        items = content.values() if isinstance(content, dict) else content
        put_back(Frozen(made, tuple(items), tuple(content) if isinstance(content, dict) else ()))
    return made


def _fill(
    made: Any, parts: Mapping[str, Any], where: str, known: Known, before: Before | None
) -> None:
    """Give an object its attributes, and no others."""
    old = dict(attributes_of(made) or {})
    if (held := own_dictionary(made)) is not None:
        held.clear()
    for name in old.keys() - parts.keys():
        if (slot := slot_of(type(made), name)) is not None:
            slot.__delete__(made)
    for name, part in parts.items():
        put_attributes(made, {name: learned(part, old.get(name), where, known, before)})


def _container(
    name: str,
    keys: Sequence[Any],
    parts: Sequence[Any],
    there: Any,
    where: str,
    known: Known,
    before: Before | None,
) -> Any:
    if name == _MAPPING:
        old = there if isinstance(there, dict) else {}
        pairs = zip([learned_key(key, known) for key in keys], parts, strict=True)
        return {key: learned(part, old.get(key), where, known, before) for key, part in pairs}
    kind = type(there)
    held = [*there] if kind.__name__ == name else []
    held += [None] * (len(parts) - len(held))
    made = [learned(p, one, where, known, before) for p, one in zip(parts, held, strict=False)]
    return _SEQUENCES[name](made, *keys)
