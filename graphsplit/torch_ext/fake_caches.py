"""Functions that keep their results, and would keep those of a capture.

A ``functools.lru_cache`` that was filled while a network is captured holds fake tensors, and would
hand them to the next capture, or to the user.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

# What each cache that was ever found had been asked when it was last looked into.
_asked: weakref.WeakKeyDictionary[Any, tuple[Any, ...] | None] = weakref.WeakKeyDictionary()
# Every cache refers to this class. How many others do, as far as that is known.
_CLASS = functools._CacheInfo
# Packages that do not write into what their caches have answered.
_FIXED = frozenset(("graphsplit", "re", "sympy", "torch", "typing"))
_num_other_references: int | None = None


def forget_fake_tensors() -> None:
    """Clear every cache of a function that a capture has filled."""
    for cache in _used_since():
        # The function, and everything it has kept.
        if _are_there_fakes(gc.get_referents(cache)):
            cache.cache_clear()
            _asked[cache] = _state_of(cache)


def _are_there_fakes(left: list[Any]) -> bool:
    """Whether there are fake tensors among objects, or within them where pytree looks.

    pytree asks about each object by itself, and took a tenth of a capture's time.
    """
    leaves: dict[type, bool] = {}
    while left:
        one = left.pop()
        kind = type(one)
        if kind is tuple or kind is list:
            left += one
        elif kind is dict:
            left += one.values()
        elif not leaves.setdefault(kind, kind in leaves or pytree.tree_is_leaf(one)):
            left += pytree.tree_leaves(one)
        elif issubclass(kind, FakeTensor):
            return True
    return False


def freeze_what_is_there() -> None:
    """``gc.freeze``, after which no cache is found that was not known before."""
    forget_fake_tensors()
    gc.freeze()


def _used_since() -> Iterator[Any]:
    """Every cache that was asked anything since it was last looked into."""
    if _are_there_new_ones():
        _find_all()
    for cache in list(_asked):
        info = _state_of(cache)
        if info != _asked.get(cache):
            _asked[cache] = info
            yield cache


def _state_of(cache: Any) -> tuple[Any, ...]:
    """A key that differs once a cache may hold something new; without a reference to the class.

    A result that was found there is new if somebody writes into it: not into those of ``_FIXED``.
    """
    info = cache.cache_info()
    is_fixed = str(getattr(cache, "__module__", "")).partition(".")[0] in _FIXED
    return info[1:] if is_fixed else info[:]  # type: ignore[no-any-return]


def _are_there_new_ones() -> bool:
    """Whether there may be caches that were never found.

    To look through all objects takes a third of a capture's time. References to the class, less
    those of caches that are known and still there, tell as much.
    """
    return sys.getrefcount(_CLASS) - len(_asked) != _num_other_references


def _find_all() -> None:
    """Look through all objects but those that were frozen (``gc.freeze``)."""
    global _num_other_references
    for one in gc.get_referrers(_CLASS):
        if type(one) is functools._lru_cache_wrapper:
            _asked.setdefault(one, None)
    _num_other_references = sys.getrefcount(_CLASS) - len(_asked) if _IS_COUNTED else None


def _is_counted() -> bool:
    """Whether this interpreter counts references to the class one by one, and at once."""
    before = sys.getrefcount(_CLASS)
    one = functools.lru_cache(len)
    during = sys.getrefcount(_CLASS)
    del one
    return (during, sys.getrefcount(_CLASS)) == (before + 1, before)


_IS_COUNTED = _is_counted()
