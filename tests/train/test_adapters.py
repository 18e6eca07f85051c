"""Low-rank adapters that ``train`` and ``eval`` merge into the weight, as loralib has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone_helpers import assert_as_alone
from plain_model import PlainModel
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.errors import OwnershipError

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
INPUTS = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(2))
Change = Callable[[Any], object]


class Adapted(nn.Linear):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))
        self.register_buffer("mean", torch.zeros(4))
        self.is_merged = False

    def delta(self) -> torch.Tensor:
        made: torch.Tensor = (self.b @ self.a).transpose(0, 1) * 0.5
        return made.transpose(0, 1)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode and self.is_merged:
            self.weight.data -= self.delta()
        elif not mode and not self.is_merged:
            self.weight.data += self.delta()
        self.is_merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x) + self.mean
        return made if self.is_merged else made + (x @ self.a.t() @ self.b.t()) * 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Adapted()
        if hasattr(nn.Module, "place"):
            self.first.place("MS_WORKER", 0)
            self.second.place("MS_WORKER", 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return made


def merged(net: Any) -> None:
    net.eval()
    net.train()


def in_parts(net: Any) -> None:
    layer = net.second
    layer.weight.data[0] += (layer.a * layer.b.t())[0]
    layer.weight.detach().mul_(0.9).add_(layer.b @ layer.a, alpha=0.1)


def run(make: Any, change: Change, microbatches: int) -> Any:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = make(net, F.mse_loss, optimizer, microbatches=microbatches)
    found: list[Any] = []
    for x, target in zip(INPUTS, TARGETS, strict=True):
        found += [model.train_step(x, target).clone(), model.predict(x)]
        change(net)
    return copy.deepcopy([found, model.state_dict(), net.second.is_merged])


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("change", [merged, in_parts])
def test_what_is_merged_is_merged_where_the_weight_lives(change: Change, microbatches: int) -> None:
    assert_as_alone(
        lambda: run(PlainModel, change, microbatches), lambda: run(gs.Model, change, microbatches)
    )


def test_a_buffer_that_would_get_a_history_on_its_worker_alone_is_refused() -> None:
    def change(net: Any) -> None:
        net.second.mean.add_(net.second.a[0] * 2)

    with pytest.raises(
        OwnershipError, match=r"second\.a' lives.*a write with gradients switched on"
    ):
        ThreadCluster(lambda rank: run(gs.Model, change, 1), 2, is_recoverable=False).run()
