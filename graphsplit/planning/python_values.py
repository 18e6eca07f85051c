"""The Python values that network and loss read and leave, kept over the loss of a worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

from graphsplit.errors import StateError
from graphsplit.guards.named_places import place_named
from graphsplit.guards.places import Place
from graphsplit.guards.values import MISSING, freeze, is_plain, same, shown, thaw
from graphsplit.planning.recordings import Recordings, write
from graphsplit.planning.task import Task


class PythonValues:
    """What snapshots keep of the places that recordings watch.

    Args:
        recordings: A Model's recordings.
        task: Its network and loss.
    """

    def __init__(self, recordings: Recordings, task: Task) -> None:
        self._recordings = recordings
        self._task = task
        self._first: dict[str, tuple[Any, Any]] = {}  # place, and its value when first read

    def note(self) -> None:
        """Note all places that are watched by now."""
        for label, (place, value) in self._recordings.places().items():
            self._first.setdefault(label, (place, value))

    def now(self) -> dict[str, Any]:
        """The snapshots of all places' present values, by label."""
        self.note()
        return {label: freeze(place.read()) for label, (place, _) in self._first.items()}

    def put(self, values: Mapping[str, Any]) -> None:
        """Let places have the values of ``now`` again."""
        for label, value in values.items():
            place = self._first[label][0]
            if not same(value, place.read()):
                write(place, value)

    def kept(self) -> list[list[Any]]:
        """What is not as it was when it was first read, as values that can be written.

        Raises:
            StateError: One of them cannot be written; names it.
        """
        self.note()
        found = []
        for label, (place, first) in self._first.items():
            value = place.read()
            frozen = freeze(value)
            if same(first, value):
                continue
            is_kept = is_plain(frozen) and _can_be_written(thaw(frozen))
            if not is_kept or not self._can_be_found(label, place):
                raise StateError(
                    f"{place.label} has changed from {shown(first)} to {shown(value)}, which a "
                    f"snapshot cannot hold\n  {place.source}\n"
                    f"  Fix: keep numbers, texts, lists and dictionaries of them in attributes of "
                    f"network or loss, or in globals; or start the job with fail_fast."
                )
            is_there = value is not MISSING
            found.append([label, is_there, thaw(frozen) if is_there else None])
        return found

    def put_back(self, kept: Iterable[Sequence[Any]]) -> None:
        """Let places be as when ``kept`` was called; others as when they were first read."""
        self.note()
        values = {label: first for label, (_, first) in self._first.items()}
        for label, is_there, value in kept:
            values[label] = freeze(value) if is_there else MISSING
        for label in values:
            if label not in self._first:  # not read here yet
                place = place_named(label, self._roots())
                if place is None:
                    raise StateError(f"{label} is in a snapshot, and was not found here")
                self._first[label] = (place, _UNKNOWN)
        self.put(values)

    def _can_be_found(self, label: str, place: Place) -> bool:
        """Whether a worker that comes back finds a place by its name."""
        found = place_named(label, self._roots())
        return found is not None and found.identity == place.identity

    def _roots(self) -> dict[str, Any]:
        return {"net": self._task.network, "loss_fn": self._task.loss_fn}


def _can_be_written(value: Any) -> bool:
    """Whether a value that was written comes back as it was, classes of containers included."""
    if type(value) is SimpleNamespace:
        return _can_be_written(vars(value))
    if isinstance(value, dict):
        return type(value) is dict and all(map(_can_be_written, (*value, *value.values())))
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value) in (list, tuple, set, frozenset) and all(map(_can_be_written, value))
    if isinstance(value, Enum):
        return value.name in type(value).__members__
    plain = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
    return value is None or value is MISSING or isinstance(value, plain)


_UNKNOWN = object()  # no value is the same
