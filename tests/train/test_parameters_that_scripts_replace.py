"""A script converts the network between steps, or makes a parameter of another worker's value."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone_helpers import assert_as_alone
from plain_model import PlainModel
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.errors import OwnershipError

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
INPUTS = torch.randn(5, 8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(5, 8, 2, generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        if hasattr(nn.Module, "place"):
            self.first.place("MS_WORKER", 0)
            self.norm.place("MS_WORKER", 1)
            self.second.place("MS_WORKER", 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(self.norm(torch.tanh(self.first(x)))))[:, :2]


def to_double(net: Net, _: Any) -> None:
    net.double()


def to_bfloat16(net: Net, _: Any) -> None:
    net.to(torch.bfloat16)


def to_where_it_is(net: Net, _: Any) -> None:
    net.to("cpu").float()


def a_copy_of_another(net: Net, optimizer: torch.optim.Optimizer) -> None:
    replace(net.second, nn.Parameter(net.first.weight.detach().clone()), optimizer)


def of_another_and_changed(net: Net, optimizer: torch.optim.Optimizer) -> None:
    made = nn.Parameter(0.5 * net.first.weight.detach() + torch.eye(4))
    with torch.no_grad():
        made.mul_(0.9)
    replace(net.second, made, optimizer)


def replace(module: nn.Linear, made: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    old, module.weight = module.weight, made
    optimizer.state.pop(old, None)
    for group in optimizer.param_groups:
        group["params"] = [made if p is old else p for p in group["params"]]


def train(make: Any, change: Callable[..., None], microbatches: int) -> Any:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = make(net, F.mse_loss, optimizer, microbatches=microbatches)
    found = []
    for step, (x, y) in enumerate(zip(INPUTS, TARGETS, strict=True)):
        if step == 2:
            change(net, optimizer)
        dtype = net.norm.running_mean.dtype  # type: ignore[union-attr]
        found.append(model.train_step(x.to(dtype), y.to(dtype)).clone())
        found.append(model.predict(x.to(dtype)))
    return copy.deepcopy([found, model.state_dict()])


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    "change", [to_double, to_bfloat16, to_where_it_is, a_copy_of_another, of_another_and_changed]
)
def test_a_network_is_changed_between_steps(change: Any, microbatches: int) -> None:
    def run(make: Any) -> Callable[[], Any]:
        return lambda: train(make, change, microbatches)

    assert_as_alone(run(PlainModel), run(gs.Model))


def over_one_memory(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.kept = value = net.first.weight.detach().clone()
    replace(net.second, nn.Parameter(value), optimizer)


def test_a_parameter_over_memory_that_the_script_holds_is_refused() -> None:
    with pytest.raises(OwnershipError, match=r"nn\.Parameter\(value\.clone\(\)\)"):
        ThreadCluster(lambda _: train(gs.Model, over_one_memory, 1), 2, is_recoverable=False).run()


def test_another_loss_does_not_ask_what_the_optimizer_has() -> None:
    """It has what was replaced before, and what a plain loop steps without a gradient."""

    def run(make: Any) -> Any:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        model = make(net, F.mse_loss, optimizer)
        losses = [model.train_step(INPUTS[0], TARGETS[0]).clone()]
        net.second.bias, net.norm = None, nn.Identity()
        losses.append(model.train_step(INPUTS[1], TARGETS[1]).clone())
        model.loss_fn = F.l1_loss
        losses.append(model.train_step(INPUTS[2], TARGETS[2]).clone())
        return copy.deepcopy([losses, model.state_dict()])

    assert_as_alone(lambda: run(PlainModel), lambda: run(gs.Model))
    ThreadCluster(lambda _: run(gs.Model), 2, is_recoverable=True).run()


@pytest.mark.parametrize("change", [to_double, a_copy_of_another])
def test_in_a_job_that_recovers_it_is_refused(change: Any) -> None:
    """Who comes back would not know of it."""
    with pytest.raises(OwnershipError, match="lives on worker"):
        ThreadCluster(lambda _: train(gs.Model, change, 1), 2, is_recoverable=True).run()
