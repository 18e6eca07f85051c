"""What forward leaves in Python and the script finds: as in the plain loop, of whatever kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

Leave = Callable[[Any, torch.Tensor], object]
pytestmark = pytest.mark.filterwarnings("ignore:network or loss reads:UserWarning")


class Net(nn.Module):
    """Leaves something at each call, and computes with what it finds."""

    def __init__(self, leave: Leave) -> None:
        super().__init__()
        self.first, self.second, self.leave = nn.Linear(3, 4), nn.Linear(4, 4), leave
        self.calls, self.slope, self.left, self.active = 0, 0.5, None, nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.active(self.first(x))
        self.calls += 1
        self.leave(self, h)
        return torch.as_tensor(self.second(h))


def _once(net: Any, h: torch.Tensor) -> None:
    if net.left is None:
        net.left = nn.Sequential(nn.Flatten(), nn.Tanh())


def _functions(net: Any, h: torch.Tensor) -> None:
    net.left = [max, (min, math.pow), {"kind": type, "is": isinstance}, id, getattr, float]
    net.slope = float(net.slope) * 1.25 if isinstance(net.slope, float) else 0.0


def _masked(net: Any, h: torch.Tensor) -> None:
    numbers = np.ma.array([net.calls, 2.0, 3.0], mask=[0, net.calls % 2, 1])
    net.left = [numbers, np.ma.array([net.calls, 1])]


LEFT: dict[str, Leave] = {
    "a module": lambda net, h: setattr(net, "left", nn.ReLU()),
    "a module once": _once,
    "a module for another": lambda net, h: setattr(net, "active", nn.Tanh()),
    "in turns": lambda net, h: setattr(net, "active", (nn.ReLU, nn.Tanh)[net.calls % 2]()),
    "with a number": lambda net, h: setattr(net, "active", nn.LeakyReLU(0.1 * net.calls)),
    "functions": _functions,
    "a masked array": _masked,
}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("kind", LEFT)
def test_the_script_finds_what_forward_has_left(kind: str, microbatches: int) -> None:
    """Not the module or None of before, nor what stood for a function, nor what masks hid."""
    found: dict[int, list[str]] = {}

    def look(step: int, net: Any, loss_fn: Any) -> None:
        found.setdefault(id(net), []).append(f"{net.left} {net.active} {net.slope}")
        net.slope *= 0.5 if step == 2 else 1.0

    assert_same_bits(
        partial(Net, LEFT[kind]),
        batches_of(8, 3),
        num_workers=2,
        place=lambda net: (net.first.place("MS_WORKER", 0), net.second.place("MS_WORKER", 1)),
        loss_fn=rows_against_target,
        microbatches=microbatches,
        before_step=look,
        plan_everywhere=True,
        steps=5,
    )
    in_loop, *on_workers = found.values()
    assert on_workers == [in_loop] * 2
