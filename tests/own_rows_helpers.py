"""Training by replicas that read their own rows, and the loop it is compared with."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recovery_features.parts import Last, adam
from recovery_helpers import ThreadCluster
from torch import nn
from torch.utils.data import DataLoader, Dataset

import graphsplit as gs
from graphsplit.feeding import own_rows

NUM_SAMPLES, SIZE, PARTS, EPOCHS = 45, 16, 4, 3


class Counted(Dataset[Any]):
    """Counts what is read where Python does not see it."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        draws = torch.Generator().manual_seed(1)
        self.x = torch.randn(num_samples, 4, generator=draws)
        self.y = torch.arange(num_samples) % 3
        self.read: Any = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        self.read.put(index)
        return self.x[index] * 2, self.y[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU()
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.body(x))
        return made


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def loader_of(data: Any, **options: Any) -> DataLoader[Any]:
    draws = torch.Generator().manual_seed(3)
    return DataLoader(data, **{"batch_size": SIZE, "shuffle": True, "generator": draws, **options})


def plain(loader: Any, epochs: int = EPOCHS, make: Callable[[], nn.Module] = made) -> Any:
    """The printed loop over microbatches; its losses and parameters."""
    net = make()
    optimizer, loss_fn, losses = adam(net), nn.CrossEntropyLoss(), []
    seed = torch.initial_seed()
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            total: Any = 0
            before = torch.get_rng_state()
            for number, ((x, y), weight) in enumerate(gs.split_microbatches(batch, PARTS)):
                torch.set_rng_state(gs.microbatch_rng_state(seed, len(losses), number))
                loss = loss_fn(net(x), y)
                (loss * weight).backward()
                total = total + loss.detach() * weight
            torch.set_rng_state(before)
            optimizer.step()
            losses.append(total)
    return losses, dict(net.state_dict())


def whole(net: Net, workers: int) -> None:
    net.place("MS_WORKER", list(range(workers)))


def with_head(net: Net, workers: int) -> None:
    """The head needs all targets."""
    net.body.place("MS_WORKER", list(range(1, workers)))
    net.head.place("MS_WORKER", 0)


def trained(
    data: Any, workers: int, place: Any = whole, epochs: int = EPOCHS, **options: Any
) -> Any:
    net = made()
    place(net, workers)
    model = gs.Model(
        *(net, nn.CrossEntropyLoss(), adam(net)), microbatches=PARTS, **options.pop("model", {})
    )
    last = Last()
    model.train(epochs, loader_of(data, **options), [last])
    return last.losses, dict(model.state_dict())


def on(
    workers: int, make: Callable[[], Any], place: Any = whole, **options: Any
) -> tuple[list[Any], list[Any]]:
    """What each worker finds, and its data set."""
    data: list[Any] = [None] * workers

    def script(rank: int) -> Any:
        data[rank] = make()
        return trained(data[rank], workers, place, **options)

    return ThreadCluster(script, workers, is_recoverable=False).run(), data


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(own_rows, "say", lambda line, event: lines.append(line))
    return lines
