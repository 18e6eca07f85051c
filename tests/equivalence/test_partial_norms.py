"""A norm over the gradients of one worker is never taken for that of all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence_helpers import Tower, batches_of, on_two, rows_against_target
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures
from torch import nn
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    get_total_norm,
    parameters_to_vector,
)

from graphsplit.errors import OwnershipError
from graphsplit.optimizers.clip import GlobalNorm
from graphsplit.optimizers.ownership import is_elsewhere

same = functools.partial(
    assert_same_bits,
    Tower,
    batches_of(4, 8),
    num_workers=2,
    place=on_two,
    loss_fn=rows_against_target,
    captures=Captures(),
    evaluate_after=(),
)


def owned(network: nn.Module, part: str = "") -> list[torch.Tensor]:
    """What ``context.owned_parameters()`` gives, or some of it."""
    named = network.named_parameters()
    return [p for name, p in named if part in name and not is_elsewhere(p)]


def gradients(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


PARTIAL: list[Callable[[nn.Module], Any]] = [
    lambda net: clip_grad_norm_(owned(net), 1.0),
    lambda net: clip_grad_norm_((p for p in owned(net)), 1.0),
    lambda net: get_total_norm(gradients(owned(net))),
    lambda net: get_total_norm(gradients(owned(net, "weight"))),
    lambda net: torch.nn.utils.clip_grad.clip_grad_norm_(owned(net), 1.0, 1.0, foreach=False),
]


@pytest.mark.parametrize("look", PARTIAL)
def test_a_norm_over_what_one_worker_owns_is_refused(look) -> None:
    with pytest.raises(OwnershipError) as refused:
        same(on_gradients=look)
    assert "gradient(s) that live on this worker" in str(refused.value)
    assert "clip=gs.clip.GlobalNorm(max_norm)" in str(refused.value)


@pytest.mark.parametrize(
    "look",
    [
        lambda net: clip_grad_norm_(net.parameters(), 1.0),
        lambda net: parameters_to_vector(net.parameters()),
        lambda net: parameters_to_vector(p.grad for p in net.parameters()),
        lambda net: sum(torch.norm(p.grad) for p in net.parameters()),
    ],
)
def test_a_look_at_all_gradients_is_refused(look) -> None:
    with pytest.raises(OwnershipError):
        same(on_gradients=look)


def each(clip: Callable[[Any], Any]) -> Callable[[nn.Module], None]:
    def clip_each(network: nn.Module) -> None:
        for parameter in owned(network):
            clip(parameter)

    return clip_each


@pytest.mark.parametrize(
    "look",
    [
        each(lambda p: clip_grad_norm_(p, 0.01)),
        each(lambda p: clip_grad_norm_([p], 0.01)),
        lambda net: clip_grad_value_(owned(net), 0.01),
    ],
)
def test_every_gradient_may_be_clipped_by_itself(look) -> None:
    same(on_gradients=look)


def test_the_gradients_of_a_module_may_be_clipped_together() -> None:
    def clip(network: Tower) -> None:
        if owned(network, "second"):
            clip_grad_norm_(network.second.parameters(), 0.01)

    same(on_gradients=clip)


def test_a_worker_that_has_all_parameters_finds_the_norm_of_all() -> None:
    def place(network: nn.Module) -> None:
        for layer in network.children():
            layer.place("MS_WORKER", 1)

    same(on_gradients=lambda net: clip_grad_norm_(owned(net), 0.01), place=place)


def test_clipping_by_the_model_is_not_in_the_way() -> None:
    same(clip=GlobalNorm(0.01), make_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=1))
