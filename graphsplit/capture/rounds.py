"""Code that asks for values of tensors again and again: is it a loop that does the same each time?

``while h.norm() > 4: h = f(h)`` never ends if the answer is always «yes», and each round costs as
much as the first. So the run is over once many rounds brought nothing new. ``for row in rows: if
row.sum() > 0: …`` asks at one line as well, but about another row each time, and goes on to its
end; so does a loop that counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch

from graphsplit.frames import is_users

_MOST_ALIKE = 24
_RECENT = 8  # questions ago: a loop may ask several times a round
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SIZED = (list, dict, set, tuple)
_is_users = cache(is_users)


class Rounds:
    """The stretches between two questions, and how many of the latest brought nothing new.

    New is an operation with other constants than before, a tensor that was made long ago and is
    read for the first time, another line that asks, or another plain value in a variable there.

    Args:
        outside: The code that runs what is watched; its variables do not count.
    """

    def __init__(self, outside: CodeType) -> None:
        self._outside = outside
        self._known: set[Any] = set()
        self._held: list[torch.Tensor] = []  # their ids are no other tensor's
        self._made: dict[int, int] = {}  # by id, after how many questions
        self._read: set[int] = set()
        self._num_asked = 0
        self._num_alike = 0
        self._has_new = False

    def note(self, function: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """An operation was run."""
        self._learn((function, *(str(o) for o in operands if not isinstance(o, torch.Tensor))))
        for operand in operands:
            if isinstance(operand, torch.Tensor) and id(operand) not in self._read:
                self._read.add(id(operand))
                self._held.append(operand)
                made = self._made.get(id(operand))
                self._has_new |= made is None or made < self._num_asked - _RECENT
        for result in results:
            if isinstance(result, torch.Tensor) and id(result) not in self._made:
                self._made[id(result)] = self._num_asked
                self._held.append(result)

    def go_on(self) -> bool:
        """The code asks once more; whether it may still do something new."""
        self._learn(tuple(_states(sys._getframe(1), self._outside)))
        self._num_alike = 0 if self._has_new else self._num_alike + 1
        self._num_asked += 1
        self._has_new = False
        return self._num_alike < _MOST_ALIKE

    def _learn(self, what: Any) -> None:
        self._has_new |= what not in self._known
        self._known.add(what)


def _states(frame: FrameType | None, outside: CodeType) -> Iterator[tuple[Any, ...]]:
    """Where every function of the user's on the stack is, and the plain values that it sees."""
    while frame is not None and frame.f_code is not outside:
        if not _is_users(frame.f_code.co_filename):
            frame = frame.f_back
            continue
        variables = frame.f_locals
        seen = [_plain(value) for value in variables.values()]
        for value in variables.values():
            held = getattr(value, "__dict__", None) if not isinstance(value, type) else None
            if isinstance(held, dict):
                seen.append(tuple(map(_plain, held.values())))
        yield (frame.f_code, frame.f_lasti, *seen)
        frame = frame.f_back


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return type(value), value
    return type(value), len(value) if type(value) in _SIZED else 0
