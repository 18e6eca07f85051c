"""Outputs that share memory with an input, or one another: the script's writes show as in eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, assert_same_bits, placed, plain
from recovery_helpers import threads_as_workers
from torch import nn

import graphsplit as gs

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


class Parts(nn.Module):
    """Returns parts of what it was given, and of what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x) * 2
        hidden[:, 0].add_(1)
        made = self.last(hidden)
        return {
            "given": (x.view(-1), x[:, 1:3], x.t(), x[1:], x),
            "made": [made, made[:, :2], made.view(-1), made.t()[1]],
            "overlapping": (hidden[:3], hidden[1:], hidden[2]),
            "complex": torch.view_as_complex(made.view(-1, 2, 2)),
            "alone": hidden * 2,
        }


def _write(found: Any, x: torch.Tensor) -> Iterator[Any]:
    """Write to each output, and look at all of them."""
    every = [*found["given"], *found["made"], *found["overlapping"], found["complex"]]
    for number, one in enumerate(every):
        one.mul_(0.5 + number)
        yield x.tolist(), [other.tolist() for other in (*every, found["alone"])]


def test_predictions_of_a_model() -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        net = Parts()
        placed(net, [net.first, net.last], ranks)
        model = None if distribute is plain else gs.Model(net)
        for rows in (4, 5):
            memory = torch.randn(7, 6)
            x = memory[1 : rows + 1]
            with torch.no_grad():
                found = net(x) if model is None else model.predict(x)
            yield from _write(found, memory)

    assert_same_bits(loop, 2)


def test_outputs_of_an_own_loop() -> None:
    """With gradients, those of what the network has made stay apart."""

    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        own = Parts()
        net = distribute(placed(own, [own.first, own.last], ranks))
        x = torch.randn(4, 6)
        with torch.no_grad():
            yield from _write(net(x), x)
        found = net(x)
        found["made"][0].square().sum().backward()
        found["given"][1].mul_(2)
        yield x, found["given"][0].tolist(), net.first.weight.grad

    assert_same_bits(loop, 2)
