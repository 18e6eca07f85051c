from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn, optim

from graphsplit.train.explained import copies_kept

MAKERS: list[Callable[[list[nn.Parameter]], optim.Optimizer]] = [
    lambda p: optim.SGD(p, lr=0.1),
    lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: optim.Adam(p),
    lambda p: optim.AdamW(p, amsgrad=True),
    lambda p: optim.NAdam(p),
    lambda p: optim.RAdam(p),
    lambda p: optim.Adamax(p),
    lambda p: optim.Adagrad(p),
    lambda p: optim.Adadelta(p),
    lambda p: optim.RMSprop(p),
    lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    lambda p: optim.Rprop(p),
    lambda p: optim.ASGD(p),
]


@pytest.mark.parametrize("make", MAKERS)
def test_the_estimate_is_what_the_optimizer_keeps(
    make: Callable[[list[nn.Parameter]], optim.Optimizer],
) -> None:
    parameter = nn.Parameter(torch.ones(100))
    optimizer = make([parameter])
    estimate = copies_kept(optimizer)
    parameter.grad = torch.ones(100)
    optimizer.step()
    state = optimizer.state[parameter].values()
    kept = sum(v.numel() for v in state if isinstance(v, torch.Tensor) and v.numel() > 1)
    assert estimate == kept / 100


def test_nothing_is_guessed_about_optimizers_that_torch_does_not_have() -> None:
    class Own(optim.SGD):
        pass

    assert copies_kept(None) is None
    assert copies_kept(Own([nn.Parameter(torch.ones(1))], lr=0.1)) is None
