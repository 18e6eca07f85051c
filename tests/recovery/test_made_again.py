"""Calls that run again make anew what graphsplit keeps with a network: it has their values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_model import PlainModel
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.recovery.settings import SnapshotSettings

assert threads_as_workers
pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:network or loss reads:UserWarning"),
]
BATCHES = list(torch.randn(6, 2, 8, 4, generator=torch.Generator().manual_seed(1)))


class Net(nn.Module):
    def __init__(self, workers: tuple[int, int]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if hasattr(nn.Module, "place"):
            self.first.place("MS_WORKER", workers[0])
            self.second.place("MS_WORKER", workers[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return made


def nothing(*given: Any) -> None:
    """A hook of no effect."""


class Hidden(Net):
    """Has a state that forward assigns anew, and the script sets back."""

    def __init__(self, workers: tuple[int, int]) -> None:
        super().__init__(workers)
        self.register_buffer("h", torch.zeros(4))
        self.register_forward_hook(nothing)  # so that each worker records a graph of its own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x + 0.5 * self.h)
        self.h = made.detach().mean(0)
        return made


class Averaged:
    """Keeps an average of losses, and the latest ones, from a later step on."""

    def __init__(self) -> None:
        self.average: torch.Tensor | None = None
        self.latest: list[torch.Tensor] = []
        self.beta = 0.9

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(output, target)
        now = loss.detach()
        known = self.average
        self.average = now if known is None else self.beta * known + (1 - self.beta) * now
        self.latest = [*self.latest[-1:], now]
        return loss / (self.average + 1) + 0.1 * self.latest[0]


def averages(make: Any, workers: tuple[int, int]) -> Any:
    net, loss_fn = Net(workers), Averaged()
    model = make(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    found = []
    for step, batch in enumerate(BATCHES):
        loss_fn.beta = 0.9 if step < 3 else 0.8
        found.append(model.train_step(*batch).clone())
    return [found, model.state_dict()]


def hidden(make: Any, workers: tuple[int, int]) -> Any:
    net = Hidden(workers)
    model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    found = []
    for step, batch in enumerate(BATCHES):
        if step == 2:
            net.h.zero_()
        if step == 4:
            net.h = torch.ones(4)
        found += [model.train_step(*batch).clone(), model.predict(batch[0])]
    return [found, model.state_dict()]


def frozen_and_swapped(make: Any, workers: tuple[int, int]) -> Any:
    """The script changes the network between calls, while graphsplit keeps tensors with it."""
    net, loss_fn = Hidden(workers), Averaged()
    model = make(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.05))
    found = []
    for step, batch in enumerate(BATCHES):
        if step == 1:
            net.first.requires_grad_(False)
            net.register_buffer("scale", torch.ones(3))
        if step == 3:
            swapped = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            if make is gs.Model:
                swapped.place("MS_WORKER", workers[0])
            net.first = swapped
        found.append(model.train_step(*batch).clone())
    return [found, model.state_dict()]


@pytest.mark.parametrize("every", [2, 50])
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("script", [averages, hidden, frozen_and_swapped])
@pytest.mark.parametrize("workers", [(0, 1), (1, 0)])
def test_what_calls_keep_is_that_of_the_calls_that_ran_again(
    script: Any, workers: tuple[int, int], lost: int, every: int
) -> None:
    def run(make: Any) -> Any:
        torch.manual_seed(0)
        return copy.deepcopy(script(make, workers))

    before = torch.default_generator.get_state()
    expected = run(PlainModel)
    for at in (9, 17, 26):
        torch.default_generator.set_state(before)
        settings = SnapshotSettings(every=every)
        cluster = ThreadCluster(lambda rank: run(gs.Model), 2, settings, {lost: [at]})
        for found in cluster.run():
            assert difference(expected, found) is None
        assert cluster.num_killed == 1
