"""A data set changes the parts of a network while workers train it: it prunes, copies, swaps."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import changing_data
import pytest
import torch
import torch.nn.functional as F
from alone_helpers import assert_as_alone
from changing_data import Changing
from plain_model import PlainModel
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.prune import l1_unstructured
from torch.utils.data import DataLoader

import graphsplit as gs
from graphsplit.errors import ConfigurationError

assert threads_as_workers
pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:network or loss reads:UserWarning"),
]
NUM_WORKERS = 3
Change = Callable[[Any, int], object]


class Net(changing_data.Net):
    def __init__(self) -> None:
        super().__init__()
        self.average: Any = None


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def prunes(net: Net, num_read: int) -> None:
    """In the second epoch more than in the first; at random, too."""
    if num_read in (5, 17):
        for layer in (net.a, net.b, net.c):
            prune.l1_unstructured(layer, "weight", amount=0.01 * num_read)
    if num_read == 9:
        prune.random_unstructured(net.b, "bias", amount=0.5)
    if num_read == 21:
        prune.remove(net.a, "weight")


def prunes_from_the_first_on(net: Net, num_read: int) -> None:
    if num_read % 4 == 1:
        l1_unstructured(net.b, "weight", amount=0.1)


def parametrizes(net: Net, num_read: int) -> None:
    if num_read == 13:
        parametrize.register_parametrization(net.b, "weight", Symmetric())


def copies(net: Net, num_read: int) -> None:
    if num_read == 7:
        net.average = copy.deepcopy([net.a, net.b, net.c])
    if num_read == 15:
        with torch.no_grad():
            for one, other in zip(net.average, (net.a, net.b, net.c), strict=True):
                for old, new in zip(one.parameters(), other.parameters(), strict=True):
                    new.lerp_(old, 0.5)


def swaps(net: Net, num_read: int) -> None:
    if num_read == 10:
        net.b = copy.deepcopy(net.b)


CHANGES = (prunes, prunes_from_the_first_on, parametrizes, copies, swaps)


def by_data_set(net: Net, change: Change) -> Any:
    return DataLoader(Changing(net, change), 4)


def by_loader(net: Net, change: Change) -> Any:
    class Loader:
        num_read = 0

        def __iter__(self) -> Iterator[Any]:
            for inputs, targets in DataLoader(Changing(net, lambda net, num_read: None), 4):
                for _ in inputs:
                    self.num_read += 1
                    change(net, self.num_read)
                yield inputs, targets

    return Loader()


def train(make: Any, make_loader: Any, change: Change, microbatches: int) -> Any:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = make(net, F.mse_loss, optimizer, microbatches=microbatches)
    model.train(2, make_loader(net, change))
    found = [model.predict(torch.ones(2, 3)), model.state_dict(), torch.rand(3)]
    return copy.deepcopy(found)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("make_loader", [by_data_set, by_loader])
@pytest.mark.parametrize("change", CHANGES)
def test_a_data_set_may_change_the_parts(
    change: Change, make_loader: Any, microbatches: int
) -> None:
    assert_as_alone(
        lambda: train(PlainModel, make_loader, change, microbatches),
        lambda: train(gs.Model, make_loader, change, microbatches),
        NUM_WORKERS,
    )


def test_a_data_set_that_leads_to_its_model_may_call_it() -> None:
    def run(make: Any) -> Any:
        torch.manual_seed(0)
        net, found = Net(), []
        model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))

        def change(net: Net, num_read: int) -> None:
            if num_read in (2, 6, 23):
                found.append(copy.deepcopy(model.state_dict()))
            if num_read in (7, 8, 16):
                found.append(model.predict(torch.ones(2, 3)).clone())

        model.train(2, by_data_set(net, change))
        return [*found, copy.deepcopy(model.state_dict())]

    assert_as_alone(lambda: run(PlainModel), lambda: run(gs.Model), NUM_WORKERS)


def test_a_data_set_may_prune_in_evaluation() -> None:
    def run(make: Any) -> Any:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        metrics = {"Loss": gs.metrics.Loss()}
        model = make(net, F.mse_loss, optimizer, metrics) if make is gs.Model else make(net)
        for inputs, targets in by_data_set(net, lambda net, num_read: None):
            if make is gs.Model:
                model.train_step(inputs, targets)
            else:
                net.train()
                optimizer.zero_grad()
                F.mse_loss(net(inputs), targets).backward()
                optimizer.step()
        loader = by_data_set(net, prunes)
        if make is gs.Model:
            loss = model.eval(loader)["Loss"]
        else:
            net.eval()
            with torch.no_grad():
                losses = [F.mse_loss(net(x), y).item() * len(x) for x, y in loader]
            loss = sum(losses) / 12
        return [loss, copy.deepcopy(model.state_dict())]

    assert_as_alone(lambda: run(PlainModel), lambda: run(gs.Model), NUM_WORKERS)


@pytest.mark.parametrize("where", ["hidden", "process", "recoverable"])
def test_what_only_readers_come_to_is_refused_by_name(where: str) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(0)
        net = Net()
        model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        # A process that is forked only then knows that there is a plan.
        model.train_step(torch.ones(4, 3), torch.ones(4, 2))
        if where == "hidden":  # the data set leads to the network by an object of C alone
            found: SimpleQueue[Net] = SimpleQueue()

            def prunes_what_is_found(_: Net, num_read: int) -> None:
                found.put(net := found.get())
                prunes(net, num_read)

            found.put(net)
            data = Changing(None, prunes_what_is_found)  # type: ignore[arg-type]
        else:
            data = Changing(net, prunes)
        model.train(1, DataLoader(data, 4, num_workers=int(where == "process")))

    cluster = ThreadCluster(run, NUM_WORKERS, is_recoverable=where == "recoverable")
    with pytest.raises(ConfigurationError, match=r"l1_unstructured\(\).*by a data set"):
        cluster.run()
    for process in multiprocessing.active_children():  # of the loaders
        process.terminate()
        process.join()
