"""Values of few features, in views: they begin in memory where they do in the plain loop.

In small products MKL adds up otherwise where an operand begins elsewhere between two multiples of
64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import DataLoader, Dataset

import graphsplit as gs

assert threads_as_workers
pytestmark = [pytest.mark.usefixtures("threads_as_workers"), pytest.mark.timeout(100)]
ROWS = 10


class Counting(Dataset[Any]):
    """Every sample depends on how many were asked for before."""

    def __init__(self, width: int) -> None:
        draws = torch.Generator().manual_seed(1)
        self.x = torch.randn(2 * ROWS, width, generator=draws)
        self.y = torch.randn(2 * ROWS, 8, generator=draws)
        self.count = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return self.x[index] * (1 + self.count * 0.01), self.y[index]


def trained(width: int, workers: int, parts: int, train: Callable[..., None]) -> Any:
    """Two networks over one loader, on different workers, one after the other."""
    torch.manual_seed(0)
    loader, found = DataLoader(Counting(width), ROWS), []
    for worker in range(2):
        net = nn.Sequential(nn.Linear(width, 8))
        if workers > 1:
            net.place("MS_WORKER", worker)
        train(net, loader, parts)
        found.append(dict(net.state_dict()) if workers == 1 else net)
    return found


def by_hand(net: nn.Module, loader: Any, parts: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            for (x, y), weight in gs.split_microbatches(batch, parts):
                (nn.functional.mse_loss(net(x), y) * weight).backward()
            optimizer.step()


def script(width: int, parts: int) -> Any:
    states = []

    def by_model(net: nn.Module, loader: Any, parts: int) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = gs.Model(net, nn.MSELoss(), optimizer, microbatches=parts)
        model.train(3, loader)
        states.append(dict(model.state_dict()))

    trained(width, 2, parts, by_model)
    return states


@pytest.mark.parametrize("width", [3, 5, 7])
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_batches_that_are_sent_have_the_bits_of_the_loop(width: int, parts: int) -> None:
    expected = trained(width, 1, parts, by_hand)
    for found in ThreadCluster(lambda _: script(width, parts), 2, is_recoverable=False).run():
        assert difference(expected, found) is None
