"""The states of generators, as they travel."""

from __future__ import annotations

import random

import numpy as np
import torch

from graphsplit.partition.edges import ALL_GENERATORS_META, PROCESS_GENERATORS_META
from graphsplit.runtime.randomness import (
    all_generators,
    process_generators,
    set_all_generators,
    set_process_generators,
)


def draws() -> list[float]:
    """One of each kind; normal ones are made in pairs, of which the second is kept."""
    return [
        torch.rand(()).item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    ]


def test_all_generators_go_on_as_they_were() -> None:
    draws()  # a second normal number is kept by now
    state = all_generators()
    assert (state.dtype, tuple(state.shape)) == (
        ALL_GENERATORS_META.dtype,
        ALL_GENERATORS_META.shape,
    )
    first = [draws() for _ in range(3)]
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    set_all_generators(state)
    assert [draws() for _ in range(3)] == first


def test_those_of_the_process_leave_torchs_alone() -> None:
    state = process_generators()
    assert tuple(state.shape) == PROCESS_GENERATORS_META.shape
    first = draws()[1:]
    before = torch.default_generator.get_state()
    set_process_generators(state)
    assert torch.equal(torch.default_generator.get_state(), before)
    assert draws()[1:] == first
