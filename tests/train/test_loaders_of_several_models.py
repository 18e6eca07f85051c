"""One loader for Models whose batches are consumed on other workers: the plain loop's batches."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from alone_helpers import assert_as_alone
from recovery_helpers import threads_as_workers
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import graphsplit as gs

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(12) % 3
DATA = TensorDataset(INPUTS, TARGETS)


class Counting(Dataset[Any]):
    """Every sample depends on how many were asked for before."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return INPUTS[index] + self.count * 0.01, TARGETS[index]


class Drawing(Dataset[Any]):
    """Every sample has noise from somewhere."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index] + self.draw(), TARGETS[index]


class Shuffling(Sampler[int]):
    """An order from a generator of Python's, another one in every epoch."""

    def __init__(self) -> None:
        self.random, self.epoch = random.Random(3), 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        order = list(range(12))
        self.random.shuffle(order)
        self.epoch += 1
        return iter(order)


class Stream(IterableDataset[Any]):
    """Samples that come one after the other; remembers them all."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(12).tolist():
            self.seen.append(index)
            yield INPUTS[index] + len(self.seen), TARGETS[index]


def counted_by_collate() -> Any:
    count = itertools.count()

    def collate(items: list[Any]) -> Any:
        inputs, targets = torch.utils.data.default_collate(items)
        return inputs + next(count), targets

    return DataLoader(DATA, 4, collate_fn=collate)


def expanded_batches() -> list[Any]:
    rows = (INPUTS[:1].expand(4, 4), INPUTS[:4].t(), INPUTS[::3])
    return [(one, TARGETS[:4]) for one in rows]


LOADERS: dict[str, Callable[[], Any]] = {
    "a generator": lambda: DataLoader(DATA, 4, True, generator=torch.Generator().manual_seed(5)),
    "the default generator": lambda: DataLoader(DATA, 4, shuffle=True),
    "a sampler": lambda: DataLoader(DATA, 4, sampler=Shuffling()),
    "a counter": lambda: DataLoader(Counting(), 4, shuffle=True),
    "a closure": counted_by_collate,
    "a stream": lambda: DataLoader(Stream(), 4),
    "an iterator": lambda: iter([(INPUTS[i : i + 4], TARGETS[i : i + 4]) for i in (0, 4, 8)]),
    "nothing": expanded_batches,
    "Python's generator": lambda: DataLoader(Drawing(random.random), 4),
    "NumPy's generator": lambda: DataLoader(Drawing(np.random.randn), 4),
}


def model(place: bool, rank: int, *, microbatches: int) -> gs.Model:
    """All of it on one worker, which then is the only one to consume a batch."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    if place:
        net.place("MS_WORKER", rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    accuracy = {"Loss": gs.metrics.Loss()}
    return gs.Model(net, nn.CrossEntropyLoss(), optimizer, accuracy, microbatches=microbatches)


class Losses(gs.callbacks.Callback):
    """Keeps them, and draws as a script does."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        assert context.loss is not None
        self.seen += [context.loss.clone(), random.random(), np.random.rand(), torch.rand(())]


def script(place: bool, loader: Any, microbatches: int) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    losses, found = Losses(), []
    held = expanded_batches() if isinstance(loader, Iterator) else loader  # it is used up by then
    for rank in (0, 1, 0):
        one = model(place, rank, microbatches=microbatches)
        one.train(2, loader, callbacks=[losses])
        found += [one.eval(held), random.random(), float(np.random.randn()), torch.rand(())]
        one.train(1, loader, callbacks=[losses])
        found.append(one.state_dict())
    return copy.deepcopy([losses.seen, found])


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", LOADERS)
def test_what_reading_changes_is_changed_for_all(name: str, microbatches: int) -> None:
    def run(place: bool) -> Any:
        return script(place, LOADERS[name](), microbatches)

    assert_as_alone(lambda: run(False), lambda: run(True))


def test_data_behind_two_loaders_is_one() -> None:
    def run(place: bool) -> Any:
        torch.manual_seed(0)
        data, losses = Counting(), Losses()
        for rank in (0, 1, 2):
            batches = DataLoader(torch.utils.data.Subset(data, range(4 * rank, 12)), 4)
            model(place, rank, microbatches=1).train(1, batches, callbacks=[losses])
        return losses.seen[::4]

    assert_as_alone(lambda: run(False), lambda: run(True), workers=3)


@pytest.mark.parametrize(("trained", "evaluated"), [((0, 0), (1, 1)), ((0, 1), (1, 1))])
def test_data_that_a_callback_reads_meanwhile_is_the_same(trained, evaluated) -> None:
    class Evaluates(Losses):
        def __init__(self, other: gs.Model, batches: Any) -> None:
            super().__init__()
            self.other, self.batches = other, batches

        def on_step_end(self, context: gs.callbacks.RunContext) -> None:
            super().on_step_end(context)
            self.seen.append(self.other.eval(self.batches))

    def run(place: bool) -> Any:
        torch.manual_seed(0)
        data, models = Counting(), []
        for ranks in (trained, evaluated):
            one = model(place, 0, microbatches=1)
            for layer, rank in zip((one.network[0], one.network[2]), ranks, strict=True):
                if place:
                    layer.place("MS_WORKER", rank)
            models.append(one)
        parts = [torch.utils.data.Subset(data, range(8)), torch.utils.data.Subset(data, range(12))]
        first, second = (DataLoader(part, 4) for part in parts)
        losses = Evaluates(models[1], second)
        models[0].train(2, first, callbacks=[losses])
        models[1].train(1, first, callbacks=[last := Losses()])
        return copy.deepcopy([losses.seen[::4], losses.seen[4::5], last.seen[::4]])

    assert_as_alone(lambda: run(False), lambda: run(True))
