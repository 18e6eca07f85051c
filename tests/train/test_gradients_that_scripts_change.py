"""A callback changes the gradients of all parameters, as scripts do between backward and step."""

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
INPUTS = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(4, 8, 2, generator=torch.Generator().manual_seed(2))
BATCHES = list(zip(INPUTS, TARGETS, strict=True))


class Net(nn.Module):
    """One part is frozen, and another one's result is not used by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)
        self.frozen, self.unused = nn.Linear(5, 5), nn.Linear(5, 3)
        self.frozen.requires_grad_(False)
        self.kept: dict[str, torch.Tensor] = {}
        if hasattr(nn.Module, "place"):
            for module, rank in ((self.first, 0), (self.second, 1)):
                module.place("MS_WORKER", rank)
            self.frozen.place("MS_WORKER", 0)
            self.unused.place("MS_WORKER", 0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.frozen(torch.tanh(self.first(x)))
        return self.second(h), self.unused(h)


def loss_fn(outputs: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs[0], target)


def add_noise(net: Net) -> None:
    for p in net.parameters():
        if p.grad is not None:
            p.grad.add_(torch.randn_like(p), alpha=0.1)


def add_noise_anew(net: Net) -> None:
    for p in net.parameters():
        if p.requires_grad and p.grad is not None:
            p.grad = 0.5 * p.grad + torch.randn_like(p.grad)


def clip_each(net: Net) -> None:
    for p in (p for p in net.parameters() if p.grad is not None):
        assert p.grad is not None
        p.grad.mul_(torch.clamp(0.1 / (p.grad.norm() + 1e-6), max=1.0))
        p.grad.data.clamp_(-0.05, 0.05)


def clip_values(net: Net) -> None:
    nn.utils.clip_grad_value_(net.parameters(), 0.01)


def average(net: Net) -> None:
    for name, p in net.named_parameters():
        if p.grad is not None:
            held = net.kept.setdefault(name, torch.zeros_like(p))
            held.mul_(0.9).add_(p.grad, alpha=0.1)
            p.grad.copy_(held)


def leave_out(net: Net) -> None:
    net.first.weight.grad = net.second.bias.grad = None


def train(make: Any, change: Callable[[Net], None], microbatches: int) -> Any:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    model = make(net, loss_fn, optimizer, microbatches=microbatches)
    if make is PlainModel:
        optimizer.register_step_pre_hook(lambda *_: change(net))
        model.train(2, BATCHES)
    else:
        callback = gs.callbacks.Callback()
        callback.__class__ = type("Own", (gs.callbacks.Callback,), {})
        type(callback).on_gradients = lambda *_: change(net)  # type: ignore[method-assign]
        model.train(2, BATCHES, callbacks=[callback])
    return copy.deepcopy([model.state_dict(), torch.get_rng_state()])


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    "change", [add_noise, add_noise_anew, clip_each, clip_values, average, leave_out]
)
def test_gradients_of_all_may_be_changed(change: Callable[[Net], None], microbatches: int) -> None:
    def run(make: Any) -> Callable[[], Any]:
        return lambda: train(make, change, microbatches)

    assert_as_alone(run(PlainModel), run(gs.Model))


def by_the_norm_of_all(net: Net) -> None:
    trained = [p for p in net.parameters() if p.grad is not None]
    norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
    for p in trained:
        assert p.grad is not None
        p.grad.div_(norm)


def with_a_weight_of_another_worker(net: Net) -> None:
    for p, other in ((net.first.bias, net.second.weight[0]), (net.second.bias, net.first.bias[:2])):
        assert p.grad is not None
        p.grad.add_(other.detach())


def of_its_own(net: Net) -> None:
    for p in net.parameters():
        p.grad = torch.zeros_like(p)


REFUSED = {
    by_the_norm_of_all: r"clip=gs\.clip\.GlobalNorm",
    with_a_weight_of_another_worker: "lives on worker",
    of_its_own: r"parameter\.grad\.copy_",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_needs_values_of_other_workers_is_refused(change: Callable[[Net], None]) -> None:
    with pytest.raises(OwnershipError, match=REFUSED[change]):
        ThreadCluster(lambda _: train(gs.Model, change, 1), 2, is_recoverable=False).run()
