"""Random expressions of numbers that change at each step: the plain loop's bits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 9
_OF_ONE = (
    *("abs({})", "-({})", "round({})", "round({}, 1)", "round({}, -1)", "math.cos({})"),
    *("math.exp(-abs({}))", "math.sqrt(abs({}))", "math.floor({})", "np.exp(-abs({}))"),
    *("np.cos({})", "math.atan({})", "math.log1p(abs({}))", "({}) ** 2", "({}) ** 0.5"),
    *("math.fmod({}, 0.3)", "math.trunc({})", "math.copysign(0.7, {})", "np.maximum({}, 0.2)"),
)
_OF_TWO = (
    *("({}) + ({})", "({}) - ({})", "({}) * ({})", "({}) / ({})", "({}) // ({})", "({}) % ({})"),
    *("min({}, {})", "max({}, {})", "math.atan2({}, {})", "np.power(abs({}), {})"),
    *("({0} if {0} < {1} else {1})", "({0} if ({0} and {1} > 0.3) else 1.5)"),
)
_KINDS: tuple[Callable[[random.Random], Any], ...] = (
    lambda draw: draw.choice((draw.uniform(-2, 2), round(draw.uniform(0, 1), 1))),
    lambda draw: draw.randrange(60),
    lambda draw: np.float32(draw.choice((draw.uniform(-2, 2), 0.1 * draw.randrange(20)))),
    lambda draw: np.float64(draw.uniform(-2, 2)),
    lambda draw: np.int64(draw.randrange(60)),
)


def expression(draw: random.Random, depth: int) -> str:
    if depth == 0:
        return draw.choice(("number", "number", "other", "0.1", "3", "0.7", "7", "2.5"))
    first = expression(draw, depth - 1)
    if draw.random() < 0.5:
        return draw.choice(_OF_ONE).format(first)
    return draw.choice(_OF_TWO).format(first, expression(draw, draw.randrange(depth)))


def drawn(seed: int) -> tuple[str, Callable[[Any, Any], Any], list[tuple[Any, Any]]]:
    """An expression, the function that it is, and the numbers of each step."""
    draw = random.Random(seed)
    while True:
        kind, other = draw.choice(_KINDS), draw.choice(_KINDS[:2])
        numbers = [(kind(draw), other(draw)) for _ in range(STEPS)]
        code = expression(draw, draw.randrange(1, 4))
        held: dict[str, Any] = {"math": math, "np": np}
        exec(f"def compute(number, other):\n    return {code}", held)
        if changes_and_is_finite(held["compute"], numbers):
            return code, held["compute"], numbers


def changes_and_is_finite(compute: Callable[[Any, Any], Any], numbers: list[Any]) -> bool:
    try:
        with np.errstate(all="ignore"):
            found = [float(compute(*pair)) for pair in numbers]
    except (ArithmeticError, ValueError, TypeError):
        return False
    return len(set(found)) > 2 and all(math.isfinite(one) and abs(one) < 1e5 for one in found)


class Net(nn.Module):
    def __init__(self, compute: Callable[[Any, Any], Any], numbers: tuple[Any, Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.compute, (self.number, self.other) = compute, numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.compute(self.number, self.other)
        made: torch.Tensor = self.second(torch.tanh(self.first(x) * factor))
        return made


@pytest.mark.parametrize(
    "seed", [0, 1, 2, 3, *(pytest.param(seed, marks=pytest.mark.fuzz) for seed in range(4, 200))]
)
def test_what_python_computes_of_numbers_has_the_bits_of_the_plain_loop(seed: int) -> None:
    code, compute, numbers = drawn(seed)
    print(code)

    def change(step: int, net: Any, loss_fn: Any) -> None:
        net.number, net.other = numbers[step]

    assert_same_bits(
        lambda: Net(compute, numbers[0]),
        batches_of(4, 3),
        steps=STEPS,
        num_workers=1,
        loss_fn=rows_against_target,
        before_step=change,
        plan_everywhere=True,
        evaluate_after=(),
    )
