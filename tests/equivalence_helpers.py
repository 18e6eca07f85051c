"""Batches, a small network and placements, for comparing with the plain eager loop."""

from __future__ import annotations

import os
import random
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from simulated.equivalence import assert_same_bits
from simulated.scattered import scattered
from simulated.simulate import Captures
from torch import nn

from graphsplit.partition import splitting

PLACEMENTS = range(6)


def batches_of(*shape: int, num: int = 2) -> list[Any]:
    """Random inputs, each with one random number per sample as its target."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(*shape, generator=generator), torch.randn(shape[0], generator=generator))
        for _ in range(num)
    ]


def rows_against_target(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss for outputs of any shape."""
    return F.mse_loss(outputs.flatten(1).sum(1), target)


class Tower(nn.Module):
    """Three linear layers of width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.third(torch.relu(self.second(torch.relu(self.first(x)))))
        return made


class Applied(nn.Module):
    """Linear, then a function."""

    def __init__(self, function: Callable[..., Any], width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear(x))


def on_two(network: Any) -> None:
    """The first layer on worker 0, the others on worker 1."""
    network.first.place("MS_WORKER", 0)
    network.second.place("MS_WORKER", 1)
    network.third.place("MS_WORKER", 1)


def on_three(network: Any) -> None:
    """Each layer on a worker of its own."""
    network.first.place("MS_WORKER", 2)
    network.second.place("MS_WORKER", 0)
    network.third.place("MS_WORKER", 1)


@contextmanager
def splitting_all() -> Iterator[None]:
    """Let weight gradients be computed apart however small they are."""
    before, splitting.least_work = splitting.least_work, lambda target: 0
    try:
        yield
    finally:
        splitting.least_work = before


def num_workers_of(seed: int) -> int:
    """How many workers a scattered placement uses."""
    return 1 if seed == 0 else random.Random(seed * 7 + 1).choice([2, 2, 3, 5])


def some_of(placements: Iterable[int]) -> list[int]:
    """A third of the placements, at least three: others for each test, the same in every run.

    ``make test-all`` sets ``ALL_PLACEMENTS``, and takes all of them.
    """
    every = list(placements)
    num = max(3, len(every) // 3)
    if num >= len(every) or os.environ.get("ALL_PLACEMENTS"):
        return every
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]  # without its phase
    first = zlib.crc32(test.encode())
    return sorted(every[(first + i * len(every) // num) % len(every)] for i in range(num))


def assert_same_wherever_placed(
    make_network: Callable[[], nn.Module],
    batches: Sequence[Any],
    *,
    placements: Iterable[int] = PLACEMENTS,
    loss_fn: Callable[..., Any] | None = rows_against_target,
    captures: Captures | None = None,
    **options: Any,
) -> None:
    """Compare a network with the eager loop under several scattered placements.

    Args:
        make_network: Makes the network.
        batches: Its batches.
        placements: Seeds of the placements, of which some are taken: see ``some_of``.
        loss_fn: Its loss.
        captures: Graphs of it that are there already.
        options: Of ``assert_same_bits``.
    """
    base = captures or Captures()
    chosen = [(seed, num_workers_of(seed)) for seed in some_of(placements)]
    first, *others = scattered(base, chosen)
    assert_same_bits(make_network, batches, beside=others, loss_fn=loss_fn, **{**first, **options})


class KeptByWeakReference:
    """A descriptor that keeps its values itself, by weak references to their objects."""

    def __init__(self) -> None:
        self.values: Any = weakref.WeakKeyDictionary()

    def __get__(self, one: Any, owner: Any) -> Any:
        return self.values[one]

    def __set__(self, one: Any, value: Any) -> None:
        self.values[one] = value
