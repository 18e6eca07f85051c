"""Parameters, gradients, buffers, optimizers and generators are those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import (
    assert_same_wherever_placed,
    batches_of,
    on_three,
    rows_against_target,
)
from simulated.equivalence import assert_same_bits
from torch import nn

from graphsplit import place


class Tower(nn.Module):
    """Three linear layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.dropout = nn.Dropout(0.4)

    def forward(self, x):
        h = self.dropout(torch.relu(self.first(x)))
        return self.third(self.dropout(torch.relu(self.second(h)))) + h


same_over_three = functools.partial(
    assert_same_bits, num_workers=3, place=on_three, loss_fn=rows_against_target
)


def groups(network: Any) -> list[dict[str, Any]]:
    return [
        {"params": network.first.parameters(), "lr": 0.1},
        {"params": [*network.second.parameters(), *network.third.parameters()]},
    ]


OPTIMIZERS = {
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd with decay": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_keeps_its_bits(name: str) -> None:
    make = OPTIMIZERS[name]
    batches = batches_of(4, 8, num=4)
    same_over_three(Tower, batches, make_optimizer=lambda net: make(net.parameters()))
    same_over_three(Tower, batches, make_optimizer=lambda net: make(groups(net)))


def test_a_learning_rate_scheduler_steps_everywhere() -> None:
    same_over_three(
        Tower,
        batches_of(4, 8, num=4),
        make_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.1),
    )


def test_dropout_on_every_worker_draws_as_in_one_process() -> None:
    assert_same_wherever_placed(Tower, batches_of(4, 8, num=3))


def test_random_numbers_that_nobody_uses_are_drawn_all_the_same() -> None:
    class Wasteful(Tower):
        def forward(self, x):
            h = self.first(x)
            self.dropout(h)
            torch.rand(3)
            return self.dropout(h) + torch.randn_like(h) * 0.1 + torch.rand(8)

    assert_same_wherever_placed(Wasteful, batches_of(4, 8))


def test_running_statistics_of_normalisation() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3)
            self.group = nn.GroupNorm(2, 4)
            self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
            self.dropout = nn.Dropout2d(0.3)

        def forward(self, x):
            h = F.relu(self.norm1(self.conv1(x)))
            h = self.dropout(self.norm2(self.conv2(h))) + h
            return F.max_pool2d(self.instance(self.group(h)), 2).mean((2, 3))

    assert_same_wherever_placed(Normalised, batches_of(3, 2, 6, 6, num=3))


def test_one_normalisation_used_twice_updates_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x):
            return self.norm(self.linear(self.norm(x)))

    assert_same_bits(
        Twice,
        batches_of(4, 8, num=3),
        num_workers=2,
        place=lambda net: (net.norm.place("MS_WORKER", 1), net.linear.place("MS_WORKER", 0)),
        loss_fn=rows_against_target,
    )


def test_buffers_constants_and_what_is_not_trained() -> None:
    class Odds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8)
            self.frozen.weight.requires_grad_(False)
            self.never_called = nn.Linear(3, 3)
            self.never_read = nn.Parameter(torch.ones(3))
            self.without_grad = nn.Linear(8, 8)
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("fixed", torch.arange(8.0), persistent=False)

        def forward(self, x):
            h = self.linear(x)
            with torch.no_grad():
                seen = self.without_grad(h)
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            kept = (h * 2).detach()
            steps = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
            return self.frozen(h * seen.norm()) + kept - self.mean + self.fixed * steps

    assert_same_wherever_placed(Odds, batches_of(4, 8, num=3), placements=range(8))


class Quantised(nn.Module):
    """The scale of ``first``'s weight grows from one number to one for each row."""

    def __init__(self) -> None:
        super().__init__()
        config = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        self.first, self.second = torch.ao.nn.qat.Linear(8, 8, qconfig=config), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_buffers_to_which_an_operation_gives_another_size(microbatches: int) -> None:
    assert_same_bits(
        Quantised,
        batches_of(8, 8, num=3),
        num_workers=2,
        place=lambda network: network.second.place("MS_WORKER", 1),  # type: ignore[operator]
        loss_fn=rows_against_target,
        microbatches=microbatches,
        evaluate_after=(0, 2),
    )


def test_inside_no_grad_operands_still_ask_for_gradients() -> None:
    # `matmul` folds its operands, or not, by the requires_grad of the second one.
    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6) * 0.3)

        def forward(self, x):
            h, weight = self.linear(x).transpose(0, 1), self.weight * 2
            with torch.no_grad():
                seen = torch.matmul(h, weight) + torch.matmul(h, self.weight)
            return (h + seen + torch.matmul(h, weight)).transpose(0, 1)

    assert_same_wherever_placed(Measured, batches_of(3, 5, 6), placements=range(10))


def test_hooks_run_on_the_owner() -> None:
    calls: list[str] = []

    class Hooked(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.first.weight.register_hook(lambda gradient: gradient * 0.5)
            self.third.weight.register_post_accumulate_grad_hook(self._note)

        @staticmethod
        def _note(parameter: torch.Tensor) -> None:
            calls.append("third")
            assert parameter.grad is not None
            parameter.grad.mul_(0.25)

        def forward(self, x):
            with place("MS_WORKER", 1):
                borrowed = x @ self.first.weight  # shared by two workers
            return super().forward(x) + borrowed

    same_over_three(Hooked, batches_of(4, 8, num=3))
    assert len(calls) == 2 * 3  # the eager loop, and one of three workers


def test_a_loss_with_parameters_of_its_own() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((8,), 2.0))

        def forward(self, outputs, target):
            return F.mse_loss((outputs * self.scale).sum(1), target)

    same_over_three(Tower, batches_of(4, 8), loss_fn=Weighted())
