"""Code that asks which tensor it has, or of which class: as in eager mode."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone_helpers import assert_as_alone
from plain_model import PlainModel
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.equivalence import assert_same_bits
from torch import nn

import graphsplit as gs
from graphsplit.errors import CaptureError

assert threads_as_workers
pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:network or loss reads:UserWarning"),
]
INPUTS = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(4, 8, 2, generator=torch.Generator().manual_seed(2))
BATCHES = list(zip(INPUTS, TARGETS, strict=True))


@functools.lru_cache(None)
def rate_of(parameter: nn.Parameter) -> float:
    return 0.5


class Gained(nn.Parameter):
    gain = 1.5

    def doubled(self) -> torch.Tensor:
        return 2 * self.sum()


def once(net: Any, one: Any) -> bool:
    """Whether something is there already; it is from now on."""
    is_there = one in net.seen
    net.seen.add(one)
    return is_there


ASKED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "rate of": lambda net, h: net.rates.get(net.first.weight, 0.5),
    "rate of a buffer": lambda net, h: net.rates.get(net.scale, 0.5),
    "in a set": lambda net, h: 2 if net.first.weight in net.frozen else 1,
    "by identity": lambda net, h: net.by_id.get(id(net.first.weight), 0.5),
    "not there": lambda net, h: 2 if id(net.first.bias) in net.by_id else 1,
    "kept results": lambda net, h: rate_of(net.first.weight),
    "put into a set": lambda net, h: 2 if once(net, net.first.weight) else 1,
    "identity put there": lambda net, h: 2 if once(net, id(net.first.weight)) else 1,
    "class": lambda net, h: 2 if type(h) is torch.Tensor else 1,
    "class of a parameter": lambda net, h: 2 if type(net.first.weight) is nn.Parameter else 1,
    "class by an attribute": lambda net, h: 2 if h.__class__ is torch.Tensor else 1,
    "class of a parameter by an attribute": lambda net, h: len(net.first.weight.__class__.__name__),
    "name of a class": lambda net, h: len(type(h).__name__),
    "a class itself": lambda net, h: 2 if isinstance(nn.Linear, type) else 1,
    "parameters by identity": lambda net, h: len({id(p) for p in net.parameters()}),
    "equal numbers": lambda net, h: (net.first.weight == net.first.weight).float().mean(),
}


class Net(nn.Module):
    def __init__(self, asked: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)
        self.register_buffer("scale", torch.ones(3))
        if hasattr(nn.Module, "place"):
            self.first.place("MS_WORKER", 0)
            self.second.place("MS_WORKER", 1)
        self.asked, self.seen = asked, set()
        self.rates = {self.first.weight: 0.9, self.scale: 0.8}
        self.frozen, self.by_id = {self.first.weight}, {id(self.first.weight): 0.9}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        made: torch.Tensor = self.second(h * self.asked(self, h))
        return made


class KeptByIdentity:
    """A descriptor that keeps a value for each object, as some libraries have them."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def __get__(self, one: Any, kind: Any = None) -> Any:
        return self if one is None else self.values.get(id(one), 0.5)

    def __set__(self, one: Any, value: float) -> None:
        self.values[id(one)] = value


@pytest.mark.parametrize("writes", [False, True])
def test_values_kept_by_identity_are_the_same_on_all_workers(writes: bool) -> None:
    def scaled(net: Any, h: torch.Tensor) -> float:
        if writes:
            net.held.rate = net.held.rate * 0.9
        rate: float = net.held.rate
        return rate

    def train(make: Any) -> Any:
        class Held:  # each worker has its own
            rate = KeptByIdentity()

        torch.manual_seed(0)
        net = Net(scaled)
        net.held = Held()
        model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        found = []
        for step, batch in enumerate(BATCHES):
            net.held.rate = 0.7 + step // 2
            found.append((model.train_step(*batch).clone(), model.predict(batch[0])))
        return copy.deepcopy([found, model.state_dict(), net.held.rate])

    assert_as_alone(lambda: train(PlainModel), lambda: train(gs.Model))


@pytest.mark.parametrize("asked", ASKED)
def test_the_answers_are_those_of_eager_mode(asked: str) -> None:
    def train(make: Any) -> Any:
        torch.manual_seed(0)
        net = Net(ASKED[asked])
        model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        found = [(model.train_step(*batch).clone(), model.predict(batch[0])) for batch in BATCHES]
        return copy.deepcopy([found, model.state_dict()])

    assert_as_alone(lambda: train(PlainModel), lambda: train(gs.Model))


OF_A_CLASS: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda net: net.own.gain,
    "of the class itself": lambda net: Gained.gain,
    "of its type": lambda net: type(net.own).gain,
    "a method": lambda net: net.own.doubled(),
    "isinstance": lambda net: 2 if isinstance(net.own, Gained) else 1,
    "type": lambda net: 2 if type(net.own) is Gained else 1,
    "isinstance of another": lambda net: 2 if isinstance(net.first.weight, Gained) else 1,
}


@pytest.mark.parametrize("asked", OF_A_CLASS)
def test_a_class_derived_from_parameters_is_asked(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(make: Any) -> Any:
        torch.manual_seed(0)
        net = Net(lambda net, h: OF_A_CLASS[asked](net) * net.own)
        net.own = Gained(torch.ones(5))
        model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        found = []
        for step, batch in enumerate(BATCHES):
            Gained.gain = 1.5 + step // 2
            found.append((model.train_step(*batch).clone(), model.predict(batch[0])))
        return copy.deepcopy([found, model.state_dict()])

    monkeypatch.setattr(Gained, "gain", 1.5)
    assert_as_alone(lambda: train(PlainModel), lambda: train(gs.Model))


class _Twice(nn.Module):
    """A module that stands in three places; it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList([self.first, nn.Tanh(), self.first])
        self.rates = {self.first: 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.rates.get(layer, 1.0)
            if layer is self.first and type(layer) is nn.Linear:
                x = x + 0.1
        made: torch.Tensor = self.second(x)
        return made * len(list(self.layers.children())) * len(set(self.layers))


def test_a_module_in_several_places_is_itself() -> None:
    def place(net: Any) -> None:
        net.second.place("MS_WORKER", 1)

    assert_same_bits(
        _Twice, BATCHES, num_workers=2, place=place, loss_fn=F.mse_loss, plan_everywhere=True
    )


def test_a_tensor_that_becomes_a_key_is_refused() -> None:
    def count(net: Any, h: torch.Tensor) -> float:
        net.rates[net.second.weight] = net.rates.get(net.second.weight, 1.0) * 0.9
        found: float = net.rates[net.second.weight]
        return found

    def run(rank: int) -> None:
        net = Net(count)
        gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05)).train_step(
            *BATCHES[0]
        )

    with pytest.raises(CaptureError, match=r"puts a tensor into net\.rates as a key"):
        ThreadCluster(run, 2, is_recoverable=False).run()


class _Masked(nn.Module):
    """Leaves a mask out that masks nothing, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        if mask.sum() == mask.numel():
            return h.sum()
        return (h * mask).sum()


def test_what_is_known_of_a_mask_is_compared() -> None:
    ones, other = torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 0, 1], [1, 1, 1]])
    batches = [(torch.randn(2, 3), ones), (torch.randn(2, 3), ones)]
    cut = {"num_workers": 2, "place": lambda net: net.fc.place("MS_WORKER", 1)}
    assert_same_bits(_Masked, batches, **cut)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        assert_same_bits(_Masked, [(torch.randn(2, 3), other)], **cut)  # type: ignore[arg-type]
