"""Workers that are lost early: what a loader or a callback had changed by then counts once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
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
]
NUM_WORKERS = 3


def compare(script: Callable[..., Any], kills: dict[int, list[int]]) -> None:
    """Every worker ends with what the plain loop has, though some are killed."""
    before, num_kills = torch.default_generator.get_state(), sum(map(len, kills.values()))
    expected = script(place=False)
    torch.default_generator.set_state(before)
    settings = SnapshotSettings(every=2)
    cluster = ThreadCluster(lambda rank: script(place=True), NUM_WORKERS, settings, kills)
    for found in cluster.run():
        assert difference(expected, found) is None
    assert cluster.num_killed == num_kills


class Slotted:
    __slots__ = ("rates",)

    def __init__(self) -> None:
        self.rates = [1.0, 2.0]


class Settings:
    """An object of the user's that leads to others."""

    def __init__(self) -> None:
        self.scale, self.inner, self.extra = 1.0, Slotted(), {"shift": (0.5, 1)}


class Scaled(nn.Module):
    """Scales what its network computes by what objects, containers and a closure hold."""

    def __init__(self, *, place: bool) -> None:
        super().__init__()
        self.net, self.entries, self.settings = plain_net(place=place), {"scale": 1.0}, Settings()
        in_closure = 1.0

        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * in_closure

        def change() -> None:
            nonlocal in_closure
            in_closure *= 0.9

        self.scaled, self.change = scaled, change

    def forward(self, x: torch.Tensor) -> Any:
        settings = self.settings
        inner, shift = settings.inner.rates, settings.extra["shift"][0]
        x = self.scaled(self.net(x) * self.entries["scale"])
        return (x * settings.scale + shift) * inner[0] * inner[-1]


def change(net: Any, optimizer: Any, what: str) -> None:
    if what == "parameters":
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.9)
    elif what == "dropout":
        net[1].p *= 0.9
    elif what == "entry":
        net.entries["scale"] *= 0.9
    elif what == "objects":
        net.settings.scale *= 0.9
        net.settings.inner.rates.append(net.settings.inner.rates[-1] * 0.9)
        net.settings.extra["shift"] = (net.settings.extra["shift"][0] * 0.9, 1)
    elif what == "others":
        net.settings.inner.rates = [rate * 0.9 for rate in net.settings.inner.rates]
        net.change()
    else:
        optimizer.param_groups[0]["lr"] *= 0.9


class Changing(gs.callbacks.Callback, Dataset[Any]):
    """Changes parameters, a number that forward reads, or a learning rate: when it is told to."""

    def __init__(self, net: Any, model: gs.Model, what: str, when: str) -> None:
        self.net, self.model, self.what, self.when = net, model, what, when

    def change(self, when: str) -> None:
        if when == self.when:
            change(self.net, self.model.optimizer, self.what)

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
@pytest.mark.parametrize("what", ["parameters", "dropout", "rate", "entry", "objects", "others"])
def test_what_was_changed_before_a_loss_counts_once(
    what: str, when: str, rank: int, at: int
) -> None:
    """Before the first snapshot of the job, and in an epoch that callbacks know has begun."""

    def script(*, place: bool) -> Any:
        is_plain = what in ("parameters", "dropout", "rate")
        net = plain_net(place=place) if is_plain else Scaled(place=place)
        model = gs.Model(net, nn.CrossEntropyLoss(), sgd(net))
        changing = Changing(net, model, what, when)
        return trained(model, DataLoader(changing, batch_size=4), 2, changing)

    compare(script, {rank: [at]})


@pytest.mark.parametrize(("rank", "at"), [(0, 2), (1, 12)])
@pytest.mark.parametrize("when", ["train", "data"])
def test_what_was_changed_in_a_deferred_network_counts_once(when: str, rank: int, at: int) -> None:
    def script(*, place: bool) -> Any:
        with gs.deferred_init():
            net = plain_net(place=place)
        model = gs.Model(net, nn.CrossEntropyLoss(), sgd(net))
        changing = Changing(net, model, "parameters", when)
        return trained(model, DataLoader(changing, batch_size=4), 2, changing)

    compare(script, {rank: [at]})


@pytest.mark.parametrize("when", ["train", "data"])
def test_workers_that_are_lost_again_before_the_first_snapshot_change_nothing(when: str) -> None:
    def script(*, place: bool) -> Any:
        net = plain_net(place=place)
        model = gs.Model(net, nn.CrossEntropyLoss(), sgd(net))
        changing = Changing(net, model, "parameters", when)
        return trained(model, DataLoader(changing, batch_size=4), 2, changing)

    compare(script, {1: [8, 5], 0: [12]})


class Plain:
    """What graphsplit gives, without it."""

    @staticmethod
    def distribute(net: Any) -> Any:
        return net

    @staticmethod
    def loop(source: Any, keep: Any = ()) -> Iterator[Any]:
        return iter(source)


class ChangingData(Dataset[Any]):
    """Changes something whenever the first of a batch is asked for."""

    def __init__(self, net: Any, optimizer: Any, what: str, *, changes: bool) -> None:
        self.net, self.optimizer, self.what, self.changes = net, optimizer, what, changes

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index % 4 == 0 and self.changes:
            change(self.net, self.optimizer, self.what)
        return pairs()[index]


def own_loop(gs: Any, what: str, when: str, *, place: bool) -> Any:
    net: Any = plain_net(place=place)
    optimizer, criterion = sgd(net), nn.CrossEntropyLoss()
    net = gs.distribute(net)
    data = DataLoader(ChangingData(net, optimizer, what, changes=when == "data"), batch_size=4)
    losses: list[float] = []
    for _ in gs.loop(range(2), keep=[losses, optimizer]):
        if when == "epoch":
            change(net, optimizer, what)
        for x, y in gs.loop(data):
            if when == "batch":
                change(net, optimizer, what)
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, net.state_dict(), copy.deepcopy(optimizer.state_dict()), net[1].p


@pytest.mark.parametrize(("rank", "at"), [(0, 2), (1, 12), (2, 24), (1, 40)])
@pytest.mark.parametrize("when", ["epoch", "data", "batch"])
@pytest.mark.parametrize("what", ["parameters", "dropout", "rate"])
def test_what_an_own_loop_changed_before_a_loss_counts_once(
    what: str, when: str, rank: int, at: int
) -> None:
    """Before anything was recorded, and by the loader when it was asked for a snapshot's batch."""

    def script(*, place: bool) -> Any:
        return own_loop(gs if place else Plain, what, when, place=place)

    compare(script, {rank: [at]})


class Once(gs.callbacks.Callback):
    """Changes something once, in the first epoch."""

    def __init__(self, net: Any, what: str) -> None:
        self.net, self.what = net, what

    def on_epoch_begin(self, context: gs.callbacks.RunContext) -> None:
        if context.epoch == 1 and context.step == 0:
            change(self.net, None, self.what)


@pytest.mark.parametrize(("rank", "at"), [(0, 30), (2, 48), (1, 75)])
@pytest.mark.parametrize("what", ["dropout", "objects", "others"])
def test_a_number_that_was_set_before_anything_was_recorded_is_known(
    what: str, rank: int, at: int
) -> None:
    """The worker that comes back does not set it: training goes on in a later step."""

    def script(*, place: bool) -> Any:
        net = plain_net(place=place) if what == "dropout" else Scaled(place=place)
        return trained(gs.Model(net, nn.CrossEntropyLoss(), sgd(net)), None, 3, Once(net, what))

    compare(script, {rank: [at]})
