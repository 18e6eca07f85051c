"""A few things that are costly to make and likely to be wanted again."""

from __future__ import annotations

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class BoundedCache(dict[_Key, _Value]):
    """A dictionary that forgets its oldest entry when it has more than a few.

    Args:
        limit: How many it keeps.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def keep(self, key: _Key, value: _Value) -> _Value:
        """Add an entry; returns its value."""
        if len(self) >= self._limit:
            del self[next(iter(self))]
        self[key] = value
        return value
