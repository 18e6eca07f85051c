"""Placements that nobody has used, by the user's lines that have written them.

A copy of a placed module was placed by the same line, and a loop places several by one: a line of
which anything was planned is used.
"""

from __future__ import annotations

_used: set[str] = set()
_not_used: dict[str, str] = {}


def never_used() -> list[str]:
    """``Linear at train.py:12``, for each line that placed modules none of which was planned."""
    return [f"{name} at {source}" for source, name in _not_used.items()]


def note_placed(source: str, name: str) -> None:
    """A line has placed a module of a type."""
    if source not in _used:
        _not_used[source] = name


def note_replaced(source: str) -> None:
    """Take back that a line has placed something: another one does now, or none."""
    _not_used.pop(source, None)


def note_used(source: str) -> None:
    """Something that a line has placed was planned."""
    _used.add(source)
    _not_used.pop(source, None)
