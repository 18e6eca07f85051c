"""Iterators and NumPy's generators that a network's code keeps: did a recording move them on?

No hook sees what C code does with them. So where a function of the user's starts, those that its
names lead to are noted, each with its state; after the recording the states are compared.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import (
    BuiltinMethodType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import numpy as np

from graphsplit.capture.observe import reachable_values
from graphsplit.capture.reach.reach import holders
from graphsplit.errors import CaptureError
from graphsplit.frames import short_path
from graphsplit.guards.classes import own_dictionary

_MAX_DEPTH = 3
_MAX_ITEMS = 100


@dataclass(frozen=True)
class _Kept:
    """Something that moves on when it is used.

    Attributes:
        value: It.
        state: Its state before; equal if it is the same.
        name: What leads to it.
        code: The function that does so.
    """

    value: Any
    state: Any
    name: str
    code: CodeType


class KeptIterators:
    """Values that running functions can reach, by the names in their code."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._seen: set[tuple[CodeType, int]] = set()

    def note(self, frame: FrameType) -> None:
        """Note what a function that starts can reach.

        Args:
            frame: Its frame.
        """
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        key = code, id(given[0]) if given else 0
        if key in self._seen and not code.co_freevars:
            return
        self._seen.add(key)
        names = set(code.co_names)
        held = {name: frame.f_globals[name] for name in names if name in frame.f_globals}
        held.update({name: frame.f_locals.get(name) for name in code.co_freevars})
        for name, value in held.items():
            self._note(value, name, names, code, _MAX_DEPTH)
        for name, value in zip(code.co_varnames, given, strict=False):
            # Iterators that are handed from function to function were made on the way.
            if not isinstance(value, (list, tuple, dict, Iterator)):
                self._note(value, name, names, code, _MAX_DEPTH)

    def note_function(self, function: Any) -> None:
        """Note what a function can reach by its defaults and cells."""
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            self._note(function, code.co_name, set(), code, 1)

    def _note(self, value: Any, name: str, names: set[str], code: CodeType, depth: int) -> None:
        if isinstance(value, (BuiltinMethodType, MethodWrapperType)):
            value = value.__self__  # self.draw = np.random.default_rng(0).random
        state = _state_of(value)
        if state is not None:
            known = self._kept.get(id(value))
            if known is None or known.state == state:  # the name that was found last is nearest
                self._kept[id(value)] = _Kept(value, state, name, code)
        if not depth or isinstance(value, (ModuleType, type)):
            return
        if isinstance(value, (list, tuple, dict)):
            items = list(value.values() if isinstance(value, dict) else value)
            for item in items[:_MAX_ITEMS]:
                self._note(item, name, names, code, 0)
            return
        if isinstance(value, (FunctionType, functools.partial)):
            for inner_value in reachable_values(value, depth=0):
                self._note(inner_value, name, names, code, 0)
            return
        held = own_dictionary(value)  # past the hooks of whoever records what code reads
        if held is not None:
            for inner in names & held.keys():
                self._note(held[inner], inner, names, code, depth - 1)

    def check(self) -> None:
        """Raise ``CaptureError`` if one of them has moved on."""
        for kept in list(self._kept.values()):
            if _state_of(kept.value) != kept.state:
                what = "an iterator" if isinstance(kept.value, Iterator) else "a NumPy generator"
                raise CaptureError(
                    f"forward or the loss uses {kept.name!r}, {what} that was there before"
                    f" ({type(kept.value).__name__}); the captured graph would keep what it got, "
                    f"at every step\n  {_line_of(kept)}\n"
                    f"  Fix: draw with torch from the default generator, hand the item in with the "
                    f"batch, or keep the module or function that does it whole, with gs.opaque."
                )


def _line_of(kept: _Kept) -> str:
    """``file:line, in function`` where a name stands."""
    number = kept.code.co_firstlineno
    for instruction in dis.get_instructions(kept.code):
        number = instruction.starts_line or number
        if instruction.argval == kept.name:
            break
    return f"{short_path(kept.code.co_filename)}:{number}, in {kept.code.co_name}"


def _state_of(value: Any) -> Any:
    """A value that changes when something moves on; None of what never does.

    A generator that has begun says nothing; `graphsplit.capture.python.outside_reads` sees it go
    on.
    """
    if isinstance(value, np.random.BitGenerator):
        value = np.random.Generator(value)
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        return holders((value,))[0][0].held()
    if isinstance(value, GeneratorType):
        return inspect.getgeneratorstate(value)
    if isinstance(value, Iterator):
        return _position(value, _MAX_DEPTH)
    return None


def _position(iterator: Any, depth: int) -> str | None:
    """Where an iterator stands, as far as it tells."""
    if hasattr(iterator, "tell"):
        return str(iterator.tell())
    try:
        reduced = iterator.__reduce__()
    except TypeError:
        return None
    return repr([_shown(part, depth) for part in reduced])


def _shown(part: Any, depth: int) -> Any:
    if depth and isinstance(part, tuple):
        return [_shown(item, depth - 1) for item in part]
    if depth and isinstance(part, Iterator):
        return _position(part, depth - 1)
    return part if isinstance(part, (int, float, str, type(None))) else id(part)
