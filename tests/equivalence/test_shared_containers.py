"""One list, dictionary or array in two places: whether it is one, and what changes it, counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

from graphsplit.errors import CaptureError
from graphsplit.planning.python_values import can_be_written

Forward = Callable[[Any, torch.Tensor], torch.Tensor]
Script = Callable[[int, Any], object]


class Holds(nn.Module):
    """Its factor is what a case makes of two containers."""

    def __init__(self, forward: Forward, first: Any, second: Any) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.x, self.y, self.calls, self.made_of = first, second, 0, forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.other(self.made_of(self, torch.tanh(self.one(x))))
        return made


def _place(net: Any) -> None:
    net.one.place("MS_WORKER", 0)
    net.other.place("MS_WORKER", 1)


def _asks_whether_one(net: Any, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if net.x is net.y else h


def _changes_one(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.x[0] += 0.125
    return h * (1 + sum(net.y))


def _makes_one(net: Any, h: torch.Tensor) -> torch.Tensor:
    made = h * (1 + sum(net.y))
    net.x[0] += 0.125
    net.y = net.x
    return made


def _makes_one_once(net: Any, h: torch.Tensor) -> torch.Tensor:
    made = h * (1 + sum(net.y))
    if net.calls == 1:
        net.y = net.x
    net.calls += 1
    return made


def _parts(net: Any, h: torch.Tensor) -> torch.Tensor:
    made = h * (1 + sum(net.y))
    net.y = list(net.y)
    net.x[0] += 0.125
    return made


def _makes_one_anew(net: Any, h: torch.Tensor) -> torch.Tensor:
    made = h * (sum(net.y) + sum(net.x))
    if net.calls == 1:
        net.x = net.y = [1.0]
    net.calls += 1
    return made


def _joins(step: int, net: Any) -> None:
    if step == 2:
        net.y = net.x
    if step == 4:
        net.y = net.x.copy()


def _writes(step: int, net: Any) -> None:
    if step > 2:
        net.x[0] = 0.5 + step


def _exchanges(net: Any, h: torch.Tensor) -> torch.Tensor:
    """They may hold the same before, or afterwards."""
    net.x, net.y = net.y, net.x
    net.y.add(len(net.y))
    net.y.add(len(net.y))
    return h * (1 + sum(net.x)) / (1 + sum(net.y))


def _writes_in_turn(step: int, net: Any) -> None:
    if step == 1:
        net.x = {1, 2}
    if step == 3:
        net.x.discard(1)
    if step == 4:
        net.x.add(7)


def _puts_another_inside(net: Any, h: torch.Tensor) -> torch.Tensor:
    h = h * net.x["y"]["z"]
    net.x["y"] = {"z": len(net.y)}
    net.x["y"]["z"] = net.x["y"].get("z", 1) * 0.75
    return h * (1 + net.x["y"]["z"])


def _makes_the_same(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.x = list(net.x)
    return h * (1 + sum(net.x))


def _writes_into_what_was_there(step: int, net: Any) -> None:
    net.y[0].append(0.5)  # no longer the network's
    net.y[0] = net.x


def _leaves_one_behind(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.x.append(0.125)
    net.x = net.x[-3:]
    return h * (1 + sum(net.x)) * (1 + sum(net.y))


def _keeps_it(step: int, net: Any) -> None:
    if id(net) in _kept:
        net.y[0] = sum(_kept[id(net)])
    _kept[id(net)] = net.x


_kept: dict[int, list[float]] = {}


def _turns_keys(net: Any, h: torch.Tensor) -> torch.Tensor:
    """The items stay as they are, and in their order."""
    key = next(iter(net.x))
    net.x[1 - key] = net.x.pop(key)
    return h * (1 + key)


def _turns_and_exchanges(net: Any, h: torch.Tensor) -> torch.Tensor:
    """A kept tensor has it recorded twice."""
    held = net.x()
    held.one.reverse()
    held.one, held.other = held.other, held.one
    made: torch.Tensor = h * net.y()
    net.calls = made.detach().mean()
    return made


def _read_by_position() -> tuple[Any, Any]:
    """What a function reads was changed before it is called, in another place."""
    held = SimpleNamespace(one=[0.5, 2.0], other=[0.5, 2.0])
    return (lambda: held), (lambda: held.other[-1])


def _in_itself(net: Any, h: torch.Tensor) -> torch.Tensor:
    return h * net.x.held[1][1][0] * net.y.held["y"]["scale"]


def _writes_in_itself(step: int, net: Any) -> None:
    if step > 2:
        net.x.held[0] = net.y.held["scale"] = 0.5 + step


def _holding_themselves() -> tuple[Any, Any]:
    x: list[Any] = [1.0]
    y: dict[str, Any] = {"scale": 2.0}
    x.append(x)
    y["y"] = y
    return SimpleNamespace(held=x), SimpleNamespace(held=y)


class _State:
    def __init__(self, shared: list[float]) -> None:
        self.calls, self.seen, self.shared = 0.0, [1.0], shared


def _makes_an_object(net: Any, h: torch.Tensor) -> torch.Tensor:
    if net.x is None:
        net.x = _State(net.y)
    net.x.calls += 0.5
    net.x.seen.append(net.x.calls)
    net.x.shared[0] += 0.25
    return h * (net.x.calls + sum(net.x.seen) + sum(net.y))


def _lets_go_of_it(step: int, net: Any) -> None:
    if step % 2 == 0:
        net.x, net.y[0] = None, 1.0


def _puts_it_in_another_place(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.y = net.x
    return h * (1 + sum(net.x))


def _parts_and_writes(step: int, net: Any) -> None:
    if step % 2:
        net.x = [*net.x]
    else:
        net.y[0] += 0.5


def _nothing(step: int, net: Any) -> None:
    pass


def _turns_a_third_on_and_off(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.x.symmetric_difference_update((3,))
    for number in net.x:
        h = torch.tanh(h * (1 + number))
    return h


def _set_that_was_large() -> tuple[set[int], list[float]]:
    """Its table is still as large, so that 2 comes before 65."""
    large = set(range(100))
    for number in range(100):
        if number not in (2, 65):
            large.discard(number)
    return large, []


def _leaves_new_ones_and_reads_them(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.x = {"a": [net.y, {"b": (net.y,)}]}
    net.y += 1
    made: torch.Tensor = h * net.x["a"][1]["b"][0]
    return made


def _finds_new_ones(step: int, net: Any) -> None:
    """What it has written to is no part of what the next step leaves."""
    last = net.y - 1
    assert not step or net.x == {"a": [last, {"b": (last,)}]}, net.x
    if step:
        net.x["a"].append(step)


CASES: dict[str, tuple[Forward, Script, Callable[[], tuple[Any, Any]]]] = {
    "new ones that forward reads": (
        *(_leaves_new_ones_and_reads_them, _finds_new_ones),
        lambda: (None, 1),
    ),
    "new ones of microbatches": (
        *(_leaves_new_ones_and_reads_them, _finds_new_ones),
        lambda: (None, 1.0),
    ),
    "asked": (_asks_whether_one, _joins, lambda: ([1.0], [1.0])),
    "joined by the script": (_changes_one, _joins, lambda: ([1.0], [1.0])),
    "arrays": (_changes_one, _joins, lambda: (np.ones(2), np.ones(2))),
    "joined by forward": (_makes_one, _writes, lambda: ([1.0], [1.0])),
    "joined once": (_makes_one_once, _writes, lambda: ([1.0], [1.0])),
    "a new one, once": (_makes_one_anew, _writes, lambda: ([1.0], [1.0])),
    "parted by forward": (_parts, _nothing, lambda: ([one := [1.0], one])),
    "another inside": (_puts_another_inside, _nothing, lambda: ({"y": {"z": 0.5}}, [1.0])),
    "exchanged": (_exchanges, _writes_in_turn, lambda: ({1, 2}, set())),
    "made again": (_makes_the_same, _writes_into_what_was_there, lambda: ([1.0], [[]])),
    "left behind": (_leaves_one_behind, _keeps_it, lambda: ([1.0], [1.0])),
    "other keys": (_turns_keys, _nothing, lambda: ({0: 1.0}, [])),
    "other keys of microbatches": (_turns_keys, _nothing, lambda: ({0: 1.0}, [])),
    "turned and exchanged": (_turns_and_exchanges, _nothing, _read_by_position),
    "in an object that forward makes": (_makes_an_object, _lets_go_of_it, lambda: (None, [1.0])),
    "in an object that microbatches make": (
        *(_makes_an_object, _lets_go_of_it),
        lambda: (None, [1.0]),
    ),
    "a set that was large": (_turns_a_third_on_and_off, _nothing, _set_that_was_large),
    "parted by the script": (
        *(_puts_it_in_another_place, _parts_and_writes),
        lambda: ([one := [1.0], one]),
    ),
    "in itself": (_in_itself, _writes_in_itself, _holding_themselves),
}


@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize(("case", "microbatches"), list(zip(CASES, [1, 4] * 11, strict=False)))
def test_a_container_in_two_places_is_one(case: str, microbatches: int) -> None:
    _follows(*CASES[case], microbatches)


def _follows(forward: Forward, script: Script, containers: Any, microbatches: int = 1) -> None:
    assert_same_bits(
        lambda: Holds(forward, *containers()),
        batches_of(8, 8),
        steps=5,
        num_workers=2,
        place=_place,
        loss_fn=rows_against_target,
        microbatches=microbatches,
        before_step=lambda step, net, loss_fn: script(step, net),
        plan_everywhere=True,
    )


def _makes_an_error(net: Any, h: torch.Tensor) -> torch.Tensor:
    if net.x is None:
        net.x = _Count()
    net.x.calls += 1
    return h * net.x.calls


class _Count(Exception):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


def test_an_object_that_cannot_be_made_again_is_refused_once_it_has_changed() -> None:
    with pytest.raises(CaptureError, match=r"for net\.x, which was changed since"):
        _follows(_makes_an_error, _lets_go_of_it, lambda: (None, [1.0]))


def test_what_holds_itself_cannot_be_written() -> None:
    """It was followed for ever."""
    holding, twice = [one.held for one in _holding_themselves()], [1.0]
    assert not any(map(can_be_written, (*holding, (holding[0],), SimpleNamespace(x=holding[1]))))
    assert can_be_written([twice, {"x": twice}, SimpleNamespace(x=deque(twice))])
