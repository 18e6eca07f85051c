"""Whatever a network takes and returns, it takes and returns on every worker."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from simulated.equivalence import assert_same_bits
from simulated.scattered import Scattered
from simulated.simulate import Captures, SimulatedCluster
from torch import nn

from graphsplit.errors import CaptureError, ConfigurationError
from graphsplit.planning.task import Task
from graphsplit.train.model import Model


@dataclasses.dataclass
class Features:
    left: torch.Tensor
    right: torch.Tensor
    scale: float = 1.0
    mask: torch.Tensor | None = None


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


class Network(nn.Module):
    """Two layers; what happens between them is told by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)


def on_two(network: Any) -> None:
    network.first.place("MS_WORKER", 1)
    network.last.place("MS_WORKER", 0)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def same_over_two(make: type[nn.Module], batch: Any, **options: Any) -> None:
    captures = Captures()
    assert_same_bits(make, [batch] * 2, num_workers=2, place=on_two, captures=captures, **options)
    scattered = Scattered(captures, seed=5, num_workers=3)
    assert_same_bits(make, [batch] * 2, num_workers=3, captures=scattered, **options)


def test_keyword_inputs_in_another_order_than_that_of_the_alphabet() -> None:
    # The example that was captured had them sorted: inputs were mixed up without a word.
    class Ordered(Network):
        def forward(self, wide, labels, narrow=None):
            return F.mse_loss(self.last(self.first(wide) * narrow), labels)

    batch = {"wide": numbers(2, 4), "narrow": numbers(4), "labels": numbers(2, 4) * 2}
    same_over_two(Ordered, batch)


def test_inputs_in_containers_of_every_kind() -> None:
    class Contained(Network):
        def forward(self, features, pair, nested, *, ordered, extra=None):
            h = self.first(features.left) * features.scale + features.right
            if features.mask is not None:
                h = h * features.mask
            for name, value in nested["more"].items():
                h = h + value * len(str(name))
            h = h + pair.first * pair.second["by"] + nested["list"][1][0]
            for value in ordered.values():
                h = h * value
            return (self.last(h) + (0.0 if extra is None else extra)).square().mean()

    batch = {
        "features": Features(numbers(2, 4), numbers(2, 4) + 1, scale=0.5),
        "pair": Pair(numbers(4), {"by": 3}),
        "nested": {"list": [None, (numbers(2, 4),)], "more": {2: numbers(4), 1: numbers(2, 1)}},
        "ordered": OrderedDict(z=numbers(4) + 2, a=numbers(2, 4)),
    }
    same_over_two(Contained, batch)


def test_inputs_of_every_number_type_empty_and_without_dimension() -> None:
    class Typed(Network):
        def forward(self, x, flags, counts, half, brain, plane, nothing, point):
            h = self.first(x) * flags + counts.sum() + half.float() + brain.float()
            h = h * torch.view_as_real(plane).sum(-1) + nothing.sum() * 2
            return (self.last(h) * point).abs().mean()

    same_over_two(
        Typed,
        (
            numbers(2, 4),
            numbers(2, 4) > 0,
            torch.arange(3, dtype=torch.int16),
            numbers(4).half(),
            numbers(2, 4).bfloat16(),
            torch.complex(numbers(4), numbers(4) * 2),
            torch.zeros(0, 4),
            torch.tensor(0.5),
        ),
    )


class Bag:
    """A plain object, like the caches that language models return."""

    def __init__(self, first: torch.Tensor, others: list[torch.Tensor]) -> None:
        self.first = first
        self.others = others
        self.kind = torch.float32
        self.count = len(others)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Outputs(OrderedDict[str, Any]):
    """Fields by name and by attribute, like the outputs of transformers."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


Point = namedtuple("Point", ["x", "y"])


def test_objects_that_networks_return_come_out_on_every_worker() -> None:
    class Objects(Network):
        def forward(self, x):
            h = self.first(x)
            last = self.last(torch.tanh(h))
            return Outputs(
                loss=last.square().mean(),
                cache=Bag(h, [last, h * 2]),
                slotted=[Slotted(h.sum(0))],
                features=Features(last, h, mask=None),
                point=Point(x, {"none": None, 1: "text"}),
                number=3,
                dtype=h.dtype,
            )

    same_over_two(Objects, (numbers(2, 4),))


@pytest.mark.parametrize("kind", ["module", "circle", "generator"])
def test_what_cannot_be_taken_apart_is_refused_with_its_place(kind: str) -> None:
    class Strange(Network):
        def forward(self, x):
            h = self.last(self.first(x))
            bag = Bag(h, [h])
            found = {"module": self.first, "circle": bag, "generator": (v for v in (h,))}
            bag.first = bag  # type: ignore[assignment]
            return {"loss": h.sum(), "more": [found[kind]]}

    with pytest.raises(CaptureError, match=r"at outputs.*\['more'\]\[0\].*which cannot be"):
        assert_same_bits(Strange, [(numbers(2, 4),)], num_workers=2, place=on_two)


def test_values_that_no_signature_can_tell_are_refused() -> None:
    class Key(Network):
        def forward(self, table):
            return self.last(self.first(table[None])).sum()

    with pytest.raises(ConfigurationError, match="key of type NoneType; expected str or int"):
        assert_same_bits(Key, [({None: numbers(2, 4)},)], num_workers=2, place=on_two)


LOSSES = {
    "detached": (lambda weight, x: (weight.sum() * x.sum()).detach(), "depends on no parameter"),
    # Without an operation there is no backward; with a view of it, the optimizer changes the loss.
    "itself": (lambda weight, x: weight, r"is (weight|a parameter) itself, or a view of it"),
    "view": (lambda weight, x: weight.view(1)[0], r"is (weight|a parameter) itself, or a view"),
    "reshaped": (lambda weight, x: weight.reshape(()), r"is (weight|a parameter) itself, or a v"),
}


def bare(kind: str) -> nn.Module:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return LOSSES[kind][0](self.weight, x)

    return Bare()


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_nothing_can_be_trained_by_is_refused(kind: str) -> None:
    def make_task() -> Task:
        network = bare(kind)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        return Task(network, None, optimizer, "affinity", with_loss=False)

    with pytest.raises(ConfigurationError, match=LOSSES[kind][1]):
        SimulatedCluster(make_task, 2).train_step(((numbers(2),), {}))
    network = bare(kind)
    model = Model(network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match=LOSSES[kind][1]):
        model.train_step(numbers(2))


def test_a_loss_that_may_only_seem_to_be_a_parameter_is_trained_by() -> None:
    class Branching(Network):
        def forward(self, x):
            def weights(v):
                return self.first.weight.sum() * self.last.weight.sum()

            return torch.cond(x.sum() > 0, lambda v: self.last(self.first(v)).sum(), weights, (x,))

    same_over_two(Branching, (numbers(2, 4).abs(),))


def test_a_value_that_goes_back_and_forth_thirty_times() -> None:
    class Zigzag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for step in range(30):
                x = torch.tanh(self.layers[step % 3](x)) + x * 0.5
            return x

    assert_same_bits(
        Zigzag,
        [(numbers(2, 4), numbers(2, 4))] * 2,
        num_workers=3,
        place=lambda net: [layer.place("MS_WORKER", i) for i, layer in enumerate(net.layers)],
        loss_fn=F.mse_loss,
    )
