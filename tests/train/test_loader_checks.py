"""Loaders of data parallelism are refused, loaders that differ are errors, epochs are numbered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recovery_features.parts import Last, adam, all_of, pairs, plain_net
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)  # fmt: skip

import graphsplit as gs
from graphsplit.errors import ConfigurationError, JobFailedError, LoaderMismatchError

assert threads_as_workers
pytestmark = [pytest.mark.usefixtures("threads_as_workers"), pytest.mark.timeout(200)]
DATA = pairs()


def model(*, place: bool = True) -> gs.Model:
    net = plain_net(place=place)
    return gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})


def alone(place: bool = True) -> gs.Model:
    """All of it on worker 1, the only one that reads."""
    net = plain_net(place=False)
    return gs.Model(net.place("MS_WORKER", 1) if place else net, nn.CrossEntropyLoss(), adam(net))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


def of(**attributes: Any) -> Any:
    data = Stream()
    vars(data).update(attributes)
    return data


def half() -> DistributedSampler[Any]:
    return DistributedSampler(DATA, 2, 0)


SHARES: dict[str, Callable[[], Any]] = {
    "a sampler": lambda: DataLoader(DATA, 8, sampler=half()),
    "a batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(half(), 8, False)),
    "a data set": lambda: DataLoader(of(num_replicas=2), 8),
    "a stream by rank": lambda: DataLoader(of(world_size=3, rank=1), 8),
    "inside a data set": lambda: DataLoader(of(_distributed=SimpleNamespace(world_size=4, rank=0))),
    "accelerate's": lambda: DataLoader(of(num_processes=2, process_index=0), 8),
    "around a loader": lambda: of(loader=DataLoader(DATA, 8, sampler=half())),
}


@pytest.mark.parametrize("kind", SHARES)
def test_a_share_of_the_data_is_refused_with_the_fix(kind: str):
    uses: list[Callable[[gs.Model, Any], Any]] = [
        lambda m, loader: m.train(1, loader),
        lambda m, loader: m.eval(loader),
    ]
    if kind != "around a loader":
        uses.append(lambda m, loader: m.predict(loader))
    for use in uses:
        with pytest.raises(ConfigurationError, match=r"1/\d of the data(.|\n)*Fix: pass the whole"):
            use(model(place=False), SHARES[kind]())


def test_a_share_is_refused_on_workers_of_which_one_reads():
    def script(rank: int) -> None:
        sampler = DistributedSampler(DATA, 3, rank)
        alone().train(1, DataLoader(DATA, 4, sampler=sampler))

    with pytest.raises(ConfigurationError, match="DistributedSampler of num_replicas=3"):
        ThreadCluster(script, 3).run()


def test_what_gives_all_the_data_is_no_share():
    sampler: Any = DistributedSampler(DATA, 1, 0)
    model(place=False).train(1, DataLoader(DATA, 8, sampler=sampler))
    model(place=False).train(1, [(torch.zeros(2, 4), torch.tensor([0, 1]))])


DIFFERENT: dict[str, tuple[str, Callable[[int], Any]]] = {
    "length": ("length: 3\n  worker 1: length: 2", lambda r: DataLoader(pairs(24 - 8 * r), 8)),
    "batch size": ("batch size: 8", lambda r: DataLoader(DATA, 8 + r)),
    "drop_last": ("drop_last: False", lambda r: DataLoader(DATA, 8, drop_last=r > 0)),
    "shuffle": ("SequentialSampler", lambda r: DataLoader(DATA, 8, shuffle=r > 0)),
    "a generator": (
        "state of its generator",
        lambda r: DataLoader(DATA, 8, True, generator=torch.Generator().manual_seed(r)),
    ),
    "a part by rank": (
        "indices of its dataset",
        lambda r: DataLoader(Subset(DATA, range(r, 24, 3)), 4),
    ),
    "indices by rank": (
        "indices of its sampler",
        lambda r: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(r, 24, 3))),
    ),
    "rows by rank": (
        "row of its dataset",
        lambda r: DataLoader(TensorDataset(*(t[r::3] for t in DATA.tensors)), 4),
    ),
}


@pytest.mark.parametrize(("more", "text"), [("epochs", "2 epochs"), ("steps", "of 3 steps")])
def test_another_number_of_epochs_or_steps_is_an_error_before_a_step(more: str, text: str):
    def script(rank: int) -> None:
        is_more = rank == 1
        epochs = 2 if is_more and more == "epochs" else 1
        alone().train(epochs, DataLoader(DATA, 8), steps=3 if is_more and more == "steps" else 2)

    with pytest.raises((LoaderMismatchError, JobFailedError)) as caught:
        ThreadCluster(script, 3).run()
    assert "the arguments of workers 0 and 1 differ at the start of train" in str(caught.value)
    assert re.search(rf"worker 1: .*{text}", str(caught.value))


@pytest.mark.parametrize("kind", DIFFERENT)
def test_loaders_that_differ_are_an_error_before_a_step(kind: str):
    text, loader = DIFFERENT[kind]
    steps: list[int] = []

    def script(rank: int) -> None:
        losses = Last()
        try:
            alone().train(1, loader(min(rank, 1)), [losses])
        finally:
            steps.append(len(losses.losses))

    with pytest.raises((LoaderMismatchError, JobFailedError)) as caught:
        ThreadCluster(script, 3).run()
    assert "the loaders of workers 0 and 1 differ at the start of train" in str(caught.value)
    assert text in str(caught.value)
    assert steps == [0, 0, 0]


class Numbered(BatchSampler):
    """Batches in an order that the epoch's number decides; told to all that is there."""

    def __init__(self, data: Any, *, shows: bool = True) -> None:
        super().__init__(DistributedSampler(data, 1, 0, seed=3), 8, False)
        self.shows, self.told = shows, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)
        if self.shows:
            self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        return iter(batches if getattr(self, "epoch", 1) == 1 else batches[::-1])


