"""Functions that keep their results, and would keep those of a capture.

A ``functools.lru_cache`` that was filled while a network is captured holds fake tensors, and would
hand them to the next capture, or to the user.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

# Every cache that was ever found: which of its counts matter, and what they were at the last look.
# A result that was found in a cache is new if somebody writes into it: not into those of _FIXED.
_asked: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()
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
            _look_at(cache, _asked[cache][0])


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


def _used_since() -> list[Any]:
    """Every cache that was asked anything since it was last looked into."""
    if _are_there_new_ones():
        _find_all()
    known = list(_asked.items())  # counts are compared without the class that holds them
    used = [(one, first) for one, (first, was) in known if one.cache_info()[first:] != was]
    for cache, first in used:
        _look_at(cache, first)
    return [cache for cache, _ in used]


def _look_at(cache: Any, first: int) -> None:
    _asked[cache] = first, cache.cache_info()[first:]


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
            package = str(getattr(one, "__module__", "")).partition(".")[0]
            _asked.setdefault(one, (int(package in _FIXED), None))
    _num_other_references = sys.getrefcount(_CLASS) - len(_asked) if _IS_COUNTED else None


def _is_counted() -> bool:
    """Whether this interpreter counts references to the class one by one, and at once."""
    before = sys.getrefcount(_CLASS)
    one = functools.lru_cache(len)
    during = sys.getrefcount(_CLASS)
    del one
    return (during, sys.getrefcount(_CLASS)) == (before + 1, before)


_IS_COUNTED = _is_counted()
