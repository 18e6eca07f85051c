"""What a capture leaves in a cache of a function is forgotten."""

from __future__ import annotations

import functools
import gc

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from graphsplit.capture.fake_caches import forget_fake_tensors


@functools.lru_cache
def ones(size: int) -> torch.Tensor:
    return torch.ones(size)


def test_results_of_a_capture_are_forgotten_and_others_kept() -> None:
    kept = ones(2)
    forget_fake_tensors()
    assert ones(2) is kept
    with FakeTensorMode():
        assert isinstance(ones(3), FakeTensor)
    forget_fake_tensors()
    assert not isinstance(ones(3), FakeTensor)


def test_a_cache_that_was_frozen_after_it_was_seen_is_still_looked_into() -> None:
    forget_fake_tensors()
    gc.freeze()
    assert ones not in gc.get_referrers(functools._CacheInfo)
    with FakeTensorMode():
        assert isinstance(ones(4), FakeTensor)
    forget_fake_tensors()
    assert not isinstance(ones(4), FakeTensor)
