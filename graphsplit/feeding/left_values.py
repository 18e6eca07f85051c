"""Values that code kept whole leaves in Python, as they are sent to other workers.

Plain values as they are. All else is a list that begins with a mark: tensors, containers, new
objects of a class that the code leads to or of the class of what was there
(``self.seen = replace(self.seen, n=...)``), the names of objects that all workers have, and the
places of containers that stood there before (``self.table = dict(self.table)``).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphsplit.capture.reach.holders import Holder
from graphsplit.capture.reach.reach import is_of_library
from graphsplit.capture.state.kept_value import KeptValue
from graphsplit.errors import ConfigurationError
from graphsplit.guards.changes import containers_in, snapshots_in
from graphsplit.guards.values import (
    MISSING,
    Frozen,
    any_leaf,
    freeze,
    is_mapping,
    items_of,
    keys_of,
    put_back,
    put_into,
    reference_of,
    same,
    thaw,
)
from graphsplit.planning.python_values import can_be_written
from graphsplit.tensor_meta import DTYPES
from graphsplit.torch_ext.stand_ins import StandIn

UNTOLD: Any = object()
_MARK = "\0left"
_TENSOR, _THERE, _BEFORE = "tensor", "there", "before"
SAME = [_MARK, "same"]  # stands for what is there
_MAPPING = "mapping"
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, deque)}
_DEEPEST = 4


class Known:
    """The objects that the code of one worker leads to, by names which all workers share.

    Args:
        holders: Their state, by name.
        home: The worker, in words.
        here: This one.

    Attributes:
        apart: The keys of what holds state: containers among that count by themselves.
    """

    def __init__(self, holders: Mapping[Any, Holder], home: str = "", here: str = "") -> None:
        self._holders, self._home, self._here = holders, home, here
        self._names = {id(one.of): name for name, one in holders.items()}
        self.apart = frozenset(one.key for one in holders.values())

    def name_of(self, value: Any) -> Any:
        """The name of a value; None for one that has none."""
        is_apart = value is None or isinstance(value, torch.Tensor)  # tensors are sent
        return None if is_apart else self._names.get(id(value))

    def is_made(self, frozen: Any) -> bool:
        """Whether a snapshot holds an object that has no name: code has made it."""
        return any_leaf(frozen, lambda leaf: _is_plain_object(leaf) and self.name_of(leaf) is None)

    def named(self, name: Any) -> Any:
        """The object of this name; None where there is none."""
        return self._holders[name].of if name in self._holders else None

    def holder(self, name: Any) -> Holder:
        """The holder of this name on this worker.

        Raises:
            ConfigurationError: Nothing has.
        """
        try:
            return self._holders[name]
        except KeyError:
            raise self.unlike(name) from None

    def unlike(self, name: Any) -> ConfigurationError:
        """The error for what is not here as it is on the worker that has sent something."""
        return ConfigurationError(
            f"code kept whole on {self._home} has changed {name}, which it does "
            f"not lead to on {self._here}\n"
            f"  Fix: give the code the same objects on all workers."
        )

    def where(self, name: Any) -> str:
        """The holder of this name, and the worker that has sent it, in words."""
        return f"{self.holder(name).name}, on {self._home}"

    def there(self, name: Any) -> Any:
        """The object of this name on this worker.

        Raises:
            ConfigurationError: There is none, or nobody here has it any more.
        """
        value = self.holder(name).of
        if value is None:
            raise ConfigurationError(
                f"code kept whole on {self._home} has left an object, {name}, which nobody holds "
                f"any more on {self._here}\n"
                f"  Fix: keep it in an attribute there, too, as long as the code may leave it."
            )
        return value


class Before:
    """The containers that stood in some places before a step, which all workers count alike.

    Args:
        held: The snapshots of what holders held, by their names.
        copied: The names of those that are containers themselves, and give a copy.
        known: The objects that all workers have.
    """

    def __init__(self, held: Mapping[Any, Frozen], copied: Container[Any], known: Known) -> None:
        self._known = known
        self._snapshots = {
            (name, key): [*snapshots_in(item)][name in copied :]
            for name, of_one in held.items()
            for key, item in zip(of_one.keys, of_one.items, strict=True)
            if can_be_written(key)
        }
        self._first: dict[int, tuple[list[Any], Frozen]] = {}  # where each stood first
        for (name, key), snapshots in self._snapshots.items():
            if any(told(one.container, known) is UNTOLD for one in snapshots[:1]):
                continue  # others may have something else
            for number, one in enumerate(snapshots):
                place = [name, key, number, type(one.container).__name__]
                self._first.setdefault(id(one.container), (place, one))

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
            keys = [*keys_of(container)] if is_mapping(container) else []
            items = [*items_of(container)] if was.content is None else [thaw(freeze(container))]
            sent = [told(item, self._known, self) for item in items]
            if all(map(can_be_written, keys)) and not any(one is UNTOLD for one in sent):
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
                put_back(Frozen(was.container, tuple(items), tuple(keys)))
            else:
                put_into(freeze(items[0]), was.container)

    def has_changed(self, was: Any, now: Any) -> bool:
        """Whether a container holds other things than one did, whatever these hold."""
        if not isinstance(was, Frozen) or was.content is not None:
            return not same(was, now)
        found = [*(keys_of(now) if is_mapping(now) else ()), *items_of(now)]
        old = [*was.keys, *was.items]
        return len(found) != len(old) or not all(map(self.is_as_before, old, found))


def told(value: Any, known: Known, before: Before | None = None, depth: int = 0) -> Any:
    """A value as it is sent; ``UNTOLD`` where it cannot be."""
    if (name := known.name_of(value)) is not None:
        return [_MARK, _THERE, name]
    if before is not None and (place := before.place_of(value)) is not None:
        return [_MARK, _BEFORE, place]
    instead = value if can_be_written(value) else UNTOLD
    if instead is value and not _is_known_inside(value, known, before):
        return value
    kind, keys = type(value), []
    if kind in (torch.Tensor, nn.Parameter) and value.is_cpu and value.dtype in DTYPES.values():
        if value.layout is not torch.strided:
            return UNTOLD
        shape = [*value.shape] if value.requires_grad else None
        return [_MARK, _TENSOR, value.detach() if shape is None else value.new_empty(()), shape]
    if kind.__name__ in _SEQUENCES or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        name, keys, parts = kind.__name__, [value.maxlen] if kind is deque else [], [*value]
    elif kind is dict and all(map(can_be_written, value)):
        name, keys, parts = _MAPPING, [*value], [*value.values()]
    elif _is_plain_object(value):
        name, keys, parts = known.name_of(kind), [*vars(value)], [*vars(value).values()]
        name = [kind.__qualname__ if name is None else name]
    else:
        return instead
    if depth == _DEEPEST:
        return instead
    sent = [told(part, known, before, depth + 1) for part in parts]
    return instead if any(part is UNTOLD for part in sent) else [_MARK, name, keys, sent]


def _is_known_inside(value: Any, known: Known, before: Before | None) -> bool:
    """Whether a value holds a container that other workers have, too."""
    return any(
        known.name_of(one) is not None or (before is not None and before.place_of(one) is not None)
        for one in containers_in(freeze(value))
    )


def _is_plain_object(value: Any) -> bool:
    is_thing = not isinstance(value, (type, torch.Tensor, nn.Module)) and not callable(value)
    return is_thing and hasattr(value, "__dict__") and not is_of_library(type(value).__module__)


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
        case ["\0left", "tensor", torch.Tensor() as tensor, shape]:
            if isinstance(there, StandIn) and type(there) is not KeptValue:
                return there  # it has an owner
            if shape is None:
                return tensor
            return KeptValue.of(tensor.expand(shape), where, "has a history, which stays there")
        case ["\0left", "same"]:
            return there
        case ["\0left", "there", name]:
            return known.there(name)
        case ["\0left", "before", place] if before is not None:
            return before.at(*place).container
        case ["\0left", [name], list(keys), list(parts)]:
            made = _object(name, there, known, is_filled=is_filled)
            if made is None:
                return there
            old = dict(vars(made))
            vars(made).clear()
            for key, part in zip(keys, parts, strict=True):
                vars(made)[key] = learned(part, old.get(key), where, known, before)
            return made
        case ["\0left", str(name), list(keys), list(parts)]:
            return _container(name, keys, parts, there, where, known, before)
    return sent


def _object(name: Any, there: Any, known: Known, *, is_filled: bool) -> Any:
    """The object to be filled; None where its class is not known here."""
    if type(there).__qualname__ == name or known.name_of(type(there)) == name:
        return there if is_filled else copy.copy(there)
    kind, usual = known.named(name), object.__new__
    return usual(kind) if isinstance(kind, type) and usual is kind.__new__ else None  # type: ignore[comparison-overlap]


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
        pairs = zip(keys, parts, strict=True)
        return {key: learned(part, old.get(key), where, known, before) for key, part in pairs}
    kind = type(there)
    held = [*there] if kind.__name__ == name else []
    held += [None] * (len(parts) - len(held))
    made = [learned(p, one, where, known, before) for p, one in zip(parts, held, strict=False)]
    if name in _SEQUENCES:
        return _SEQUENCES[name](made, *keys)
    # A named tuple; the first one there may be of a class that is not known here.
    return kind(*made) if kind.__name__ == name else there
