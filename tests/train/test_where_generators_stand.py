"""Random numbers that one worker alone draws: an error before the next step, or where it draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from alone_helpers import assert_as_alone
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.errors import GraphsplitError, LoaderMismatchError, OwnershipError

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
X, Y = torch.arange(24.0).reshape(6, 4) / 24, torch.tensor([0, 1, 0, 1, 1, 0])
BATCHES = [(X, Y), (X * 2, Y), (X + 1, Y)]


def small(rate: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(rate), nn.Linear(4, 2))
    net[0].place("MS_WORKER", 0)
    net[3].place("MS_WORKER", 1)
    return net


def model_of(net: nn.Module, microbatches: int = 1) -> gs.Model:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return gs.Model(net, nn.CrossEntropyLoss(), optimizer, microbatches=microbatches)


def draw_on_one() -> None:
    if gs.get_rank() == 0:
        torch.rand(3)


def by_steps() -> None:
    model = model_of(small())
    for batch in BATCHES:
        draw_on_one()
        model.train_step(*batch)


class DrawsOnOne(gs.callbacks.Callback):
    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        draw_on_one()


def by_callback() -> None:
    model_of(small()).train(1, BATCHES, callbacks=[DrawsOnOne()])


def by_own_loop() -> None:
    net = gs.distribute(small(0.3))
    net(X)
    draw_on_one()
    net(X)


@pytest.mark.parametrize("script", [by_steps, by_callback, by_own_loop])
def test_a_worker_that_draws_alone_is_named(script: Callable[[], None]) -> None:
    said = r"generator is in another state on worker 1 than on worker 0 before .* [12](.|\n)*Fix: "
    with pytest.raises(LoaderMismatchError, match=said):
        ThreadCluster(lambda _: script(), 2, is_recoverable=False).run()


class OwnNoise(gs.callbacks.Callback):
    """Draws for the parameters of its worker."""

    def __init__(self, draw: Callable[[torch.Tensor], Any]) -> None:
        self._draw = draw

    def on_gradients(self, context: gs.callbacks.RunContext) -> None:
        for _, parameter in context.owned_parameters():
            parameter.grad += self._draw(parameter)


OWN = torch.Generator()


def drawn_from_a_closure() -> Callable[[torch.Tensor], Any]:
    own = np.random.default_rng(0)
    return lambda p: own.normal()


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (torch.randn_like, "torch's generator"),
        (lambda p: np.random.randn(), "numpy.random"),
        (lambda p: torch.randn(p.shape, generator=OWN), "a generator in Generator"),
        (drawn_from_a_closure(), "a generator in Generator"),
        (random.Random(0).gauss, "a generator in Random"),
    ],
)
def test_what_is_drawn_for_one_workers_parameters_is_refused(draw: Any, name: str) -> None:
    def script(rank: int) -> None:
        model_of(small()).train(1, BATCHES, callbacks=[OwnNoise(draw)])

    with pytest.raises(OwnershipError, match=rf"{name} was drawn from for '.*'(.|\n)*Fix: draw"):
        ThreadCluster(script, 2, is_recoverable=False).run()


class NoiseForAll(gs.callbacks.Callback):
    """Draws for all parameters, on every worker."""

    def on_gradients(self, context: gs.callbacks.RunContext) -> None:
        owned = dict(context.owned_parameters())
        for name, parameter in context.model.network.named_parameters():
            noise = torch.randn(parameter.shape)
            if name in owned:
                parameter.grad += noise


def noisy(microbatches: int) -> Any:
    model = model_of(small(0.3), microbatches)
    model.train(2, BATCHES, callbacks=[NoiseForAll()])
    return model.state_dict(), torch.get_rng_state()


def plain_noisy() -> Any:
    net = small(0.3)
    optimizer, loss_fn = torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss()
    for _ in range(2):
        for x, y in BATCHES:
            optimizer.zero_grad()
            loss_fn(net(x), y).backward()
            for parameter in net.parameters():
                parameter.grad += torch.randn(parameter.shape)
            optimizer.step()
    return net.state_dict(), torch.get_rng_state()


def test_noise_that_all_workers_draw_comes_after_what_the_network_has_drawn() -> None:
    assert_as_alone(plain_noisy, lambda: noisy(1))
    assert_as_alone(lambda: noisy(2), lambda: noisy(2))


def noise_on(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + torch.randn_like(gradient)


def hook_of_a_module(net: nn.Sequential) -> None:
    net[0].register_full_backward_hook(lambda m, into, out: tuple(g and noise_on(g) for g in into))
    net[3].register_full_backward_hook(lambda module, into, out: tuple(map(noise_on, into)))


def hook_of_a_value(net: nn.Sequential) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = nn.functional.relu(x)
        made.register_hook(noise_on)
        return made

    net[1].forward = forward


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("register", [hook_of_a_module, hook_of_a_value])
def test_a_hook_on_a_gradient_that_draws_is_refused(
    register: Callable[[nn.Sequential], None], microbatches: int
) -> None:
    def script(rank: int) -> None:
        net = small()
        register(net)
        model_of(net, microbatches).train_step(X, Y)

    with pytest.raises(
        GraphsplitError, match=r"backward of (.|\n)* draws random numbers(.|\n)*Fix"
    ):
        ThreadCluster(script, 2, is_recoverable=False).run()
