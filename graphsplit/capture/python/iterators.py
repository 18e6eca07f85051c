"""Iterators, NumPy's generators, queues in C that a network's code keeps: did it move them on?

No hook sees what C code does with them. So where a place that holds one is first read, its state is
noted; after the recording the states are compared.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import BuiltinMethodType, GeneratorType, MethodType, MethodWrapperType
from typing import Any

import numpy as np

from graphsplit.capture.reach.contents import position_of
from graphsplit.capture.reach.holders import Holder
from graphsplit.capture.reach.reach import holders
from graphsplit.errors import CaptureError
from graphsplit.guards.classes import is_watchable
from graphsplit.guards.hidden import TELLING, told_by
from graphsplit.guards.places import Place
from graphsplit.guards.values import any_leaf

_OF_NUMPY = (np.random.BitGenerator, np.random.Generator, np.random.RandomState)


class MovedOnError(CaptureError):
    """Code has moved one on: run once more it may go another way, so that would tell nothing."""


class KeptIterators:
    """Those in the places that code reads, each with its state when it was read first.

    At the end of a ``with`` block it is an error if one has moved on. NumPy's generators are put
    back in any case: where the block ends in another error, the code runs again.

    Args:
        unseen: Gives a block inside which reads are not noted.
    """

    def __init__(self, unseen: Callable[[], AbstractContextManager[None]]) -> None:
        self._unseen = unseen
        self._kept: dict[int, tuple[Any, Any, Place]] = {}

    def note(self, place: Place, first: Any) -> None:
        """Note what was in a place first, as a snapshot."""

        def note(leaf: Any) -> bool:
            if isinstance(leaf, (BuiltinMethodType, MethodType, MethodWrapperType)):
                leaf = leaf.__self__  # self.draw = np.random.default_rng(0).random
            kind: Any = type(leaf)
            if _moves(kind) and id(leaf) not in self._kept:
                with self._unseen():
                    self._kept[id(leaf)] = leaf, _state_of(leaf), place
            return False

        any_leaf(first, note)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        moved = [kept for kept in self._kept.values() if _state_of(kept[0]) != kept[1]]
        for value, state, _ in moved:
            if isinstance(value, _OF_NUMPY):
                _holder_of(value).hold(state)
        if moved and kind is None:
            value, _, place = moved[0]
            what = "a NumPy generator" if isinstance(value, _OF_NUMPY) else "an iterator"
            what = "an object with a state" if isinstance(value, TELLING) else what
            raise MovedOnError(
                f"forward or the loss uses {place.label}, {what} that was there before"
                f" ({type(value).__name__}); the captured graph would keep what it got, "
                f"at every step\n  {place.source}\n"
                f"  Fix: draw with torch from the default generator, hand the item in with the "
                f"batch, or keep the module or function that does it whole, with gs.opaque."
            )


@functools.lru_cache(maxsize=4096)
def _moves(kind: Any) -> bool:
    """Whether objects of a class move on unseen; what one of the user's does, attributes show."""
    if issubclass(kind, (*_OF_NUMPY, *TELLING)):
        return True
    return issubclass(kind, Iterator) and not is_watchable(kind)


def _state_of(value: Any) -> Any:
    """A value that changes when something moves on; None of what never does.

    A generator that has begun says nothing; `graphsplit.capture.python.outside_reads` sees it go
    on.
    """
    if isinstance(value, _OF_NUMPY):
        return _holder_of(value).held()
    if isinstance(value, TELLING):
        return told_by(value)
    if isinstance(value, GeneratorType):
        return inspect.getgeneratorstate(value)
    return position_of(value)


def _holder_of(generator: Any) -> Holder:
    if isinstance(generator, np.random.BitGenerator):
        generator = np.random.Generator(generator)
    return holders((generator,))[0][0]
