"""Plain Python values that two pieces of code can both reach: what one may change for the other.

A data set that changes what a loss reads must lead to it: by an attribute, a closure, a global.
"""

from __future__ import annotations

import gc
import operator
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from graphsplit.capture.reach.contents import is_iterator
from graphsplit.capture.reach.holders import Holder
from graphsplit.capture.reach.names import names_in
from graphsplit.capture.reach.reach import Walk
from graphsplit.guards.values import BY_VALUE

_MOST = 1 << 12  # holders on one walk: a trainer, or samples in a list, may lead to any number
_MOST_ITEMS = 1000
_OPAQUE = (torch.Tensor, np.ndarray)
_TENSOR = frozenset((torch.Tensor,))
_CONTAINERS = (list, tuple, set, frozenset, deque)
_PLAIN = (type(None), Enum, *BY_VALUE)


class _PlainWalk(Walk):
    """Goes past tensors, arrays and generators.

    Attributes:
        is_open: Whether it came to what leads on where nobody follows: an object of ours, as a
            Model, or an iterator.
        is_ours: Whether it came to an object of ours.
    """

    most = _MOST
    is_open = is_ours = False

    def run(self, roots: Iterable[Any]) -> tuple[list[Holder], list[Any]]:
        """As every walk, but what was found holds on to nothing that the script may let go of."""
        found = super().run(roots)
        for holder in found[0]:
            holder.forget()
        return found

    def _push(self, value: Any, name: str) -> None:
        if not _is_of_tensors(value) and not isinstance(value, _OPAQUE):
            super()._push(value, name)

    def _visit(self, value: Any, name: str) -> None:
        module = str(type(value).__module__)  # it is no text for classes of some extensions
        if module.startswith("graphsplit.feeding."):
            return  # it stands in a loader's iterator, before what the loader itself leads to
        self.is_ours |= module.startswith("graphsplit.")
        self.is_open |= self.is_ours
        if isinstance(value, types.GeneratorType):  # a loader may be one
            if (frame := value.gi_frame) is not None:
                for inner in frame.f_locals.values():
                    self._push(inner, name)
                names = names_in(frame.f_code)
                self._visit_names(frame.f_globals, names.globals, names)
        elif is_iterator(value):
            self.is_open = True
            for inner in gc.get_referents(value):
                self._push(inner, name)
        else:
            super()._visit(value, name)
            if module.startswith("torch.utils.data"):  # holds the user's data set
                self._visit_attributes(value, name)


class SharedValues:
    """The plain values that some code can reach and other code as well, as they are now.

    Two workers name alike what their like objects hold. Of a walk that would be too long the near
    part counts; writers whose walk is, or who hold a Model or an iterator, are then taken to reach
    all that readers reach.

    Args:
        readers: What reads: networks, losses.
        writers: What may change something: loaders.
        objects: What writers may change, or see change, without that being compared: optimizers,
            parts of networks, losses. None is no object.
        code: What reads Python state without that being watched: hooks on parameters.

    Attributes:
        is_beyond: Whether writers reach such an object, or state that such code reaches as well.
    """

    def __init__(
        self,
        readers: Iterable[Any],
        writers: Iterable[Any],
        objects: Collection[Any] = (),
        code: Iterable[Any] = (),
    ) -> None:
        self._readers, self._writers = readers, writers
        walk = _PlainWalk(())
        self._held = walk.run(writers)[0]
        self._is_all = walk.is_open or len(self._held) >= _MOST
        keys = {holder.key for holder in self._held if holder.is_value}
        late = _PlainWalk(()).run(code)[0] if (code := [*code]) else []
        self.is_beyond = (walk.is_ours and bool(late or objects)) or (
            any(one is not None and id(one) in walk.seen for one in objects)
            or any(holder.is_value and holder.key in keys for holder in late)
        )
        if self._is_all:
            self._held = _PlainWalk(()).run(readers)[0]
        self._before = _texts(self._held)

    def changed(self) -> list[str]:
        """The values that are others than they were, with names."""
        walk = _PlainWalk(()).run(self._readers if self._is_all else self._writers)[0]
        now = _texts((*self._held, *walk))  # what led to a value before may have let go of it
        if all(self._before.get(key) == texts for key, texts in now.items()):
            return []
        readers = walk if self._is_all else _PlainWalk(()).run(self._readers)[0]
        shared = (holder for holder in readers if holder.key in now)
        return [
            f"{number} {holder.name}.{text}"
            for number, holder in enumerate(shared)
            for text in sorted(now[holder.key] ^ self._before.get(holder.key, frozenset()))
        ]


