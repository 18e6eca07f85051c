"""Scripts that write to modules which several Models share, between their steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_model import PlainModel
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.errors import OwnershipError, PlanMismatchError

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
Make = Callable[..., Any]
Script = Callable[[Make, int], Any]


def put(module: nn.Module, rank: int) -> Any:
    return module.place("MS_WORKER", rank)  # type: ignore[operator]


def two_layers(*sizes: int, ranks: tuple[int, int]) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(*sizes[:2]), nn.ReLU(), nn.Linear(*sizes[1:]))
    put(net[0], ranks[0])
    put(net[2], ranks[1])
    return net


def rows(width: int, seed: int) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed))


class Judging(nn.Module):
    def __init__(self, maker: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.maker, self.judge = maker, judge

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.judge(self.maker(noise).detach())
        return made.mean() - self.judge(real).mean()


class Making(nn.Module):
    def __init__(self, maker: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.maker, self.judge = maker, judge

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.judge(self.maker(noise))
        return -made.mean()


def clamp(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.clamp_(-0.05, 0.05)


def rmsprop(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(net.parameters(), lr=0.01)


def wasserstein(
    model: Make, microbatches: int, *, ranks: tuple[int, int] = (0, 1), made_at: int = 0
) -> Any:
    """The judge is clamped after each of its steps; the maker's Model may come later."""
    maker = two_layers(3, 8, 4, ranks=(ranks[0], ranks[0]))
    judge = two_layers(4, 8, 1, ranks=(ranks[1], ranks[1]))
    judging = model(Judging(maker, judge), None, rmsprop(judge), microbatches=microbatches)
    found: list[Any] = []
    for step in range(4):
        if step == made_at:
            making = model(Making(maker, judge), None, rmsprop(maker), microbatches=microbatches)
        for turn in range(2):
            found.append(judging.train_step(rows(4, step), rows(3, 10 * turn + step)))
            clamp(judge)
        if step >= made_at:
            found.append(making.train_step(rows(3, 20 + step)))
    return [*found, judging.state_dict(), making.state_dict(), making.predict(rows(3, 9))]


def made_later(model: Make, microbatches: int) -> Any:
    return wasserstein(model, microbatches, made_at=2)


def on_one_worker(model: Make, microbatches: int) -> Any:
    return wasserstein(model, microbatches, ranks=(1, 1))


class Criticizing(nn.Module):
    def __init__(self, actor: nn.Module, critic: nn.Module, target: nn.Module) -> None:
        super().__init__()
        self.actor, self.critic, self.target = actor, critic, target

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x, self.actor(x)], 1)
        with torch.no_grad():
            goal = x[:, :1] + 0.9 * self.target(both)
        return nn.functional.mse_loss(self.critic(both), goal)


def actor_critic_and_target(model: Make, microbatches: int) -> Any:
    """The target follows the critic in place; each of them has a Model."""
    actor, critic = two_layers(4, 8, 2, ranks=(0, 1)), two_layers(6, 8, 1, ranks=(1, 0))
    target = two_layers(6, 8, 1, ranks=(1, 0))
    target.load_state_dict(critic.state_dict())
    whole = Criticizing(actor, critic, target)
    learning = model(whole, None, rmsprop(critic), microbatches=microbatches)
    acting = model(Making(nn.Sequential(_Beside(actor)), critic), None, rmsprop(actor))
    asked = model(target)
    found: list[Any] = []
    for step in range(4):
        found += [learning.train_step(rows(4, step)), acting.train_step(rows(4, step))]
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        if step % 2:
            found.append(asked.predict(rows(6, step)))
    return [*found, learning.state_dict(), acting.state_dict()]


class _Beside(nn.Module):
    """What a module gives, beside what it was given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.inner(x)], 1)


def one_network_after_the_other(model: Make, microbatches: int) -> Any:
    """A Model for each fold, all of one network that is set back before; the former ones go."""
    net, start = two_layers(4, 8, 1, ranks=(0, 1)), [0.3, -0.2, 0.1, 0.05]
    found: list[Any] = []
    for fold in range(3):
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), start, strict=True):
                parameter.fill_(value)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        made = model(net, nn.MSELoss(), optimizer, microbatches=microbatches)
        found.append(made.train_step(rows(4, fold), rows(1, fold)))
        made.train(1, [(rows(4, 5 + fold), rows(1, 5)), (rows(4, 6), rows(1, 6))])
        found += [made.predict(rows(4, 7)), made.state_dict()]
    return found


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    "script",
    [wasserstein, made_later, on_one_worker, actor_critic_and_target, one_network_after_the_other],
    ids=lambda script: script.__name__,
)
def test_all_models_know_what_was_written(script: Script, microbatches: int) -> None:
    torch.manual_seed(0)
    expected = script(PlainModel, microbatches)

    def run(rank: int) -> Any:
        torch.manual_seed(0)
        return copy.deepcopy(script(gs.Model, microbatches))

    for found in ThreadCluster(run, 2, is_recoverable=False).run():
        assert difference(expected, found) is None


@pytest.mark.parametrize("was_run", [False, True])
def test_a_worker_that_writes_alone_is_named_by_each_model(was_run: bool) -> None:
    """The other Model has compared another write to the same tensors, or none yet."""

    def run(rank: int) -> None:
        maker, judge = two_layers(3, 8, 4, ranks=(0, 0)), two_layers(4, 8, 1, ranks=(1, 1))
        judging = gs.Model(Judging(maker, judge), None, rmsprop(judge))
        making = gs.Model(Making(maker, judge), None, rmsprop(maker))
        if was_run:
            making.train_step(rows(3, 0))
        judging.train_step(rows(4, 1), rows(3, 1))
        clamp(judge)
        judging.train_step(rows(4, 1), rows(3, 1))
        if rank == 0:
            clamp(judge)
        making.train_step(rows(3, 2))

    told = "'judge.0.weight' was written to on worker 0, and not on worker 1"
    with pytest.raises(PlanMismatchError, match=told):
        ThreadCluster(run, 2, is_recoverable=False).run()


class Average:
    """Keeps a tensor, in an attribute."""

    def __init__(self) -> None:
        self.average = torch.ones(())

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = (outputs - target).square().mean()
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss / self.average


def test_what_a_loss_keeps_is_kept_for_one_model() -> None:
    def train(rank: int) -> None:
        loss_fn, models = Average(), []
        for _ in range(2):
            net = two_layers(3, 8, 4, ranks=(0, 1))
            models.append(gs.Model(net, loss_fn, rmsprop(net)))
        for seed in range(2):
            models[0].train_step(rows(3, seed), rows(4, seed))
        models[1].train_step(rows(3, 5), rows(4, 5))

    told = r"another Model, whose steps use the same(.|\n)*Fix: .*a buffer .* of a module of both"
    with pytest.raises(OwnershipError, match=told):
        ThreadCluster(train, 2, is_recoverable=False).run()
