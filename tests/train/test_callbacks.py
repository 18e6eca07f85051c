"""Callbacks of one process: schedulers, and gradients before the step. What runs on many workers
is compared with one process in tests/equivalence and tests/system."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import graphsplit as gs
from graphsplit.errors import ConfigurationError
from graphsplit.train.callbacks import Callback, LearningRateScheduler, RunContext

BATCHES = [(torch.full((4, 2), float(i + 1)), torch.zeros(4, 1)) for i in range(3)]


def model_of(**options: Any) -> tuple[gs.Model, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    return gs.Model(network, nn.MSELoss(), optimizer, **options), network, optimizer


class Rates(Callback):
    """Notes the learning rate after every step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.found = optimizer, []  # type: ignore[var-annotated]

    def on_step_end(self, context: RunContext) -> None:
        self.found.append(self.optimizer.param_groups[0]["lr"])


def test_a_scheduler_is_stepped_after_every_step() -> None:
    model, _, optimizer = model_of()
    rates = Rates(optimizer)
    halving = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    model.train(1, BATCHES, callbacks=[LearningRateScheduler(halving, every="step"), rates])
    assert rates.found == [0.5, 0.25, 0.125]


def test_a_scheduler_is_stepped_where_the_optimizer_is() -> None:
    model, _, optimizer = model_of(accumulate=2)
    rates = Rates(optimizer)
    halving = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    model.train(2, BATCHES, callbacks=[LearningRateScheduler(halving, every="step"), rates])
    assert rates.found == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_a_scheduler_is_stepped_after_every_epoch() -> None:
    model, _, optimizer = model_of()
    rates = Rates(optimizer)
    halving = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    model.train(2, BATCHES, callbacks=[LearningRateScheduler(halving), rates])
    assert rates.found == [1.0] * 3 + [0.5] * 3


def test_a_scheduler_that_watches_a_number_is_given_the_loss_or_the_metric() -> None:
    model, _, optimizer = model_of()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    model.train(1, BATCHES, callbacks=[LearningRateScheduler(plateau, every="step")])
    assert plateau.best < float("inf")
    model, _, optimizer = model_of()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    watching = LearningRateScheduler(plateau, metric=lambda context: 7.0)
    model.train(3, BATCHES, callbacks=[watching])
    assert (plateau.best, optimizer.param_groups[0]["lr"]) == (7.0, 0.25)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: LearningRateScheduler(s, "hour"), "every='hour'; expected 'epoch' or 'step'"),  # type: ignore[arg-type]
        (lambda s: LearningRateScheduler(0.1), "scheduler is a float; expected one of torch.optim"),
        (lambda s: LearningRateScheduler(s, metric=lambda c: 0.0), "ExponentialLR watches no num"),
    ],
)
def test_what_is_no_scheduler_is_refused(make: Any, message: str) -> None:
    scheduler = lr_scheduler.ExponentialLR(model_of()[2], gamma=0.5)
    with pytest.raises(ConfigurationError, match=message):
        make(scheduler)


class Doubling(Callback):
    """Doubles every gradient, and notes when."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def on_gradients(self, context: RunContext) -> None:
        self.seen.append((context.step, context.loss is None))
        for _, parameter in context.owned_parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)


def test_gradients_are_shown_before_the_step() -> None:
    model, network, _ = model_of()
    doubling = Doubling()
    model.train(1, BATCHES, callbacks=[doubling])
    assert doubling.seen == [(1, True), (2, False), (3, False)]
    assert model.train_step(*BATCHES[0]) is not None
    assert len(doubling.seen) == 3  # only while its `train` runs
    torch.manual_seed(0)
    plain = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    for factor, (x, y) in zip([2, 2, 2, 1], [*BATCHES, BATCHES[0]], strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        for parameter in plain.parameters():
            parameter.grad.mul_(factor)  # type: ignore[union-attr]
        optimizer.step()
    assert torch.equal(network.weight, plain.weight)  # type: ignore[arg-type]


def test_gradients_are_shown_before_they_are_clipped() -> None:
    model, network, _ = model_of(clip=gs.clip.Value(0.25))
    model.train(1, BATCHES, callbacks=[Doubling()])
    assert float(network.weight.grad.abs().max()) <= 0.25  # type: ignore[union-attr,operator]


def test_several_optimizers_have_a_list_of_states() -> None:
    torch.manual_seed(0)
    network = nn.Linear(2, 1)
    several = [torch.optim.Adam([network.weight]), torch.optim.Adam([network.bias])]
    model = gs.Model(network, nn.MSELoss(), several)
    model.train_step(*BATCHES[0])
    states = model.optimizer_state_dict()
    assert [len(state["state"]) for state in states] == [1, 1]
    model.load_optimizer_state_dict(states)
    with pytest.raises(gs.errors.StateError, match="1 states were given; expected one for each"):
        model.load_optimizer_state_dict(states[:1])
