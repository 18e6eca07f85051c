"""A ``torch.autograd.Function`` of the script, inside of distributed networks and outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, assert_same_bits, placed
from recovery_helpers import threads_as_workers
from torch import nn
from torch.nn import functional

import graphsplit as gs

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


class Stepped(torch.autograd.Function):
    """Rounds, and lets the gradient of what is small through."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(value)
        return (value * 8).round() / 8

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (context.saved_tensors[0].abs() < 1)


class SteppedLinear(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return functional.linear(Stepped.apply(value), Stepped.apply(self.weight), self.bias)


def stepped(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A function of the script, inside of networks and outside."""
    parts = SteppedLinear(6, 8), nn.Dropout(0.2), gs.opaque(SteppedLinear(8, 3))
    net = placed(nn.Sequential(*parts), [parts[0], parts[2]], ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    net = distribute(net)
    for _ in range(3):
        inputs = torch.randn(5, 6, requires_grad=True)
        optimizer.zero_grad()
        loss = Stepped.apply(net(inputs)).square().sum()
        loss.backward()
        optimizer.step()
        yield loss.item(), inputs.grad
    yield net.state_dict()


@pytest.mark.parametrize("num_workers", [2, 3])
def test_inside_and_outside(num_workers: int) -> None:
    assert_same_bits(stepped, num_workers)


class Asking(nn.Module):
    """Kept whole, since it asks for a value; its parameters have the class of eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        is_own = type(self.linear.weight) is nn.Parameter
        made: torch.Tensor = self.linear(value * (2 if is_own else 3))
        return -made if made.sum() > 0 else made


def test_code_kept_whole_finds_parameters_of_their_own_class() -> None:
    def loop(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        parts = nn.Linear(6, 8), Asking()
        net = placed(nn.Sequential(*parts), [*parts], ranks)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        net = distribute(net)
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(torch.randn(5, 6)).square().sum()
            loss.backward()
            optimizer.step()
            yield loss.item()

    assert_same_bits(loop, 2)
