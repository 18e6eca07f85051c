"""The Python state that a piece of code can reach: looked at, noted, put back.

What is kept whole runs while plans are made, and once more at every step. A counter that it keeps
must not know of the first::

    calls = {"n": 0}                        reached by its name, which the code of `f` holds
    def f(x): calls["n"] += 1; ...          noted before `f` runs on fake tensors, put back after
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from graphsplit.capture.reach.holders import NUMPYS, PYTHONS, Holder
from graphsplit.capture.reach.reach import holders

_OF_THE_PROCESS = frozenset({id(PYTHONS), id(NUMPYS)})


class Reached:
    """What code can reach, and what of it was seen to change.

    Attributes:
        holders: All of it, by key.
        changed: Keys of what changed.
    """

    def __init__(self) -> None:
        self.holders: dict[Any, Holder] = {}
        self.changed: set[Any] = set()

    def may_draw_from_process(self) -> bool:
        """Whether it can reach Python's or NumPy's generator of the whole process."""
        return not _OF_THE_PROCESS.isdisjoint(self.holders)

    def drew_from_process(self) -> bool:
        """Whether it was seen to draw from one of these."""
        return not _OF_THE_PROCESS.isdisjoint(self.changed)

    def has_changed_python(self) -> bool:
        """Whether something other than the values of tensors was seen to change."""
        return any(not self.holders[key].is_tensor for key in self.changed)

    @contextmanager
    def leaving_no_trace(self, roots: Iterable[Any]) -> Iterator[None]:
        """Run code that some values lead to, and put back what it changes in Python's state."""
        with _disable_current_modes():
            found = holders(roots)
        try:
            yield
        finally:
            with _disable_current_modes():
                self._put_back(found)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Run the code once more on fake tensors, and put back what it changes."""
        with _disable_current_modes():
            for holder in self.holders.values():
                holder.note()
        try:
            yield
        finally:
            with _disable_current_modes():
                self._put_back(tuple(self.holders.values()))

    def _put_back(self, found: Iterable[Holder]) -> None:
        for holder in found:
            self.holders.setdefault(holder.key, holder)
            if holder.has_changed():
                self.changed.add(holder.key)
                holder.put_back()
            holder.forget()

    def tensors(self) -> frozenset[int]:
        """The tensors among it, by number (``id``)."""
        return frozenset(key for key, holder in self.holders.items() if holder.is_tensor)

    def note_changed(self, changed: Iterable[Holder]) -> None:
        """Note what was seen to change in another way."""
        for holder in changed:
            self.holders.setdefault(holder.key, holder)
            self.changed.add(holder.key)
