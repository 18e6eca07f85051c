"""What a capture leaves in a cache of a function is forgotten; what is frozen is found."""

from __future__ import annotations

import functools
import gc
import itertools

import pytest
import torch
from pass_helpers import captured
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from graphsplit.capture.graph import Mode
from graphsplit.guards.classes import freeze_all
from graphsplit.torch_ext.fake_caches import forget_fake_tensors, freeze_what_is_there


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


def test_a_new_cache_is_found_when_another_one_has_gone() -> None:
    other = functools.lru_cache(len)
    forget_fake_tensors()
    del other
    fresh = functools.lru_cache(torch.zeros)
    for _ in range(2):  # the second capture asks just what the first one did
        with FakeTensorMode():
            assert isinstance(fresh(2), FakeTensor)
        forget_fake_tensors()
    assert not isinstance(fresh(2), FakeTensor)


def test_objects_are_looked_through_only_where_there_are_new_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget_fake_tensors()
    looks: list[type] = []
    look = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda one: looks.append(one) or look(one))
    forget_fake_tensors()
    assert looks == []
    fresh = functools.lru_cache(len)
    forget_fake_tensors()
    assert looks == [functools._CacheInfo]
    del fresh
    forget_fake_tensors()
    assert looks == [functools._CacheInfo]


def test_a_cache_that_is_frozen_is_looked_into_though_no_capture_had_seen_it() -> None:
    forget_fake_tensors()  # the tests before have let go of references that it counts
    fresh = functools.lru_cache(ones.__wrapped__)
    freeze_what_is_there()
    assert fresh not in gc.get_referrers(functools._CacheInfo)
    with FakeTensorMode():
        assert isinstance(fresh(4), FakeTensor)
    forget_fake_tensors()
    assert not isinstance(fresh(4), FakeTensor)


class Asking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(_weights)()


_weights = itertools.cycle([lambda: 1.0])


def test_variables_of_a_function_that_is_frozen_count_though_nothing_leads_to_it() -> None:
    weight = 1.0

    def weigh() -> float:
        return weight

    global _weights
    _weights = itertools.repeat(weigh)
    freeze_all()
    guards = captured(Asking(), torch.zeros(4), mode=Mode.PREDICT).state.guards
    assert guards.hold()
    weight = 2.0
    assert not guards.hold()
