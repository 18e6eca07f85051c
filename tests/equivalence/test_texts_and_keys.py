"""Numbers in tensors that code writes out as a text, takes for a key, or asks for their class."""

from __future__ import annotations

import functools
import io
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

from graphsplit.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore:network or loss reads:UserWarning")
Key = Callable[[torch.Tensor], Any]

KEYS: dict[str, Key] = {
    "f": lambda h: f"{h.mean().item()}",
    "f of a tensor": lambda h: f"{h.mean()}",
    "str": lambda h: str(round(h.mean().item(), 1)),
    "repr": lambda h: repr(h.mean().item() * 2),
    "%s": lambda h: f"class {h.sum(0).argmax().item()!s}",
    "in a list": lambda h: str([h.sum(0).argmax().item()]),
    "json": lambda h: json.dumps({"mean": h.mean().item()}),
    "number": lambda h: h.sum(0).argmax().item(),
    "part": lambda h: (h.sum(0).argmax().item() // 2, "half"),
    "truth": lambda h: f"{(h.mean() > 0).item()}",
}


def width_of(number: Any) -> int:
    assert isinstance(number, (int, float))
    return 1 if isinstance(number, float) else 2 if type(number) is int else 3


class Memo(nn.Module):
    """Counts how often it has met a key, and computes with that."""

    def __init__(self, key: Key) -> None:
        super().__init__()
        self.key = key
        self.met: dict[Any, int] = {}

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        key = self.key(h)
        self.met[key] = self.met.get(key, 0) + 1
        return h * (1 + 0.1 * self.met[key]) + 0.01 * len(self.met) + 0.001 * len(str(key))


class Inside(nn.Module):
    """A module around one that asks, or that raises: the code that is recorded comes back to it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.after = inner, nn.Linear(4, 4)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        try:
            h = self.inner(h)
        except ValueError:
            h = h * 2
        return torch.as_tensor(self.after(h))


class Raising(nn.Module):
    """Refuses every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 2:
            raise ValueError("an odd call")
        return torch.as_tensor(self.layer(h))


class Net(nn.Module):
    """Two layers on two workers; the code between them is the network's own, or a module's."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(3, 4), between, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.last(self.between(self.first(x))))


class OwnCode(Net):
    """Keeps what it meets in its own forward."""

    def __init__(self, key: Key) -> None:
        super().__init__(nn.Identity())
        self.key, self.met = key, Counter[Any]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.met[self.key(h)] += 1
        return torch.as_tensor(self.last(h) * len(self.met))


def same(make: Callable[[], nn.Module], **options: Any) -> None:
    def place(net: Any) -> None:
        net.first.place("MS_WORKER", 0)
        net.last.place("MS_WORKER", 1)

    given: dict[str, Any] = {
        "batches": batches_of(8, 3, num=3),
        "loss_fn": against_target,
        "microbatches": 4,
        "evaluate_after": (0,),
        "plan_everywhere": True,
    }
    assert_same_bits(make, num_workers=2, place=place, **(given | options))


def against_target(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, target.reshape(len(outputs), -1)[:, 0].long().abs() % 3)


@pytest.mark.parametrize("key", KEYS)
def test_a_module_keeps_values_by_their_text(key: str) -> None:
    same(lambda: Net(Memo(KEYS[key])))


TEXTS: dict[str, Key] = {
    "f": lambda h: f"{h[0]}",
    "str": lambda h: str(h.sum()),
    "repr in a list": lambda h: repr([h.detach()]),
    "format": lambda h: f"{h:}",
    "!s": lambda h: f"class {h.sum(0)!s}",
    "print": lambda h: print(h, file=(file := io.StringIO())) or file.getvalue(),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_module_writes_out_a_tensor(text: str) -> None:
    """It wrote out what stands for the tensor while it is recorded."""
    same(lambda: Net(Memo(TEXTS[text])))


@pytest.mark.parametrize("text", TEXTS)
def test_a_network_that_writes_out_a_tensor_is_refused(text: str) -> None:
    with pytest.raises(CaptureError, match=r"writes out a tensor(.|\n)*test_texts_and_keys.py:\d"):
        same(lambda: OwnCode(TEXTS[text]))


@pytest.mark.parametrize("key", ["f", "f of a tensor", "number", "truth"])
def test_code_of_several_workers_keeps_values_by_their_text(key: str) -> None:
    same(lambda: OwnCode(KEYS[key]), microbatches=1)


def test_a_module_inside_another_asks() -> None:
    same(lambda: Net(Inside(Inside(Memo(KEYS["number"])))))


def test_a_module_goes_on_after_one_inside_has_raised() -> None:
    same(lambda: Net(Inside(Raising())))


class WeightedRows:
    """A loss that keeps a weight for each sample, and a sum of what it has told."""

    def __init__(self) -> None:
        self.weights: dict[int, float] = {}
        self.sum = 0.0

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows = target.reshape(len(outputs), -1)[:, 0].mul(10).long()
        found = F.cross_entropy(outputs, rows.abs() % 3, reduction="none")
        weight = torch.tensor([self.weights.get(row, 1.0) for row in rows.tolist()])
        for row, one in zip(rows.tolist(), found.detach().tolist(), strict=True):
            self.weights[row] = 0.5 * self.weights.get(row, 1.0) + 0.5 * one
        number = found.mean().item()
        assert isinstance(number, float)
        self.sum += number
        return (weight * found).mean() * (1 + 0.01 * self.sum)


def test_a_loss_keeps_a_weight_for_each_sample() -> None:
    same(lambda: Net(nn.Identity()), loss_fn=WeightedRows(), evaluate_after=())


def test_a_number_of_a_tensor_has_the_class_that_it_has_in_eager_mode() -> None:
    def between(h: torch.Tensor) -> torch.Tensor:
        return h * width_of(h.mean().item()) + width_of(h.sum(0).argmax().item())

    same(lambda: Net(between))


class OfItsCounter(nn.Module):
    """Finds something under the text of a number only now and then."""

    def __init__(self, key: Callable[[int], Any]) -> None:
        super().__init__()
        self.key, self.calls = key, 0
        self.found = {key(number): number / 10 for number in range(0, 12, 3)}

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return h + self.found.get(self.key(self.calls), 0.0)


@pytest.mark.parametrize("key", [str, "{}".format, lambda n: f"{n // 3}:{n % 3}", repr])
def test_a_lifted_number_has_its_own_text(key: Callable[[int], Any]) -> None:
    same(lambda: Net(OfItsCounter(key)), batches=batches_of(8, 3, num=8), microbatches=1)


@pytest.mark.parametrize("key", [str, repr, lambda n: n, lambda n: f"{n + 1}"])
def test_a_size_that_may_change_has_its_own_text(key: Callable[[int], Any]) -> None:
    rates = {key(size): size / 10 for size in (4, 6, 9)}

    def between(h: torch.Tensor) -> torch.Tensor:
        return h * (1 + rates.get(key(h.shape[0]), 0.0))

    given = [batches_of(size, 3, num=1)[0] for size in (3, 5, 7, 4, 6, 9)]
    same(lambda: Net(between), batches=given, microbatches=1, dynamic_dims={0: 16})


@functools.cache
def rate_of(step: int) -> float:
    return 1 / (step + 1)


@functools.lru_cache(maxsize=2)
def rate_of_few(step: int) -> float:
    return 1 / (step + 1)


class Scheduled(nn.Module):
    """Asks a function that keeps its results for the rate of a step."""

    def __init__(self, rate: Callable[[int], float]) -> None:
        super().__init__()
        self.layer, self.rate, self.step = nn.Linear(4, 4), rate, 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.step += 1
        made: torch.Tensor = self.layer(h) * self.rate(self.step)
        return made


@pytest.mark.parametrize("rate", [rate_of, rate_of_few])
def test_a_function_that_keeps_its_results_is_asked_with_another_number_each_step(
    rate: Callable[[int], float],
) -> None:
    """It kept one under the number that stands for all while a step is recorded."""
    rate_of.cache_clear()
    rate_of_few.cache_clear()
    assert_same_bits(
        lambda: Scheduled(rate),
        batches_of(8, 4, num=5),
        num_workers=2,
        place=lambda net: net.layer.place("MS_WORKER", 1),
        loss_fn=rows_against_target,
    )
