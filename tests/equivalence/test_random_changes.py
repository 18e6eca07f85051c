"""Random changes of random places: the plain loop's bits, and no capture for what is not read."""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from torch import nn

from graphsplit.testing.equivalence import assert_same_bits
from graphsplit.train import planner

Site = tuple[str, Callable[[random.Random], None]]
pytestmark = pytest.mark.filterwarnings("ignore:network or loss reads")
FLOATS = (0.5, 1.0, -0.0, 0.0, 1.5, -0.25, 0.1, 2.0, 1e-3)


class Settings:
    def __init__(self) -> None:
        self.scale, self.shift, self.is_on, self.unused = 1.5, 0.25, True, 0.0
        self.inner = SimpleNamespace(rate=0.5, times=2)


class Slotted:
    __slots__ = ("gain", "unused")

    def __init__(self) -> None:
        self.gain, self.unused = 1.25, 0.0


def weight_function() -> Callable[[], float]:
    weight, unused = 1.0, 2.0

    def weigh() -> float:
        return weight

    def forget() -> float:
        return unused

    weigh.forget = forget  # type: ignore[attr-defined]
    return weigh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.bn, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.extra = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()})
        self.register_buffer("kept", torch.ones(4))
        self.beta, self.flag, self.times, self.unused = 0.5, True, 2, 0.0
        self.settings, self.slotted = Settings(), Slotted()
        self.table = {"a": 1.0, "b": 2.0}
        self.ordered = OrderedDict(p=0.5, q=0.25)
        self.shown = MappingProxyType(self.ordered)
        self.row, self.queue = [1.0, 2.0], deque([1.0, 0.5])
        self.numbers = np.array([0.5, 1.5])
        self.mask = torch.ones(4)
        self.weigh = weight_function()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.dropout(self.bn(self.first(x))) * self.beta + self.settings.shift
        if self.flag and self.settings.is_on:
            h = h * self.settings.scale * self.slotted.gain
        for _ in range(self.times):
            h = h * self.settings.inner.rate + 0.1
        for layer in self.extra.values():
            h = layer(h)
        for number in self.row:
            h = h * 0.5 + number
        for number in self.shown.values():
            h = h * number + self.table["a"]
        h = (h + self.queue[0]) * self.mask * self.kept + float(self.numbers[0])
        made: torch.Tensor = self.second(h).tanh() * self.weigh() * (1 + self.calls % 3)
        return made


def place(net: Any) -> None:
    net.first.place("MS_WORKER", 0)
    net.second.place("MS_WORKER", 1)


def _changed(value: Any, draw: random.Random) -> Any:
    """Another value of the same kind; now and then of another one."""
    if draw.random() < 0.1:
        return draw.choice((1, 1.0, True))
    if isinstance(value, bool):
        return not value
    return draw.randrange(4) if isinstance(value, int) else draw.choice(FLOATS)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def sites(net: Any) -> Iterator[Site]:
    """Every place of a network that can be changed, and how."""
    for path, module in net.named_modules():
        yield f"{path}.training", lambda draw, m=module: m.train(not m.training)
    for one in (net, net.settings, net.settings.inner, net.bn, net.dropout):
        for name, value in vars(one).items():
            if _is_number(value) and name not in ("training", "eps", "p", "times", "num_features"):
                yield name, lambda draw, o=one, n=name: setattr(o, n, _changed(getattr(o, n), draw))
    for name in Slotted.__slots__:
        yield name, lambda draw, n=name: setattr(net.slotted, n, draw.choice(FLOATS))
    yield "times", lambda draw: setattr(net, "times", draw.randrange(4))
    yield "p", lambda draw: setattr(net.dropout, "p", draw.choice((0.0, 0.1, 0.3, 0.7)))
    for held in (net.table, net.ordered):
        for key in held:
            yield f"[{key}]", lambda draw, h=held, k=key: h.__setitem__(k, draw.choice(FLOATS))
    yield "order", lambda draw: net.ordered.move_to_end(next(iter(net.ordered)))
    yield "children", lambda draw: net.extra.update({"a": net.extra.pop("a")})
    yield "append", lambda draw: net.row.append(1.0) if len(net.row) < 4 else net.row.clear()
    yield "queue", lambda draw: net.queue.rotate()
    yield "array", lambda draw: net.numbers.__setitem__(draw.randrange(2), draw.choice(FLOATS))
    yield "mask", lambda draw: net.mask.mul_(0.5)
    yield "another mask", lambda draw: setattr(net, "mask", torch.full((4,), draw.choice(FLOATS)))
    yield "buffer", lambda draw: net.kept.add_(0.25)
    yield "cell", lambda draw: _set_cell(net.weigh, draw)
    yield "weight", lambda draw: net.first.weight.data.mul_(0.5)
    yield "frozen", lambda draw: net.second.weight.requires_grad_(draw.random() < 0.5)


def _set_cell(function: Any, draw: random.Random) -> None:
    function.__closure__[0].cell_contents = draw.choice(FLOATS)


@pytest.mark.parametrize(("seed", "microbatches"), [(0, 1), (1, 1), (2, 4)])
def test_random_changes_give_the_plain_loops_bits(seed: int, microbatches: int) -> None:
    def change(step: int, net: Any, loss_fn: Any) -> None:
        draw = random.Random(1000 * seed + step)
        for _ in range(draw.randrange(5)):
            draw.choice(list(sites(net)))[1](draw)

    assert_same_bits(
        Net,
        batches_of(8, 3, num=3),
        steps=12,
        num_workers=1,
        loss_fn=rows_against_target,
        microbatches=microbatches,
        before_step=change,
        plan_everywhere=True,
        evaluate_after=(3,),
    )


def test_random_changes_of_what_is_not_read_take_no_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    original = planner.capture_graph
    monkeypatch.setattr(
        planner, "capture_graph", lambda *a, **k: (made.append(a), original(*a, **k))[1]
    )

    def change(step: int, net: Any, loss_fn: Any) -> None:
        if step == 0:
            return
        draw = random.Random(step)
        net.unused = net.settings.unused = net.slotted.unused = draw.choice(FLOATS)
        net.weigh.forget.__closure__[0].cell_contents = draw.random()
        net.table["b"] = math.pi * draw.random()
        net.calls = 0  # as the first call found it

    assert_same_bits(
        Net,
        batches_of(4, 3),
        steps=40,
        num_workers=1,
        loss_fn=rows_against_target,
        before_step=change,
        plan_everywhere=True,
        evaluate_after=(),
    )
    assert len(made) == 1
