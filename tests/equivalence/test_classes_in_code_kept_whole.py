"""Code kept whole finds the classes of eager mode, and is found where a library asks for values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

QUESTIONS: dict[str, Callable[[torch.Tensor], bool]] = {
    "isinstance": lambda weight: isinstance(weight, nn.Parameter),
    "type": lambda weight: type(weight) is nn.Parameter,
    "class": lambda weight: weight.__class__ is nn.Parameter,
}


class Inner(nn.Module):
    """Asks for values, so that it is kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.prepared(x)
        made: torch.Tensor = self.linear(-x if x.sum() > 0 else x)
        return made

    def prepared(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Between(nn.Module):
    """Uses one module before and behind another."""

    inner: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(self.between(self.inner(self.first(x))))
        return made


def _assert_same(make: Callable[[], nn.Module], kept_whole: str) -> None:
    def place(net: Any) -> None:
        for name, module in net.named_children():
            module.place("MS_WORKER", int(name == kept_whole))

    assert_same_bits(
        make, batches_of(4, 8), num_workers=2, place=place, loss_fn=rows_against_target
    )


def _between(make_inner: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Between()
        net.inner = make_inner()
        return net

    return make


def _behind(make_inner: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 8), make_inner())


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_parameter_that_several_segments_use_is_one(question: str) -> None:
    class Asking(Inner):
        def prepared(self, x: torch.Tensor) -> torch.Tensor:
            return x * (2 if QUESTIONS[question](self.linear.weight) else 3)

    _assert_same(_between(Asking), "inner")


def _is_plain(x: torch.Tensor) -> bool:
    return type(x) is torch.Tensor


def test_a_function_that_only_code_kept_whole_calls_is_told_so() -> None:
    class Doubling(Inner):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = super().forward(x)
            return torch.cat((made, made), 1) if _is_plain(x) else made

    _assert_same(_behind(Doubling), "1")


def test_a_generator_may_be_seeded_with_the_value_of_a_tensor() -> None:
    # residual_vq.py of vector-quantize-pytorch: how many quantizers a step uses.
    class Seeded(Inner):
        def prepared(self, x: torch.Tensor) -> torch.Tensor:
            seed = torch.randint(0, 10_000, ()).item()
            return x * random.Random(seed).randrange(1, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.linear(self.prepared(x))
            return made

    _assert_same(_behind(Seeded), "1")
