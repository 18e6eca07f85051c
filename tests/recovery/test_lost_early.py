"""Workers that are lost early: what a loader or a callback had changed by then counts once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recovery_features.changed_parts import sgd
from recovery_features.parts import pairs, plain_net, trained
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import DataLoader, Dataset

import graphsplit as gs
from graphsplit.recovery.settings import SnapshotSettings

assert threads_as_workers
pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:network or loss reads"),
    pytest.mark.timeout(300),
]
NUM_WORKERS = 3


class Changing(gs.callbacks.Callback, Dataset[Any]):
    """Changes parameters, a number that forward reads, or a learning rate: when it is told to."""

    def __init__(self, net: Any, model: gs.Model, what: str, when: str) -> None:
        self.net, self.model, self.what, self.when = net, model, what, when

    def change(self, when: str) -> None:
        if when != self.when:
            return
        if self.what == "parameters":
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.mul_(0.9)
        elif self.what == "dropout":
            self.net[1].p *= 0.9
        else:
            self.model.optimizer.param_groups[0]["lr"] *= 0.9  # type: ignore[union-attr]

    def on_train_begin(self, context: gs.callbacks.RunContext) -> None:
        self.change("train")

    def on_epoch_begin(self, context: gs.callbacks.RunContext) -> None:
        self.change("epoch")

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index % 4 == 0:
            self.change("data")
        return pairs()[index]


@pytest.mark.parametrize(("rank", "at"), [(0, 2), (1, 12), (2, 24), (0, 24), (1, 60)])
@pytest.mark.parametrize("when", ["train", "epoch", "data"])
@pytest.mark.parametrize("what", ["parameters", "dropout", "rate"])
def test_what_was_changed_before_a_loss_counts_once(
    what: str, when: str, rank: int, at: int
) -> None:
    """Before the first snapshot of the job, and in an epoch that callbacks know has begun."""

    def script(*, place: bool = True) -> Any:
        net = plain_net(place=place)
        model = gs.Model(net, nn.CrossEntropyLoss(), sgd(net))
        changing = Changing(net, model, what, when)
        return trained(model, DataLoader(changing, batch_size=4), 2, changing)

    before = torch.default_generator.get_state()
    expected = script(place=False)
    torch.default_generator.set_state(before)
    settings = SnapshotSettings(every=2)
    cluster = ThreadCluster(lambda rank: script(), NUM_WORKERS, settings, {rank: [at]})
    for found in cluster.run():
        assert difference(expected, found) is None
    assert cluster.num_killed == 1
