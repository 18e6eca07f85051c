"""Recovery of a network that begins to read values which the script has changed just before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plain_model import PlainModel
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn
from torch.nn import functional as F

import graphsplit as gs
from graphsplit.recovery.settings import SnapshotSettings

pytestmark = pytest.mark.usefixtures("threads_as_workers")

__all__ = ["threads_as_workers"]
NUM_STEPS, BEGINS, ENDS = 8, 3, 6


class Config:
    """What the network reads; it may get more attributes."""

    def __init__(self) -> None:
        self.rate, self.is_on, self.known = 1.5, False, 1.0


class Seen:
    """What forward leaves of itself, and no step reads: a snapshot need not hold it."""

    def __init__(self, h: torch.Tensor) -> None:
        self.h, self.rows = h, len(h)


class Reading(nn.Module):
    """Reads all attributes of its configuration, or a few of them while it is told to."""

    seen: Seen | None = None

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.config, self.reads = Config(), reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, config = self.first(x), self.config
        self.seen = Seen(h)
        if self.reads == "and sets back":
            h = h * config.known
            config.known = 1.0
        elif self.reads == "all":
            for value in vars(config).values():
                h = h * (0.5 + 0.25 * value)
        elif config.is_on:
            h = h * (config.known if self.reads == "known" else config.new)
        return self.second(h)


def train(make: Any, reads: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    net = Reading(reads)
    net.first.place("MS_WORKER", 0)
    net.second.place("MS_WORKER", 1)
    model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1))
    losses = []
    for step in range(NUM_STEPS):
        if step == BEGINS:
            net.config.is_on, net.config.known, net.config.new = True, 2.0, 0.5
        if step == ENDS:
            net.config.is_on = False
            del net.config.new
        x, y = torch.randn(5, 3), torch.randn(5, 2)
        losses.append(float(model.train_step(x, y)))
    return losses, copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("reads", ["all", "known", "new", "and sets back"])
@pytest.mark.parametrize("every, at", [(9, 22), (9, 35), (2, 35), (1, 40)])
def test_a_worker_that_comes_back_goes_on_with_the_values(reads: str, every: int, at: int) -> None:
    before = torch.default_generator.get_state()
    losses, state = train(PlainModel, reads)
    torch.default_generator.set_state(before)
    cluster = ThreadCluster(
        lambda rank: train(gs.Model, reads), 2, SnapshotSettings(every=every), {1: [at]}
    )
    for found_losses, found in cluster.run():
        assert found_losses == losses
        assert all(torch.equal(found[name], value) for name, value in state.items())
    assert cluster.num_killed == 1