class NumberedData(TensorDataset):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: Any) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs + getattr(self, "epoch", 0), target


def numbered(*, shows: bool = True, kind: type[DataLoader[Any]] = DataLoader) -> DataLoader[Any]:
    data = NumberedData(*DATA.tensors)
    return kind(data, batch_sampler=Numbered(data, shows=shows))


def plain(numbers: list[int]) -> list[torch.Tensor]:
    """The loop that does not know graphsplit."""
    net = plain_net(place=False)
    optimizer, loss_fn, loader, losses = adam(net), nn.CrossEntropyLoss(), numbered(), []
    net.train()
    for number in numbers:
        for part in (loader.batch_sampler, loader.batch_sampler.sampler, loader.dataset):
            part.set_epoch(number)  # type: ignore[union-attr]
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = loss_fn(net(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return losses


class SetsItself(gs.callbacks.Callback):
    """Numbers from 1, before an epoch or after the one before."""

    def __init__(self, loader: Any, when: str) -> None:
        self.loader, self.when = loader, when

    def _set(self, when: str, number: int) -> None:
        if when == self.when:
            set_epoch(self.loader, number)

    def on_epoch_begin(self, context: gs.callbacks.RunContext) -> None:
        self._set("before", context.epoch)

    def on_epoch_end(self, context: gs.callbacks.RunContext) -> None:
        self._set("after", context.epoch + 4)


def set_epoch(loader: Any, number: int) -> None:
    for part in (loader.batch_sampler, loader.batch_sampler.sampler, loader.dataset):
        part.set_epoch(number)


def in_one_call(losses: Last, loader: Any, of: gs.Model) -> None:
    of.train(3, loader, [losses])


def in_two_calls(losses: Last, loader: Any, of: gs.Model) -> None:
    of.train(2, loader, [losses])
    of.train(1, loader, [losses])


def set_by_the_script(losses: Last, loader: Any, of: gs.Model) -> None:
    for number in (5, 1, 9):
        set_epoch(loader, number)
        of.train(1, loader, [losses])


def set_by_the_script_for_several(losses: Last, loader: Any, of: gs.Model) -> None:
    set_epoch(loader, 5)
    of.train(3, loader, [losses])


def set_by_a_callback(losses: Last, loader: Any, of: gs.Model) -> None:
    of.train(3, loader, [losses, SetsItself(loader, "before")])


def set_by_a_callback_after(losses: Last, loader: Any, of: gs.Model) -> None:
    of.train(3, loader, [losses, SetsItself(loader, "after")])


NUMBERS = {
    in_one_call: [0, 1, 2],
    in_two_calls: [0, 1, 2],
    set_by_the_script: [5, 1, 9],
    set_by_the_script_for_several: [5, 6, 7],
    set_by_a_callback: [1, 2, 3],
    set_by_a_callback_after: [0, 5, 6],
}


@pytest.mark.parametrize("way", NUMBERS)
def test_every_part_of_a_loader_is_told_the_epoch(way: Callable[..., None]):
    def script(place: bool) -> Any:
        losses, one = Last(), model(place=place)
        way(losses, numbered(), one)
        return losses.losses, all_of(one)

    found, left = script(place=False)
    assert difference(plain(NUMBERS[way]), found) is None
    for of_worker in ThreadCluster(lambda _: script(place=True), 3).run():
        assert difference((found, left), of_worker) is None


def test_a_part_that_does_not_show_its_number_is_told_it():
    loader = numbered(shows=False)
    one = model(place=False)
    one.train(2, loader)
    one.train(1, loader)
    assert loader.batch_sampler.told == [0, 1, 2]  # type: ignore[union-attr]


class Stops(Exception):
    pass


class SavesAndStops(gs.callbacks.Callback):
    def __init__(self, folder: Path, epoch: int, step: int | None) -> None:
        self.folder, self.at = folder, (epoch, step)

    def _stop(self, context: gs.callbacks.RunContext, at: tuple[int, int | None]) -> None:
        if at == self.at:
            context.model.save(self.folder)
            raise Stops

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        self._stop(context, (context.epoch, context.step))

    def on_epoch_end(self, context: gs.callbacks.RunContext) -> None:
        self._stop(context, (context.epoch, None))


class Remembers(DataLoader[Any]):
    """A loader with a state of its own."""

    done, wanted = 0, 0

    def __iter__(self) -> Any:
        skipped, self.wanted = self.wanted, 0
        return self._batches(super().__iter__(), skipped)

    def _batches(self, found: Iterator[Any], skipped: int) -> Iterator[Any]:
        for self.done, batch in enumerate(found, 1):
            if self.done > skipped:
                yield batch
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.wanted = state["done"]


@pytest.mark.parametrize(("epoch", "step"), [(2, 1), (2, 3), (2, None), (1, None)])
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("kind", [DataLoader, Remembers])
def test_a_run_that_goes_on_counts_on(
    tmp_path: Path, epoch: int, step: int | None, first: int, kind: type[DataLoader[Any]]
):
    losses, loader, one = Last(), numbered(kind=kind), model(place=False)
    if first:
        set_epoch(loader, first)
    with pytest.raises(Stops):
        one.train(4, loader, [losses, SavesAndStops(tmp_path / "save", epoch, step)])
    again = model(place=False)
    again.load(tmp_path / "save")
    again.train(4, numbered(kind=kind), [losses])
    assert difference(plain([first, first + 1, first + 2, first + 3]), losses.losses) is None
