"""Recovery of a network that begins to read a tensor in an attribute which it only wrote before."""

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


class Reading(nn.Module):
    """Writes the mean of its hidden values to an attribute, and adds it while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.reads = False
        self.seen = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.reads:
            h = h + self.seen
        self.seen = h.detach().mean(0)
        return self.second(h)


def train(make: Any, *, is_held: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    net = Reading()
    net.first.place("MS_WORKER", 0)
    net.second.place("MS_WORKER", 1)
    model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1))
    losses, held = [], []
    for step in range(NUM_STEPS):
        net.reads = BEGINS <= step < ENDS
        x, y = torch.randn(5, 3), torch.randn(5, 2)
        losses.append(float(model.train_step(x, y)))
        if is_held:
            held.append(net.seen)
    return losses, copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("at", [5, 8, 14, 22, 35])
def test_a_worker_that_comes_back_goes_on_with_the_attribute(at: int, is_held: bool) -> None:
    before = torch.default_generator.get_state()
    losses, state = train(PlainModel, is_held=is_held)
    torch.default_generator.set_state(before)
    cluster = ThreadCluster(
        lambda rank: train(gs.Model, is_held=is_held), 2, SnapshotSettings(every=2), {1: [at]}
    )
    for found_losses, found in cluster.run():
        assert found_losses == losses
        assert all(torch.equal(found[name], value) for name, value in state.items())
    assert cluster.num_killed == 1
