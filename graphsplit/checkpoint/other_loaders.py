"""Loaders that a Model is evaluated over, as far as they remember something.

A loader with a generator or a counter of its own gives other batches each time. ``train`` knows its
own loader; of those that are passed to ``eval``, perhaps by a callback, each that has changed is
remembered here. A process that starts anew has other loader objects: a state is kept for the next
one that looks like the one it was taken from.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from graphsplit.checkpoint.generators import is_same, put_remembered
from graphsplit.checkpoint.position import LoaderWatch, generators_of, set_now


@dataclass
class _Known:
    loader: weakref.ref[Any]
    first: Any  # its state before it was used first


class OtherLoaders:
    """The loaders that ``eval`` was given, as one worker knows them."""

    def __init__(self) -> None:
        self._known: list[_Known] = []
        self._due: list[Sequence[Any]] = []
        self._before: Any = None

    def begin(self, loader: Any) -> None:
        """It is used next."""
        if self._due:
            put_loader(loader, self._take_due(loader))
        self._before = _own_state(loader)

    def end(self, loader: Any) -> None:
        """It was used."""
        before, self._before = self._before, None
        is_known = any(known.loader() is loader for known in self._known)
        if is_known or before is None or is_same(before, _own_state(loader)):
            return
        with suppress(TypeError):  # what cannot be referred to weakly is a plain list
            self._known.append(_Known(weakref.ref(loader), before))

    def state(self) -> list[Any]:
        """The look of each loader, and its state."""
        alive = [known.loader() for known in self._known]
        return [[_looks(one), _own_state(one)] for one in alive if one is not None] + [
            list(due) for due in self._due
        ]

    def put_back(self, saved: Iterable[Sequence[Any]]) -> None:
        """Let all be as when ``state`` was called; those that came later, as they were first."""
        self._due = list(saved)
        known, self._known = self._known, []
        for one in known:
            loader = one.loader()
            if loader is None:
                continue
            found = self._take_due(loader)
            if found is not None:
                self._known.append(one)
            put_loader(loader, one.first if found is None else found)

    def _take_due(self, loader: Any) -> Any:
        """The state that waits for a loader of this look; None if none does."""
        looks = _looks(loader)
        for due in self._due:
            if due[0] == looks:
                self._due.remove(due)
                return due[1]
        return None


def put_loader(loader: Any, state: Any) -> None:
    """Let a loader start its next epoch from where it would have."""
    if not state:
        return
    if state["own"] is not None:
        loader.load_state_dict(state["own"])
    set_now(generators_of(loader), state["generators"])
    put_remembered(loader, state["remembered"][1])


def _own_state(loader: Any) -> Any:
    """A loader's state without that of the process."""
    state = LoaderWatch(loader).state()
    if state is None:
        return None
    of_its_own = {name: value for name, value in state["remembered"][1].items() if name}
    return {**state, "remembered": [of_its_own, of_its_own]}


def _looks(loader: Any) -> str:
    """A name that tells one loader from another, in every process alike."""
    length = length_of(loader)
    parts = [type(getattr(loader, name, None)).__qualname__ for name in ("sampler", "dataset")]
    return f"{type(loader).__qualname__} {length} {' '.join(parts)}"


def length_of(loader: Any) -> int | None:
    """How many batches it has; None where it does not know, as a stream of samples."""
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except TypeError:  # a DataLoader asks its data set
        return None
