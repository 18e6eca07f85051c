"""What code kept whole leaves in Python, beside the network's own attributes."""

from __future__ import annotations

import functools
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import graphsplit as gs
from recovery_features.parts import adam, all_of, feature, pairs, put, trained


class Kept(nn.Module):
    """A layer that asks for a value, and goes by what it is told."""

    def __init__(self, told: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        self.told, self.linear = told, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x)
        return found * (1 + 0.1 * self.told(found) if x.sum() < 1e9 else 1.0)


class Meter:
    """Counts, in a slot."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def counting() -> Callable[[torch.Tensor], float]:
    """Keeps state in a closure, a class, an object, a module, a default, its own attributes."""
    calls, meter, stats = 0, Meter(), types.ModuleType("stats")
    exec("calls = 0\ndef count():\n    global calls\n    calls += 1", vars(stats))

    class Shared:
        calls = 0

    @functools.lru_cache
    def half(number: int) -> float:
        return number / 2

    def told(x: torch.Tensor, seen: list[float] = []) -> float:  # noqa: B006
        nonlocal calls
        calls += 1
        meter.count += 1
        stats.count()
        Shared.calls += 1
        seen.append(float(x.detach().mean()))
        told.last = getattr(told, "last", 0) + 1  # type: ignore[attr-defined]
        sums = calls + meter.count + stats.calls + Shared.calls + told.last  # type: ignore[attr-defined]
        return half(sums % 5) + sum(seen[-2:])

    return told


def drawing() -> Callable[[torch.Tensor], float]:
    """Draws from generators of three libraries; another one it never draws from."""
    python, own = random.Random(5), torch.Generator().manual_seed(5)
    numpy, spare = np.random.default_rng(5), random.Random(6)

    def told(x: torch.Tensor) -> float:
        if x.dim() > 2:
            return spare.random()
        return python.random() + torch.rand((), generator=own).item() + float(numpy.random())

    return told


class Remembering:
    """A loss that remembers in containers: made by the script, and by itself."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"all": [], "kinds": Counter()}
        self.last, self.array = deque([0.0], maxlen=3), np.zeros(2)
        self.pair: tuple[int, list[float]] = (0, [])
        self.average: torch.Tensor | None = None
        self.parts = [Meter(), Meter()]
        self.late: list[int] = []

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(outputs, target)
        number = loss.item()
        self.seen["all"].append(number)
        self.seen["kinds"]["low" if number < 1 else "high"] += 1
        self.seen.setdefault("same", self.seen["all"])
        self.last.append(number)
        self.array[0] += 1
        self.pair = (self.pair[0] + 1, [*self.pair[1], number][-2:])
        now = loss.detach()
        self.average = now if self.average is None else 0.9 * self.average + 0.1 * now
        part = self.parts[self.pair[0] % 2]
        part.count += 1
        if self.pair[0] > 4:
            self.late.append(1)
        factor = len(self.seen["same"]) + sum(self.last) + float(self.array[0]) + part.count
        return loss * (
            1 + 0.01 * (factor + len(self.late) + sum(self.pair[1])) + 0.1 * self.average
        )


def _net(told: Callable[[torch.Tensor], float], *, place: bool) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), Kept(told), nn.Linear(8, 3))
    return put(net, "0", "1", "2", place=place)


@feature
def counted_by_code_kept_whole(place: bool = True) -> Any:
    net = _net(counting(), place=place)
    return trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net)))


Pair = namedtuple("Pair", "count mean")


class Holding(nn.Module):
    """Writes into tensors in place, and fills containers of many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.means = [torch.zeros(8), {"also": torch.ones(8)}]
        self.table, self.sums = torch.zeros(8), torch.zeros(2)
        self.by_parity: dict[bool, list[float]] = defaultdict(list)
        self.last: Any = OrderedDict()
        self.queue: Any = deque(maxlen=3)
        self.pair = Pair(0, self.sums)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x)
        mean = found.detach().mean(0)
        if mean.sum() > 1e9:
            return found
        of_pair = self.pair.count + self.pair.mean.sum()
        before = self.means[0] + self.means[1]["also"] + self.table + 0.01 * of_pair
        for tensor in (self.means[0], self.means[1]["also"], self.table):
            tensor.mul_(0.5).add_(mean)
        self.queue.append(mean[:4])
        self.last = OrderedDict(mean=mean * 0.25, before=self.last.get("mean", 0.0))
        self.pair = Pair(self.pair.count + 1, mean[:2])
        self.by_parity[self.pair.count % 2 == 0].append(float(mean[0]))
        told = sum(map(sum, self.by_parity.values())) + float(sum(self.queue).sum())
        return found + 0.01 * (before + self.last["before"] + told)


@feature
def held_by_code_kept_whole(place: bool = True) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), Holding(), nn.Linear(8, 3))
    put(net, "0", "1", "2", place=place)
    return trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net)))


@feature
def held_by_a_marked_module(place: bool = True) -> Any:
    torch.manual_seed(0)
    middle = gs.opaque(Holding(), outputs=lambda x: torch.empty_like(x))
    net = nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 3))
    put(net, "0", "1", "2", place=place)
    return trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net)))


@feature
def drawn_by_code_kept_whole(place: bool = True) -> Any:
    net = _net(drawing(), place=place)
    return trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net)))


@feature
def remembered_by_a_loss(place: bool = True) -> Any:
    net = _net(counting(), place=place)  # on another worker, and with a state of its own
    return trained(gs.Model(net, Remembering(), adam(net)))


@feature
def changed_between_steps_for_code_kept_whole(place: bool = True) -> Any:
    """The script sets, between two steps, what code kept whole reads and changes."""
    torch.manual_seed(0)
    state = {"rate": 1.0, "calls": 0}

    def told(x: torch.Tensor) -> float:
        state["calls"] += 1
        return state["rate"] * state["calls"]

    net = _net(told, place=place)
    model, losses = gs.Model(net, nn.CrossEntropyLoss(), adam(net)), []
    x, y = pairs().tensors
    for step in range(8):
        state["rate"] *= 0.75
        if step % 3 == 0:
            state["calls"] = 0
        rows = slice(3 * step, 3 * step + 3)
        losses.append(model.train_step(x[rows], y[rows]))
    return losses, all_of(model)


class Centring(nn.Module):
    """A loss that writes to a buffer, and keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.seen: list[float] = []

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(outputs - self.centre, target)
        self.centre.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        self.seen.append(loss.item())
        return loss * (1 + 0.1 * sum(self.seen[-3:]))


@feature
def remembered_by_a_loss_that_writes_to_a_buffer(place: bool = True) -> Any:
    torch.manual_seed(0)
    net, loss = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)), Centring()
    put(net, "0", "1", "2", place=place)
    return trained(gs.Model(net, loss, adam(net))), loss.seen
