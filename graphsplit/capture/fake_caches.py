"""Functions that keep their results, and would keep those of a capture.

A ``functools.lru_cache`` that was filled while a network is captured holds fake tensors, and would
hand them to the next capture, or to the user.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

# What each cache had been asked when it was last looked into.
_asked: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def forget_fake_tensors() -> None:
    """Clear every cache of a function that a capture has filled."""
    for cache in _used_since():
        results = gc.get_referents(cache)  # the function, and everything it has kept
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(results)):
            cache.cache_clear()


def _used_since() -> Iterator[Any]:
    """Every cache that was asked anything since it was last looked into."""
    # All of them refer to this class; to look at every object would take twice as long. Those that
    # a user has frozen (``gc.freeze``) are found only if they were seen before.
    found = gc.get_referrers(functools._CacheInfo)
    caches = {one for one in found if type(one) is functools._lru_cache_wrapper}
    for cache in caches.union(_asked):
        info = cache.cache_info()
        if info != _asked.get(cache):
            _asked[cache] = info
            yield cache
