"""Containers that code kept whole changes, copies and leaves behind are those that the script has.

On every worker, also where that code does not run.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, assert_same_bits, placed, plain
from plain_model import PlainModel
from recovery_helpers import threads_as_workers
from torch import nn

import graphsplit as gs

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


def _changes_and_replaces(part: Any) -> float:
    part.held["inner"]["rate"] *= 0.5
    part.held = copy.deepcopy(part.held)
    return float(part.held["inner"]["rate"])


def _copies(part: Any) -> float:
    part.held = dict(part.held)
    part.held["list"].append(1.0)
    return len(part.held["list"])


def _copies_unchanged(part: Any) -> float:
    part.held = {**part.held}
    return 1.0


def _makes_a_longer_one(part: Any) -> float:
    part.held["list"] = [*part.held["list"], 1.0]
    return len(part.held["list"])


def _exchanges(part: Any) -> float:
    inner, rows = part.held["inner"], part.held["rows"]
    rows[0][0] += 1
    inner["rows"], part.held["rows"] = rows, inner.get("rows", [rows[1], rows[0]])
    part.held["list"] = rows[1]
    return float(rows[0][0])


def _drops(part: Any) -> float:
    found = part.held.pop("list", None)
    if found is not None:
        found.append(5.0)
    return 1.0


def _in_a_queue(part: Any) -> float:
    queue = part.held.setdefault("queue", deque([part.held["list"]], maxlen=3))
    queue.append(queue[0])
    queue[-1].append(1.0)
    return len(queue[0])


def _goes_through_a_set(part: Any) -> float:
    """Its table is as large as when it had a hundred items, so that 2 comes before 65."""
    numbers, made = part.held.setdefault("set", set(range(100))), 0.0
    for number in sorted(numbers - {2, 3, 65}):
        numbers.discard(number)
    for number in numbers:
        made = made * 0.5 + number
    numbers.symmetric_difference_update((3,))
    return made / 100


def _uses_last(part: Any) -> float:
    """As a table does that lets go of what was used longest ago."""
    part.held["list"] = part.held.pop("list")
    part.held["inner"] = part.held.pop("inner")
    return float(len(next(iter(part.held.values()))))


CASES = (
    *(_changes_and_replaces, _copies, _copies_unchanged, _makes_a_longer_one, _exchanges, _drops),
    *(_in_a_queue, _goes_through_a_set, _uses_last),
)


class _Part(nn.Module):
    def __init__(self, change: Callable[[Any], float]) -> None:
        super().__init__()
        self.lin, self.change = nn.Linear(4, 4), change
        self.held: Any = {"list": [1.0], "inner": {"rate": 0.5}, "rows": [[1.0], [2.0]]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.lin(x)
        return made * self.change(self)


def _shown(value: Any, numbers: dict[int, int], held: list[Any]) -> Any:
    """A value, with what is one and the same container in it."""
    if not isinstance(value, (dict, list, deque)):
        return value
    if id(value) in numbers:
        return f"#{numbers[id(value)]}"
    held.append(value)
    numbers[id(value)] = len(numbers)
    inside = [*value, *value.values()] if isinstance(value, dict) else [*value]
    return [type(value).__name__, *(_shown(one, numbers, held) for one in inside)]


@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("change", CASES)
def test_containers_are_those_that_the_script_has(change: Any, microbatches: int) -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        net = nn.Sequential(_Part(change), nn.Linear(4, 2))
        part: Any = gs.opaque(net[0])
        optimizer = torch.optim.SGD(placed(net, list(net), ranks).parameters(), lr=0.1)
        make: Any = PlainModel if distribute is plain else gs.Model
        model = make(net, nn.functional.mse_loss, optimizer, microbatches=microbatches)
        kept: list[Any] = []
        for step in range(4):
            kept += [part.held, *part.held.values()]
            if step == 2:  # one that was made between two steps
                part.held = {**part.held, "list": [7.0]}
            yield float(model.train_step(torch.randn(4, 4), torch.randn(4, 2)))
            yield _shown([*kept, part.held], {}, [])

    assert_same_bits(loop, 2)
