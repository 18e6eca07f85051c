"""Hooks on parameters that a data set registers, or a script after the first step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import changing_data
import pytest
import torch
import torch.nn.functional as F
from changing_data import Changing
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch.utils.data import DataLoader, RandomSampler

import graphsplit as gs
from graphsplit.errors import OwnershipError, PlanMismatchError

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
NUM_WORKERS = 3
Change = Callable[["Net", int], object]


class Net(changing_data.Net):
    def __init__(self) -> None:
        super().__init__()
        self.handles: list[Any] = []
        self.factors = [1.0]
        self.optimizer: Any = None


def by_data_set(net: Net, change: Change) -> Any:
    return DataLoader(Changing(net, change), 4)


def by_collate(net: Net, change: Change) -> Any:
    calls = [0]

    def collate(samples: Any) -> Any:
        calls[0] += 4
        change(net, calls[0])
        return torch.utils.data.default_collate(samples)

    return DataLoader(Changing(net, lambda net, num_read: None), 4, collate_fn=collate)


def by_sampler(net: Net, change: Change) -> Any:
    class Sampler(RandomSampler):
        def __iter__(self) -> Any:
            for number, index in enumerate(super().__iter__(), 1):
                change(net, number)
                yield index

    data = Changing(net, lambda net, num_read: None)
    return DataLoader(data, 4, sampler=Sampler(data))


def scales(layer: str, when: int) -> Change:
    def change(net: Net, num_read: int) -> None:
        if num_read == when:
            getattr(net, layer).weight.register_hook(lambda gradient: gradient * 3)

    return change


def clamps(layer: str, when: int) -> Change:
    def clamp(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.1, 0.1)

    def change(net: Net, num_read: int) -> None:
        if num_read == when:
            getattr(net, layer).bias.register_post_accumulate_grad_hook(clamp)

    return change


def again_and_again(net: Net, num_read: int) -> None:
    """Another factor for each sample: of the hooks of a batch the last one is left."""
    for handle in net.handles:
        handle.remove()
    net.handles = [
        parameter.register_hook(lambda gradient: gradient * (1 + num_read))
        for parameter in (net.a.weight, net.b.weight, net.c.weight)
    ]


def on_another_layer_each_time(net: Net, num_read: int) -> None:
    layer = {1: net.b, 6: net.c, 9: net.a, 15: net.b}.get(num_read)
    if layer is not None:
        layer.weight.register_hook(lambda gradient: gradient * 2)


def removes(net: Net, num_read: int) -> None:
    """What the script has registered."""
    if num_read == 5:
        for handle in net.handles:
            handle.remove()


def hooked() -> Net:
    torch.manual_seed(0)
    net = Net()
    net.handles = [p.register_hook(lambda gradient: gradient * 0.5) for p in net.b.parameters()]
    net.optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return net


def train(
    make_loader: Callable[[Net, Change], Any], change: Change, microbatches: int = 1
) -> list[Any]:
    net = hooked()
    optimizer = net.optimizer
    model = gs.Model(net, F.mse_loss, optimizer, microbatches=microbatches)
    model.train(2, make_loader(net, change))
    return [copy.deepcopy(model.state_dict()), torch.rand(1)]


def plain(
    make_loader: Callable[[Net, Change], Any], change: Change, microbatches: int = 1
) -> list[Any]:
    net = hooked()
    optimizer = net.optimizer
    loader = make_loader(net, change)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            parts = zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)
            for one, target in parts:
                (F.mse_loss(net(one), target) * (1 / microbatches)).backward()
            optimizer.step()
    return [net.state_dict(), torch.rand(1)]


def on_workers(script: Callable[[], Any]) -> list[Any]:
    return ThreadCluster(lambda rank: script(), NUM_WORKERS, is_recoverable=False).run()


@pytest.mark.parametrize(
    "change",
    [
        *(scales(layer, when) for layer in "abc" for when in (1, 7, 14)),
        *(clamps(layer, 7) for layer in "abc"),
        again_and_again,
        on_another_layer_each_time,
        removes,
    ],
)
def test_a_hook_that_a_data_set_registers_runs_where_its_parameter_lives(change: Change) -> None:
    expected = plain(by_data_set, change)
    for found in on_workers(lambda: train(by_data_set, change)):
        assert difference(expected, found) is None


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("make_loader", [by_collate, by_sampler])
def test_a_collate_function_and_a_sampler_register_hooks_too(
    make_loader: Callable[[Net, Change], Any], microbatches: int
) -> None:
    change = scales("b", 8)
    expected = plain(make_loader, change, microbatches)
    for found in on_workers(lambda: train(make_loader, change, microbatches)):
        assert difference(expected, found) is None


def resets_momentum(net: Net, num_read: int) -> None:
    if num_read in (6, 18):
        for state in net.optimizer.state.values():
            state["momentum_buffer"].zero_()


def changes_what_hooks_read(net: Net, num_read: int) -> None:
    net.factors[0] = 1 / num_read


@pytest.mark.parametrize("change", [resets_momentum, changes_what_hooks_read])
def test_what_optimizers_and_hooks_keep_may_be_changed_by_a_data_set(change: Change) -> None:
    def make_loader(net: Net, change: Change) -> Any:
        factors = net.factors
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient * factors[0])
        return by_data_set(net, change)

    expected = plain(make_loader, change)
    for found in on_workers(lambda: train(make_loader, change)):
        assert difference(expected, found) is None


def steps(at: int, act: Callable[[Net, int], object], rank: int = 0) -> Any:
    """Some steps by calls; before one of them, something is done."""
    torch.manual_seed(0)
    net = Net()
    model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
    found = []
    for step in range(4):
        if step == at:
            act(net, rank)
        found.append(model.train_step(torch.ones(4, 3), torch.zeros(4, 2)).clone())
    return found


@pytest.mark.parametrize("at", [0, 2])
def test_a_hook_that_another_worker_alone_registers_is_refused(at: int) -> None:
    def act(net: Net, rank: int) -> None:
        if rank != 2:
            net.b.weight.register_hook(lambda gradient: gradient * 2)

    has = r"1 hook \(.*test_hooks_by_data_sets.py:\d+\) on worker 0"
    said = f"'b.weight' has ({has}, .* on worker 2|.* on worker 2, {has})"
    with pytest.raises(PlanMismatchError, match=said):
        ThreadCluster(lambda rank: steps(at, act, rank), NUM_WORKERS, is_recoverable=False).run()


def test_a_hook_that_its_parameters_worker_alone_registers_counts() -> None:
    def act(net: Net, rank: int) -> None:
        if rank == 2:
            net.b.weight.register_hook(lambda gradient: gradient * 2)

    one = ThreadCluster(lambda rank: steps(2, act, rank), NUM_WORKERS, is_recoverable=False).run()
    all_of_them = on_workers(lambda: steps(2, act, 2))
    assert difference(all_of_them, one) is None


def test_a_hook_that_a_hook_registers_elsewhere_is_refused() -> None:
    def act(net: Net, rank: int) -> None:
        def register(gradient: torch.Tensor) -> None:
            net.a.weight.register_hook(lambda gradient: gradient * 2)

        net.c.weight.register_hook(register)

    with pytest.raises(OwnershipError, match=r"within a step .*'a.weight' \(.*lives on worker 0"):
        on_workers(lambda: steps(2, act))


def test_a_hook_of_a_data_set_is_refused_where_a_worker_may_come_back() -> None:
    change = scales("b", 6)
    with pytest.raises(OwnershipError, match=r"'b.weight' \(.*test_hooks_by_data_sets.py"):
        ThreadCluster(lambda rank: train(by_data_set, change), NUM_WORKERS).run()
