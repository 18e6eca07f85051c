"""What a script has taken of tensors that code keeps, and puts back: the bits of the plain loop."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone_helpers import assert_as_alone
from equivalence_helpers import batches_of, rows_against_target
from plain_model import PlainModel
from recovery_helpers import threads_as_workers
from simulated.equivalence import assert_same_bits
from torch import nn

import graphsplit as gs
from graphsplit.errors import OwnershipError

assert threads_as_workers
pytestmark = pytest.mark.filterwarnings("ignore:network or loss reads:UserWarning")


class Net(nn.Module):
    """Keeps features in a tuple and in a queue that stays, and one tensor in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.past: Any = deque(maxlen=2)
        self.pair: Any = None
        self.one: Any = None
        self.other: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if self.pair is not None:
            h = h + 0.1 * self.pair[0] * self.pair[1]
        self.past.append(h.detach().mean(0))
        self.pair = (h.detach().mean(0), h.detach().std(0))
        if self.one is None:
            self.one = self.other = h.detach().mean(0)
        elif self.one is self.other:
            self.one.mul_(0.5)
            self.other = self.other + 1
        else:
            self.one, self.other = self.other, self.one
        return self.second(h + sum(self.past)) + 0.3 * self.one + 0.1 * self.other


class Average:
    def __init__(self) -> None:
        self.average: Any = None
        self.is_steep = False

    def __call__(self, outputs: Any, target: Any) -> torch.Tensor:
        loss = rows_against_target(outputs, target) * (1.5 if self.is_steep else 1.0)
        new = loss.detach()
        self.average = new if self.average is None else 0.9 * self.average + 0.1 * new
        return loss / self.average


def place(net: Any) -> None:
    net.first.place("MS_WORKER", 0)
    net.second.place("MS_WORKER", 1)


def assert_same(before_step: Any, *, microbatches: int = 1, steps: int = 16) -> None:
    assert_same_bits(
        Net,
        batches_of(8, 3, num=4),
        num_workers=2,
        place=place,
        loss_fn=Average(),
        microbatches=microbatches,
        before_step=before_step,
        plan_everywhere=True,
        steps=steps,
    )


class OfEach:
    """A change between steps, with a list for each network that it is made to."""

    def __init__(self, change: Callable[[int, Any, Any, list[Any]], None]) -> None:
        self._change = change
        self._held: dict[int, list[Any]] = {}

    def __call__(self, step: int, net: Any, loss_fn: Any) -> None:
        self._change(step, net, loss_fn, self._held.setdefault(id(net), []))


@OfEach
def put_back(step: int, net: Any, loss_fn: Any, held: list[Any]) -> None:
    """Take what is kept after each step, and put some of it back."""
    held.append((loss_fn.average, net.pair))
    loss_fn.is_steep = step % 3 == 2
    if step in (5, 6, 9):  # what was taken after the fourth step twice
        loss_fn.average = held[2 + step // 6][0]
    if step == 7:
        net.pair = held[4][1]
    if step == 10:
        net.pair = (held[4][1][0], net.pair[1])
    if step == 11:
        loss_fn.average = None
    if step == 13:
        net.one = net.other


@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_script_goes_back_to_what_it_has_taken(microbatches: int) -> None:
    """It went on from the value of the latest step, without a word."""
    assert_same(put_back, microbatches=microbatches)


def test_the_script_lets_two_take_turns() -> None:
    @OfEach
    def change(step: int, net: Any, loss_fn: Any, held: list[Any]) -> None:
        if step == 2:
            held[:] = [loss_fn.average]
        if step in (4, 5, 8, 11):
            loss_fn.average, held[0] = held[0], loss_fn.average

    assert_same(change)


def test_what_is_needed_with_two_values_at_once_is_refused() -> None:
    @OfEach
    def change(step: int, net: Any, loss_fn: Any, held: list[Any]) -> None:
        if step == 2:
            held[:] = [net.pair]
        if step == 5:
            net.one = held[0][0]
            net.pair = (held[0][1], net.pair[0])

    with pytest.raises(OwnershipError, match=r"has taken|has put into .* what it had taken from"):
        assert_same(change)


class Counts(nn.Module):
    """Counts beside the tensors that it keeps, in one list and in one dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.pair: list[Any] = [torch.ones(4), 1]
        self.table: dict[str, Any] = {"mean": torch.ones(4), "rate": 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x)) + 0.1 * self.pair[0] * self.pair[1]
        h = h + self.table["mean"] * self.table["rate"]
        self.pair[0], self.table["mean"] = h.detach().mean(0), h.detach().std(0)
        self.pair[1] += 1
        self.table["rate"] *= 0.9
        out: torch.Tensor = self.second(h)
        return out


@pytest.mark.parametrize("microbatches", [1, 4])
def test_numbers_beside_what_the_script_has_taken_are_numbers(
    microbatches: int, threads_as_workers: None
) -> None:
    """Once they were lifted, they were symbols."""

    def train(make: Any) -> Any:
        torch.manual_seed(0)
        net = Counts()
        place(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        model, found = make(net, F.mse_loss, optimizer, microbatches=microbatches), []
        for _ in range(7):
            found.append(model.train_step(torch.randn(8, 3), torch.randn(8, 4)))
            taken = net.pair[0], net.table["mean"]
            numbers = [net.pair[1], net.table["rate"]]
            found += copy.deepcopy([numbers, *map(type, numbers)])
        assert all(isinstance(one, torch.Tensor) for one in taken)
        return copy.deepcopy(found)

    assert_as_alone(lambda: train(PlainModel), lambda: train(gs.Model))
