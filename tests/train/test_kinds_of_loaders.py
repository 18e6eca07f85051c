"""Loaders as people have them, alone and on workers: streams, endless ones, structured batches."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from recovery_features.parts import Last, adam, all_of, pairs, plain_net, put
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import graphsplit as gs
from graphsplit.errors import ConfigurationError
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.settings import GO_ON, WAIT_REJOIN
from graphsplit.torch_ext.private import end_processes, has_processes

assert threads_as_workers
NUM_WORKERS = 3
pytestmark = pytest.mark.timeout(100)
on_threads = pytest.mark.usefixtures("threads_as_workers")


class Stream(IterableDataset[Any]):
    """Samples without a length; perhaps without an end."""

    def __init__(self, is_endless: bool = False) -> None:
        self.is_endless = is_endless

    def __iter__(self) -> Iterator[Any]:
        samples = list(pairs())
        return itertools.cycle(samples) if self.is_endless else iter(samples)


def stream() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=8)


def plain(loader: Any, num_epochs: int, num_steps: int | None) -> list[torch.Tensor]:
    net = plain_net(place=False)
    optimizer, loss_fn, losses = adam(net), nn.CrossEntropyLoss(), []
    for _ in range(num_epochs):
        for inputs, target in itertools.islice(loader, num_steps):
            optimizer.zero_grad()
            loss = loss_fn(net(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return losses


class StopAt(gs.callbacks.Callback):
    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        assert context.num_steps is None
        if context.model.position.num_steps == 5:
            context.stop()


def everywhere(script: Callable[[], Any], expected: Any) -> None:
    assert difference(expected, script()) is None
    for found in ThreadCluster(lambda _: script(), NUM_WORKERS).run():
        assert difference(expected, found) is None


def trained(loader: Any, num_epochs: int, *callbacks: Any, **options: Any) -> Any:
    net, last = plain_net(place=True), Last()
    metrics = {"A": gs.metrics.Accuracy()}
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), metrics)
    model.train(num_epochs, loader, [last, *callbacks], **options)
    assert 0.0 <= model.eval(stream())["A"] <= 1.0
    return last.losses


@on_threads
def test_a_stream_without_a_length():
    everywhere(lambda: trained(stream(), 2), plain(stream(), 2, None))


def kept() -> DataLoader[Any]:
    draws = torch.Generator().manual_seed(5)
    return DataLoader(
        pairs(), 8, shuffle=True, generator=draws, num_workers=1, persistent_workers=True
    )


def test_processes_of_a_loader_that_outlive_an_epoch():
    expected = plain(kept(), 3, None)
    assert difference(expected, trained(kept(), 3)) is None


class SaveAt(gs.callbacks.Callback):
    def __init__(self, at: int, path: Path) -> None:
        self._at, self._path = at, path

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        if context.model.position.num_steps == self._at:
            context.model.save(self._path)
            context.stop()


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_processes_that_had_begun_before_a_run_was_saved(at: int, is_given: bool, tmp_path: Path):
    """The first epoch draws for their seed, and no later one: a new process knows of it."""

    def loader() -> DataLoader[Any]:
        draws = torch.Generator().manual_seed(5) if is_given else None
        options: Any = {"num_workers": 1, "persistent_workers": True}
        return DataLoader(pairs(), 8, shuffle=True, generator=draws, **options)

    def run(*callbacks: Any, path: Path | None = None) -> Any:
        net, last = plain_net(place=False), Last()
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
        if path is not None:
            model.load(path)
        model.train(3, loader(), [last, *callbacks])
        return last.losses, torch.get_rng_state()

    whole = run()
    run(SaveAt(at, tmp_path / "save"))
    assert difference(whole, run(path=tmp_path / "save")) is None


@on_threads
@pytest.mark.parametrize(("policy", "at"), [(GO_ON, 40), (GO_ON, 80), (WAIT_REJOIN, 80)])
def test_processes_that_persist_where_a_worker_is_lost(policy: str, at: int):
    loaders: list[DataLoader[Any]] = []

    def script(ranks: list[int]) -> Any:
        torch.manual_seed(0)
        net, last = plain_net(place=False), Last()
        if ranks:
            net.place(ranks)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), microbatches=4)
        data = DataLoader(pairs(), 8, shuffle=True, num_workers=1, persistent_workers=True)
        loaders.append(data)
        model.train(4, data, [last])
        return last.losses, all_of(model, is_end=False)

    expected = script([])
    settings = SnapshotSettings(every=1)
    cluster = ThreadCluster(lambda _: script([0, 1]), 2, settings, {1: [at]}, policy=policy)
    found = cluster.run()
    for one in filter(has_processes, loaders):
        end_processes(one)
    assert cluster.num_killed == 1
    for rank in cluster.seats:
        assert difference(expected, found[rank]) is None


@on_threads
@pytest.mark.parametrize("is_given", [True, False])
def test_processes_that_persist_where_the_script_goes_through_the_loader_itself(is_given: bool):
    """After a train that a newcomer is only given again, and where a worker reads nothing of it."""
    loaders: list[DataLoader[Any]] = []

    def script(place: bool) -> Any:
        net = plain_net(place=place)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
        draws = torch.Generator().manual_seed(5) if is_given else None
        options: Any = {"num_workers": 1, "persistent_workers": True}
        data = DataLoader(pairs(), 8, shuffle=True, generator=draws, **options)
        loaders.append(data)
        model.train(2, data)
        losses = [model.train_step(*batch) for _ in range(2) for batch in data]
        return losses, all_of(model)

    expected = script(place=False)
    settings = SnapshotSettings(every=1)
    cluster = ThreadCluster(lambda _: script(place=True), 3, settings, {1: [90]})
    found = cluster.run()
    for one in filter(has_processes, loaders):
        end_processes(one)
    assert cluster.num_killed == 1
    assert all(difference(expected, one) is None for one in found)


class Breaks(gs.callbacks.Callback):
    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        if context.step == 2:
            raise RuntimeError("broken off")


class BreaksWithin(gs.callbacks.Callback):
    def on_gradients(self, context: gs.callbacks.RunContext) -> None:
        if context.step == 2:
            raise RuntimeError("broken off")


@on_threads
@pytest.mark.parametrize("breaks", [Breaks, BreaksWithin])
def test_processes_of_a_loader_end_with_the_epoch_that_is_broken_off(breaks: Any):
    """Whoever holds the error, and though it lies in a cycle: else each is waited for, for 5 s."""

    kept = []

    def script() -> None:
        net = plain_net(place=True)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
        try:
            model.train(1, DataLoader(list(pairs()), 8, num_workers=2), [breaks()])
        except Exception as error:
            kept.append(error)
            raise

    with pytest.raises(RuntimeError, match="broken off"):
        ThreadCluster(lambda _: script(), NUM_WORKERS, is_recoverable=False).run()
    assert len(kept) == NUM_WORKERS
    assert not multiprocessing.active_children()


@on_threads
def test_an_endless_stream_is_stopped():
    def endless() -> DataLoader[Any]:
        return DataLoader(Stream(is_endless=True), batch_size=8)

    everywhere(lambda: trained(endless(), 1, StopAt()), plain(endless(), 1, 5))


@on_threads
@pytest.mark.parametrize("is_endless", [False, True])
def test_an_epoch_of_so_many_steps(is_endless: bool):
    def endless() -> DataLoader[Any]:
        return DataLoader(Stream(is_endless), batch_size=8)

    everywhere(lambda: trained(endless(), 3, steps=2), plain(endless(), 3, 2))


def test_steps_of_a_wrong_kind():
    with pytest.raises(ConfigurationError, match="steps=0; expected an int of 1 or more"):
        trained(stream(), 1, steps=0)


@dataclass
class Inputs:
    x: torch.Tensor
    scale: float


class Pair(NamedTuple):
    inputs: Any
    target: torch.Tensor


class Scaled(nn.Module):
    """Takes a dataclass."""

    def __init__(self, place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        put(self, "first", "second", "third", place=place)

    def forward(self, inputs: Inputs) -> torch.Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(inputs.x * inputs.scale))))
        made: torch.Tensor = self.third(hidden)
        return made


def structured() -> list[Pair]:
    return [Pair(Inputs(x, 0.5), target) for x, target in DataLoader(pairs(), batch_size=8)]


@on_threads
def test_dataclasses_and_named_tuples():
    net = Scaled(place=False)
    optimizer, expected = adam(net), []
    for inputs, target in structured():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), target)
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())

    def script() -> Any:
        net, last = Scaled(place=True), Last()
        gs.Model(net, nn.CrossEntropyLoss(), adam(net)).train(1, structured(), [last])
        return last.losses

    everywhere(script, expected)
