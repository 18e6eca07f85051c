"""Networks and losses that read Python state of many kinds, for changing it at random."""

from __future__ import annotations

import enum
import functools
import random
from collections import ChainMap, Counter, OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as entry
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from equivalence_helpers import rows_against_target
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphsplit as gs

WIDTH = 4  # of all layers, so that each can stand for each
GAIN, UNUSED_GAIN = 1.25, 1.0
SHARED_TABLE = {"gain": 0.5, "unused": 0.0}
ACTIVATIONS = (torch.tanh, torch.sigmoid, F.relu, F.softplus)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Settings:
    def __init__(self) -> None:
        self.scale, self.shift, self.is_on, self.unused = 1.5, 0.25, True, 0.0
        self.inner = SimpleNamespace(rate=0.5, unused=2)


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

    weigh.unused = forget  # type: ignore[attr-defined]
    return weigh


class Containers(nn.Module):
    """Attributes, slots, dictionaries, lists, queues, arrays, tensors that are no state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.bn, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.extra = nn.ModuleDict({"a": linear(), "b": nn.Tanh()})
        self.register_buffer("kept", torch.ones(WIDTH))
        self.beta, self.flag, self.times, self.unused = 0.5, True, 2, 0.0
        self.settings, self.slotted = Settings(), Slotted()
        self.table = {"a": 1.0, "unused": 2.0}
        self.ordered = OrderedDict(p=0.5, q=0.25)
        self.shown = MappingProxyType(self.ordered)
        self.row, self.queue = [1.0, 2.0], deque([1.0, 0.5])
        self.numbers, self.chosen = np.array([0.5, 1.5]), {1, 2}
        self.mask = torch.ones(WIDTH)
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
        h = h + 0.1 * len(self.chosen) if 1 in self.chosen else h
        made: torch.Tensor = self.second(h).tanh() * self.weigh() * (1 + self.calls % 3)
        return made


class Style(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


class Rates(NamedTuple):
    rate: float
    unused: float


@dataclass
class BlockSettings:
    """Shared by all blocks of a network."""

    slope: float = 0.1
    style: Style = Style.PLAIN
    activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
    drop: float = 0.2
    steps: list[int] = entry(default_factory=lambda: [1, 2])
    rates: Rates = entry(default_factory=lambda: Rates(0.5, 0.0))
    unused: float = 0.0


class Block(nn.Module):
    """Reads settings, class attributes, a property, globals, defaults."""

    gain = 0.75
    unused_gain = 1.0

    def __init__(self, settings: BlockSettings) -> None:
        super().__init__()
        self.settings, self.layer, self.norm = settings, linear(), nn.LayerNorm(WIDTH)
        self.is_skipped, self.residual = False, 0.5

    @property
    def factor(self) -> float:
        return self.residual * type(self).gain

    @classmethod
    def shift(cls, by: float = 0.125) -> float:
        return cls.gain + by

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        return h * GAIN * SHARED_TABLE["gain"]

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.is_skipped:
            return h
        made = self.settings.activation(self.norm(self.layer(h)))
        made = F.leaky_relu(made, self.settings.slope) * self.settings.rates.rate
        made = F.dropout(made, self.settings.drop, training=self.training)
        if self.settings.style is Style.DOUBLE:
            made = made * 2
        for number in self.settings.steps:
            made = made + number * 0.1
        return self.scaled(made) + h * self.factor + self.shift()


class Blocks(nn.Module):
    """Nested modules with common settings: lists, sequences, layers that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = BlockSettings()
        self.first, self.second = linear(), linear()
        self.blocks = nn.ModuleList([Block(self.settings) for _ in range(2)])
        self.row = nn.Sequential(linear(), nn.ReLU(), nn.Dropout(0.1))
        self.again = self.row[0]
        self.order, self.unused = [0, 1], [0]
        self.finish = functools.partial(torch.clamp, max=2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for number in self.order:
            h = self.blocks[number % len(self.blocks)](h)
        h = self.again(self.row(h))
        return self.finish(self.second(h))


class Switched(nn.Module):
    """Layers with modes of their own, and code that asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)])
        self.drop, self.alpha = nn.Dropout(0.2), nn.AlphaDropout(0.1)
        self.middle = linear()
        self.leaky = nn.LeakyReLU(0.1)
        self.group = nn.GroupNorm(2, WIDTH)
        self.is_frozen, self.unused = False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.norms[0](self.first(x)))
        if self.norms[1].training and not self.is_frozen:
            h = h * 1.5
        h = self.leaky(self.norms[1](self.middle(h)))
        if self.middle.weight.requires_grad:
            h = h + 0.25
        if self.training:
            h = self.alpha(h)
        made: torch.Tensor = self.second(self.group(h)).tanh()
        return made


class Counting(nn.Module):
    """Forward changes what it reads: counters, schedules, lists, buffers, hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.calls, self.seen, self.table = 0, [0.5], {"n": 1, "unused": 0}
        self.schedule = deque([1.0, 0.5, 0.25])
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.hidden = torch.zeros(WIDTH)
        self.learned = nn.Parameter(torch.ones(WIDTH))
        self.decay, self.every = 0.9, 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.table["n"] += 2
        self.schedule.rotate()
        h = self.first(x) * self.learned
        if self.training:
            self.mean.mul_(self.decay).add_(h.detach().mean(0) * (1 - self.decay))
            self.count += 1
        if self.every and self.calls % self.every == 0:
            h = h * 1.5
            self.seen.append(self.seen[-1] * 0.5)
        h = h - self.mean + self.hidden * self.schedule[0] + self.seen[-1]
        self.hidden = h.detach().mean(0)
        made: torch.Tensor = self.second(torch.tanh(h)) * (1 + 1 / self.table["n"])
        return made


class Doubled(torch.autograd.Function):
    """A custom function that reads an attribute of its class."""

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * Doubled.factor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * Doubled.factor


class Whole(nn.Module):
    """Kept whole: a branch on values, with numbers from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bound, self.factor, self.unused = linear(), 0.5, 0.5, 0.0
        self.table = {"shift": 0.25}

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = self.layer(h)
        if float(h.detach().norm()) > self.bound:
            h = h * self.factor
        return h + self.table["shift"]


class Kept(nn.Module):
    """Parts that are kept whole, custom functions, and parts that backward runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.whole = gs.opaque(Whole())
        self.again = nn.Sequential(linear(), nn.Tanh())
        self.settings, self.is_again, self.unused = Settings(), True, 0.0

    def damped(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.again(h) * self.settings.scale
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = Doubled.apply(self.whole(self.first(x))) + self.settings.shift
        if self.is_again:
            h = checkpoint(self.damped, h, use_reentrant=False)
        made: torch.Tensor = self.second(h) * self.settings.inner.rate
        return made


class Recurrent(nn.Module):
    """A recurrent layer, attention, an embedding of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)
        self.positions = nn.Parameter(torch.zeros(2, WIDTH))
        self.scale, self.unused, self.uses = 0.5, 0.0, {"gru": True, "attention": True}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.stack([self.first(x), x], 1) + self.positions * self.scale
        if self.uses["gru"]:
            h = self.gru(h)[0]
        if self.uses["attention"]:
            h = self.attention(h, h, h, need_weights=False)[0]
        made: torch.Tensor = self.second(h.sum(1))
        return made


@dataclass(frozen=True)
class Fixed:
    """Nothing can be assigned to it; another one takes its place."""

    rate: float = 0.5
    is_on: bool = True
    steps: tuple[int, ...] = (1, 2)


class Halved:
    """A descriptor: what is read is made of an attribute."""

    def __get__(self, one: Any, kind: Any = None) -> Any:
        return self if one is None else one.whole / 2


def by_hand() -> Any:
    """A module that no import knows."""
    made: Any = ModuleType("changing_by_hand")
    made.gain, made.unused, made.block = 1.25, 0.0, Slotted()
    return made


class Replaced(nn.Module):
    """What is replaced whole, derived, or reached on another way than by an attribute."""

    half = Halved()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.fixed, self.rates, self.pair = Fixed(), Rates(0.5, 0.0), (1.0, 0.5)
        self.scaled = functools.partial(torch.mul, other=0.5)
        self.chain, self.user = ChainMap({}, {"a": 0.5}), UserDict(a=0.5)
        self.counts, self.whole, self.text = Counter(a=1), 1.0, "ab"
        self.hand, self.layers = by_hand(), {"a": nn.Tanh(), "b": nn.Softplus()}
        self.use, self.names = "a", ["first"]
        self.warm_up = 2
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if len(self.names) < self.warm_up:
            h = h * 0.5
        if self.fixed.is_on:
            h = h * self.fixed.rate + sum(self.fixed.steps)
        h = self.scaled(h) * self.rates.rate + self.pair[1] * self.half
        h = h * self.chain["a"] + self.counts["a"] * 0.1 + self.user["a"] + len(self.text)
        h = self.layers[self.use](h * self.hand.gain + self.hand.block.gain)
        for factor in self.factors:
            h = h * factor + getattr(self, self.names[-1]).bias
        if hasattr(self, "another"):
            h = h * 2
        made: torch.Tensor = self.second(h)
        return made * torch.tensor([self.whole, self.pair[0], 1.0, self.fixed.rate])


NETWORKS: tuple[type[nn.Module], ...] = (
    Containers, Blocks, Switched, Counting, Kept, Recurrent, Replaced
)  # fmt: skip


class CountingLoss:
    """A loss that counts its calls, keeps what it was given, and weighs by that."""

    def __init__(self) -> None:
        self.calls, self.seen, self.table, self.unused = 0, [0.0], {"n": 0}, 0.0
        self.schedule, self.beta = [1.0, 0.5, 0.25, 0.125] * 20, 0.5

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.table["n"] += 2
        self.seen.append(self.calls / 7)
        weight = min(1.0, self.calls / 10) + self.table["n"] * self.beta + self.seen[-1]
        return rows_against_target(outputs, target) * weight * self.schedule.pop(0)


class LossModule(nn.Module):
    """A loss with a buffer, a layer and a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.norm, self.power, self.unused = nn.SmoothL1Loss(), 2, 0.0

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale.mul_(0.99)
        made: torch.Tensor = self.norm(outputs.sum(1), target) * self.scale
        return made + outputs.pow(self.power).mean() * 0.01


def closure_loss() -> Callable[..., torch.Tensor]:
    weights, beta = {"a": 1.0, "unused": 0.0}, 0.5

    def loss(
        outputs: torch.Tensor, target: torch.Tensor, power: int = 2, *, shift: float = 0.0
    ) -> torch.Tensor:
        return ((outputs.sum(1) - target + shift).abs() ** power).mean() * weights["a"] * beta

    return loss


def remembering_loss() -> Callable[..., torch.Tensor]:
    """A function whose closure it changes itself, and that calls another one."""
    beta, seen, calls = 0.5, [1.0], 0

    def penalty(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.pow(2).mean() * beta

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        seen.append(seen[-1] * 0.9)
        made = rows_against_target(outputs, target) * seen[-1]
        return made + penalty(outputs) / calls

    return loss


class OfFunction:
    """A loss that is a function with a state; a copy has one of its own."""

    def __init__(self) -> None:
        self.loss = remembering_loss()

    def __deepcopy__(self, memo: Any) -> OfFunction:
        return OfFunction()

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(outputs, target)


LOSSES: tuple[Callable[[], Any], ...] = (CountingLoss, LossModule, closure_loss, OfFunction)
CLASSES: tuple[Any, ...] = (Block, Doubled)
BATCH = 8


def place(net: Any) -> None:
    """The first layer on worker 0, the second on worker 1."""
    net.first.place("MS_WORKER", 0)
    net.second.place("MS_WORKER", 1)


@contextmanager
def shared_state_kept() -> Iterator[None]:
    """Leave classes and globals of this module as they are found, and the generators of Python."""
    classes, table = [dict(vars(one)) for one in CLASSES], dict(SHARED_TABLE)
    names = {name: globals()[name] for name in ("GAIN", "UNUSED_GAIN")}
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
        globals().update(names)
        SHARED_TABLE.clear()
        SHARED_TABLE.update(table)
        for one, found in zip(CLASSES, classes, strict=True):
            for name, value in found.items():
                if name in ("gain", "unused_gain", "factor", "scaled", "shift") and (
                    vars(one)[name] is not value
                ):
                    setattr(one, name, value)
