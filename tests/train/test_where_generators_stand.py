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
from graphsplit.errors import CaptureError, GraphsplitError, LoaderMismatchError, OwnershipError

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


def of_numpy_and_python() -> Any:
    own, coin = np.random.default_rng(3), random.Random(3)

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = own.random() + np.random.default_rng(own.bit_generator).random()
        loss = nn.functional.cross_entropy(outputs, target) * weight
        return loss if coin.random() < 0.5 else loss * 2

    return loss_fn, own, coin


def of_numpy_and_a_value() -> Any:
    own, old = np.random.default_rng(3), np.random.RandomState(3)

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(outputs, target) * (own.random() + old.rand())
        return loss if loss > 0.5 else loss * 2

    return loss_fn, own, old


class OfProcess:
    """Draws from the generators that all share, like one of its own."""

    def random(self) -> float:
        return float(np.random.rand())


def of_the_process_and_a_value() -> Any:
    np.random.seed(3)

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(outputs, target) * np.random.rand()
        return loss if loss > 0.5 else loss * 2

    return loss_fn, OfProcess()


class Skips(nn.Module):
    """Asks for a value or not, as a coin says."""

    def __init__(self, coin: np.random.Generator) -> None:
        super().__init__()
        self.coin = coin

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h if self.coin.random() < 0.5 and h.sum() > -1e9 else h * 0.5


def test_a_coin_that_decides_whether_code_is_kept_whole_is_tossed_once() -> None:
    coin = np.random.default_rng(1)  # that of the first toss: no value is asked for

    def script(rank: int) -> None:
        net = small()
        net[1] = Skips(np.random.default_rng(1))
        model_of(net).train_step(X, Y)

    assert coin.random() >= 0.5
    with pytest.raises(CaptureError, match=r"net\.1\.coin, a NumPy generator") as refused:
        ThreadCluster(script, 2, is_recoverable=False).run()
    assert refused.type is CaptureError


@pytest.mark.parametrize(
    "make", [of_numpy_and_python, of_numpy_and_a_value, of_the_process_and_a_value]
)
def test_a_loss_that_has_to_be_kept_whole_draws_as_often_as_it_is_called(
    make: Callable[[], Any],
) -> None:
    def plain() -> Any:
        net, (loss_fn, *generators) = small(), make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x, y in BATCHES:
            optimizer.zero_grad()
            loss_fn(net(x), y).backward()
            optimizer.step()
        return net.state_dict(), [one.random() for one in generators]

    def on_workers() -> Any:
        net, (loss_fn, *generators) = small(), make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = gs.Model(net, loss_fn, optimizer)
        for batch in BATCHES:
            model.train_step(*batch)
        return model.state_dict(), [one.random() for one in generators]

    assert_as_alone(plain, on_workers)