class PlainContents:
    """The plain values that some code can reach, to be put back: in objects, containers, closures.

    What is no plain value, nor a container of such alone, stays as it is; so do attributes and
    tables of the modules themselves.

    Args:
        readers: What reads: a network, a loss.
    """

    def __init__(self, readers: Iterable[Any]) -> None:
        modules = [m for one in readers if isinstance(one, nn.Module) for m in one.modules()]
        tables = [value for one in modules for value in vars(one).values()]
        apart = set(map(id, (*map(vars, modules), *tables)))
        found = _PlainWalk(()).run(readers)[0]
        own = (one for one in found if one.is_value and one.key not in apart)
        self._then = [(one, [*one.entries()], _plain_in(one)) for one in own]

    def put_back(self) -> list[tuple[Holder, dict[Any, Any]]]:
        """Let all be as it was; returns what had changed, with what it held."""
        changed: list[tuple[Holder, dict[Any, Any]]] = []
        for holder, order, then in self._then:
            entries, now = holder.entries(), _plain_in(holder)
            is_as_then = then.keys() == now.keys() and all(
                map(_is_one, then.values(), now.values())
            )
            if not is_as_then and ("" not in entries or "" in then):
                changed.append((holder, entries))
                held = {**{k: v for k, v in entries.items() if k not in now}, **then}
                in_order = {key: held[key] for key in order if key in held}
                holder.hold_entries({**in_order, **held})
        return changed

    @contextmanager
    def as_then(self) -> Iterator[None]:
        """Let all be as it was, for a while."""
        changed = self.put_back()
        try:
            yield
        finally:
            for holder, entries in changed:
                holder.hold_entries(entries)


def _plain_in(holder: Holder) -> dict[Any, Any]:
    found = {k: v for k, v in holder.entries().items() if isinstance(k, _PLAIN)}
    return {key: value for key, value in found.items() if _is_plain(value)}


def _is_one(then: Any, now: Any) -> bool:
    """Whether two plain values are one object; or contents that were read, of like ones."""
    if isinstance(then, (list, frozenset)) and type(then) is type(now):
        return len(then) == len(now) and all(map(operator.is_, then, now))
    return then is now


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, _CONTAINERS):
        return len(value) <= _MOST_ITEMS and all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)


def _texts(holders: Iterable[Holder]) -> dict[Any, frozenset[str]]:
    """The contents of each, by its key."""
    own = {holder.key: holder for holder in holders if holder.is_value}
    return {key: frozenset(_lines(holder)) for key, holder in own.items()}


def _lines(holder: Holder) -> Iterator[str]:
    for key, value in holder.entries().items():
        if isinstance(key, _PLAIN):
            yield f"{key!r}: {_text(value)}"


def _is_of_tensors(value: Any) -> bool:
    """Whether it is a tuple of tensors: a loader may be a list of thousands of them."""
    return type(value) is tuple and (
        _TENSOR.issuperset(map(type, value)) or all(isinstance(one, _OPAQUE) for one in value)
    )


def _text(value: Any) -> str:
    if type(value) is torch.Tensor:
        return "tensor"
    if type(value) is tuple and len(value) <= _MOST_ITEMS and _TENSOR.issuperset(map(type, value)):
        return f"tuple {['tensor'] * len(value)}"  # as most of what a list of batches holds
    if isinstance(value, _PLAIN):
        return repr(value)
    # A tensor's class tells whether it lives elsewhere.
    kind = "tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    if isinstance(value, (list, tuple, set, frozenset)) and len(value) <= _MOST_ITEMS:
        texts = list(map(_text, value))
        return f"{kind} {sorted(texts) if isinstance(value, (set, frozenset)) else texts}"
    return kind
