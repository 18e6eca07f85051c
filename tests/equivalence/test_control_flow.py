"""Structured control flow: branches and loops run whole on one worker, with eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence_helpers import assert_same_wherever_placed, batches_of
from pass_helpers import captured, placed
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan

import graphsplit as gs
from graphsplit.errors import CaptureError, PlacementError


class Net(nn.Module):
    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.one = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self, self.first(x)))


def branch(net: Net, x: torch.Tensor) -> torch.Tensor:
    taken = torch.cond(x.sum() > 0, lambda y: net.one(y).sin(), lambda y: net.other(y) * 2, (x,))
    return taken * x


def loop(net: Net, x: torch.Tensor) -> torch.Tensor:
    def more(i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return i < 3

    def step(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, y * 1.5

    return torch.while_loop(more, step, (torch.tensor(0), x.detach()))[1] * x


def running(net: Net, x: torch.Tensor) -> torch.Tensor:
    return scan(lambda carry, row: (carry + row, carry * row), torch.zeros(4), net.one(x))[1] * x


CASES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "cond": branch,
    "while_loop": loop,
    "scan": running,
    "map": lambda net, x: map_rows(lambda row, b: (row * b).sin(), x, net.one.bias) * x,
    "associative_scan": lambda net, x: (
        associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic") * x
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # eager mode's
@pytest.mark.parametrize("between", CASES.values(), ids=CASES.keys())
def test_control_flow_gives_the_bits_of_eager_mode(between: Any) -> None:
    assert_same_wherever_placed(lambda: Net(between), batches_of(6, 3, num=3), placements=(0, 1))


def run(net: nn.Module) -> Any:
    return captured(net, torch.zeros(6, 3), torch.zeros(6), loss_fn=lambda o, t: o.sum() + t.sum())


def test_a_loop_placed_on_several_workers_is_refused_by_line() -> None:
    def inside(net: Net, x: torch.Tensor) -> torch.Tensor:
        return map_rows(lambda row, a, b: row * a + b, x, net.one.bias, net.other.bias)

    net = Net(inside)
    net.one.place("MS_WORKER", 1)
    net.other.place("MS_WORKER", 2)
    with pytest.raises(PlacementError) as caught:
        placed(net, run(net))
    assert "runs whole on one worker, but" in str(caught.value)
    assert "one on 1" in str(caught.value) and "other on 2" in str(caught.value)
    assert "place them on one worker, or put gs.place around the call" in str(caught.value)
    assert __file__ in str(caught.value)


def test_a_place_inside_a_branch_is_refused_by_line() -> None:
    def inside(net: Net, x: torch.Tensor) -> torch.Tensor:
        def taken(y: torch.Tensor) -> torch.Tensor:
            with gs.place("MS_WORKER", 1):
                return y.sin()

        return torch.cond(x.sum() > 0, taken, lambda y: y.cos(), (x,))

    with pytest.raises(CaptureError) as caught:
        run(Net(inside))
    assert "a part of a branch or loop is placed" in str(caught.value)
    assert __file__ in str(caught.value)
    assert "Fix: put gs.place around" in str(caught.value)
