"""What code kept whole leaves in Python under an own loop, the script finds on every worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loop_helpers import Distribute, assert_same_bits, placed, plain
from recovery_helpers import threads_as_workers
from torch import nn

import graphsplit as gs

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")

Draw = Callable[[], Any]


def of_torch() -> Draw:
    own = torch.Generator().manual_seed(5)
    return lambda: torch.rand(4, generator=own)


def of_python() -> Draw:
    return random.Random(5).random


def of_numpy() -> Draw:
    own = np.random.default_rng(5)
    return lambda: float(own.random())


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor, counts: dict[str, int]) -> torch.Tensor:
        context.counts = counts
        return values * 0.5

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.counts["backward"] += 1
        return gradient * 0.5, None


class Whole(nn.Module):
    def __init__(self, counts: dict[str, int], draw: Draw | None) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.counts, self.draw = counts, draw

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.counts["forward"] += 1
        hidden = Halved.apply(self.inner(values), self.counts)
        return hidden if self.draw is None else hidden + self.draw() * 0.1


@pytest.mark.parametrize("ranks", [(0, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("draws", [None, of_torch, of_python, of_numpy])
def test_counters_and_generators(draws: Callable[[], Draw] | None, ranks: tuple[int, ...]) -> None:
    def loop(distribute: Distribute, _: Any) -> Iterator[Any]:
        counts = {"forward": 0, "backward": 0}
        draw = None if draws is None else draws()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(Whole(counts, draw)), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(placed(net, list(net), ranks).parameters(), lr=0.01)
        net = distribute(net)
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(torch.randn(5, 6)).square().mean()
            yield dict(counts), draw and draw()
            loss.backward()
            yield dict(counts), draw and draw()
            optimizer.step()
        with torch.no_grad():
            yield net(torch.ones(2, 6)).sum().item(), dict(counts), draw and draw()
        yield net.state_dict()

    assert_same_bits(loop, 2)


@pytest.mark.parametrize("draws", [of_torch, of_python, of_numpy])
def test_generators_that_code_of_a_model_draws_from(draws: Callable[[], Draw]) -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        draw = draws()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(Whole({"forward": 0, "backward": 0}, draw)))
        optimizer = torch.optim.SGD(placed(net, list(net), ranks).parameters(), lr=0.01)
        model = None if distribute is plain else gs.Model(net, nn.MSELoss(), optimizer)
        for _ in range(3):
            inputs, targets = torch.randn(5, 6), torch.randn(5, 4)
            if model is None:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(net(inputs), targets)
                loss.backward()
                optimizer.step()
            else:
                loss = model.train_step(inputs, targets)
            yield float(loss.detach()), draw()
        yield net.state_dict() if model is None else model.state_dict()

    assert_same_bits(loop, 2)
