"""Networks that are built deferred: what `gs.Model` fills, and workers that are lost early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recovery_features.changed_parts import sgd
from recovery_features.parts import put, trained
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import graphsplit as gs
from graphsplit.deferred.construction import is_deferred
from graphsplit.recovery.settings import SnapshotSettings

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
NUM_WORKERS = 3


def deferred(*, place: bool) -> nn.Module:
    torch.manual_seed(0)
    with gs.deferred_init():
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return put(net, "0", "1", "3", place=place)


class Doubling(Dataset[Any]):
    """Doubles parameters, and the rate, whenever it is asked for its first row."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer
        rows = torch.Generator().manual_seed(1)
        self.rows = TensorDataset(
            torch.randn(16, 4, generator=rows), torch.randint(0, 3, (16,), generator=rows)
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            self.optimizer.param_groups[0]["lr"] *= 2
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.mul_(2)
        return self.rows[index]


def script(*, place: bool) -> Any:
    net = deferred(place=place)
    optimizer = sgd(net)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer)
    return trained(model, DataLoader(Doubling(net, optimizer), batch_size=4), 1)


@pytest.mark.parametrize(("rank", "at"), [(0, 2), (1, 12), (2, 24)])
def test_what_was_changed_before_a_loss_counts_once(rank: int, at: int) -> None:
    expected = script(place=False)
    settings = SnapshotSettings(every=2)
    cluster = ThreadCluster(lambda _: script(place=True), NUM_WORKERS, settings, {rank: [at]})
    for found in cluster.run():
        assert difference(expected, found) is None
    assert cluster.num_killed == 1


def test_a_model_fills_nothing() -> None:
    def run(rank: int) -> list[bool]:
        net = deferred(place=True)
        model = gs.Model(net, nn.CrossEntropyLoss(), sgd(net))
        found = [is_deferred(net)]
        model.train_step(torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))
        return [*found, is_deferred(net)]

    for found in ThreadCluster(run, NUM_WORKERS, is_recoverable=False).run():
        assert found == [True, False]
