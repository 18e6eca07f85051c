"""The number of an epoch, as samplers, batch samplers and data sets are told it by ``set_epoch``.

A plain loop writes ``sampler.set_epoch(epoch)`` in front of each epoch, and forgets it: then all
epochs have one order. ``Model.train`` does it, on all workers. Epochs count from 0 through all
calls of ``train``. A number that the script or a callback has set itself stands, and later epochs
count on from it; that shows in the attribute ``epoch``, which all that torch has keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphsplit.checkpoint.generators import named_parts
from graphsplit.checkpoint.position import EpochStart

_NAMES = ("epoch", "_epoch")


class EpochNumbers:
    """Tells a loader's parts the numbers of epochs.

    Args:
        loader: The loader of a call of ``train``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._offsets: dict[str, int] = {}  # of a part's numbers against ours
        self._left: dict[str, int | None] = {}  # what an epoch has left

    def tell(self, num_epochs: int) -> None:
        """An epoch begins; so many were run before, by all calls of ``train``."""
        for path, part in self._told():
            shown, number = _shown(part), num_epochs + self._offsets.get(path, 0)
            usual = (0, num_epochs - 1) if path not in self._left else (self._left[path],)
            if shown is not None and shown not in usual:
                number = shown  # set since by somebody else
            part.set_epoch(number)

    def go_on(self, num_epochs: int, start: EpochStart) -> None:
        """Training goes on where a loaded state stood, between two epochs or in one.

        A part that shows a number got its own back with the loader's state; any other is told it.
        """
        last = num_epochs if start.step else num_epochs - 1
        _, remembered = (start.loader or {}).get("remembered") or ({}, {})
        for path, part in self._told():
            number = _remembered(remembered, path)
            if number is not None:
                self._offsets[path] = number - last
            if start.step and _shown(part) is None:
                part.set_epoch(last + self._offsets.get(path, 0))
            self._left[path] = _shown(part)

    def begins(self, num_epochs: int, remembered: Mapping[str, Any]) -> None:
        """The loader is read next, or goes on.

        Args:
            num_epochs: How many epochs were run before.
            remembered: What decided the loader's batches when the epoch began.
        """
        for path, _ in self._told():
            number = _remembered(remembered, path)
            if number is not None:
                self._offsets[path] = number - num_epochs

    def end(self) -> None:
        """The epoch is over."""
        self._left = {path: _shown(part) for path, part in self._told()}

    def _told(self) -> Iterator[tuple[str, Any]]:
        parts = [("loader", self._loader), *named_parts(self._loader)]
        return ((path, one) for path, one in parts if callable(getattr(one, "set_epoch", None)))


def _remembered(states: Mapping[str, Any], path: str) -> int | None:
    """The number that a part showed."""
    found = (states.get(f"{path}:{name}") for name in _NAMES)
    return next((one for one in found if type(one) is int), None)


def _shown(part: Any) -> int | None:
    """The number that a part shows; None if it shows none."""
    found = (getattr(part, name, None) for name in _NAMES)
    return next((one for one in found if type(one) is int), None)
