"""Values of snapshots that are put back into the places that were watched."""

from __future__ import annotations

import copy
import functools
import operator
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pass_helpers import captured
from torch import nn

from graphsplit.capture.state.handed import swap
from graphsplit.guards.changes import changes_of, leave_all
from graphsplit.guards.classes import slots_of
from graphsplit.guards.places import entry, inside
from graphsplit.guards.values import freeze, put_into, same, thaw
from graphsplit.guards.visitor import Noted
from graphsplit.planning.python_values import PythonValues


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2], "b": {"c": 3.0}},
        [[1], [2, [3]]],
        SimpleNamespace(x=1, y=[2]),
        {1, 2},
        np.arange(3.0),
        bytearray(b"abc"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_that_is_there_is_filled(value: Any):
    kept = freeze(copied_then_changed(value))
    found = put_into(kept, value)
    assert found is value
    assert same(kept, value)


def test_a_dictionary_that_holds_it_already_is_let_be():
    """It may be Python's own, which all threads look names up in meanwhile."""
    value, called = {"a": 1, "names": {"isinstance": isinstance}}, []
    kept = freeze({"a": 2, "names": value["names"]})
    sys.setprofile(lambda _, event, what: called.append((event, getattr(what, "__name__", ""))))
    try:
        put_into(kept, value)
    finally:
        sys.setprofile(None)
    assert called.count(("c_call", "clear")) == 1
    assert value["a"] == 2


def test_values_are_not_swapped_in_objects_of_graphsplits_own():
    """The script's namespace leads to them, by an optimizer or the handle of a hook."""
    old, new = torch.ones(1), torch.zeros(1)
    users, ours = State(old), Noted(entry({}, "a", "a"), first=old)
    swap(entry({"found": [users, ours]}, "found", "found"), {id(old): new})
    assert users.value is new
    assert ours.first is old


class State:
    """An object of the user's."""

    def __init__(self, value: Any):
        self.value = value


def copied_then_changed(value: Any) -> Any:
    """A copy of a container, which is changed afterwards."""
    there = copy.deepcopy(value)
    if isinstance(value, dict):
        value["a"].append(9)
        value["later"] = value.pop("b")
    elif isinstance(value, list):
        value[1][1].append(9)
    elif isinstance(value, SimpleNamespace):
        value.y.clear()
    elif isinstance(value, set):
        value.add(9)
    else:
        value[0] = 99
    return there


class _Settings(SimpleNamespace):
    def __init__(self, rate: float) -> None:
        super().__init__(rate=rate, items=[rate])


def test_a_namespace_whose_constructor_takes_something_else_is_copied():
    value = _Settings(0.5)
    copied = thaw(freeze(value))
    assert type(copied) is _Settings and copied == value
    assert copied.items is not value.items


def test_items_are_put_back_after_the_list_that_they_are_in():
    holder = {"past": [1.0, 2.0]}
    past = entry(holder, "past", "past")
    places = (past, inside(holder["past"], -1, past))
    noted = {place.identity: Noted(place, freeze(place.read())) for place in places}
    holder["past"].clear()
    [whole, last] = changes_of(noted, compute=lambda number: None, has_made=lambda one: False)
    assert holder == {"past": [1.0, 2.0]}
    leave_all((whole, last), ())
    assert holder == {"past": []}


def test_what_cannot_hold_a_value_is_replaced():
    kept = freeze([(1, [2]), np.zeros(2)])
    there: Any = [(1, [3]), np.ones(3)]
    one, array = there[0][1], there[1]
    assert put_into(kept, there) is there
    assert same(kept, there)
    assert one == [2]  # a tuple stays, if what it holds can
    assert array.shape == (3,)


class _Watching:
    """Recordings that watch two entries of one dictionary."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def places(self) -> Any:
        for key, first in (("a", [1]), ("b", [2])):
            yield entry(self.held, key, f"net.{key}"), freeze(first), None, True


def test_two_places_that_hold_one_list_get_the_values_that_they_had():
    shared: list[int] = [7]
    held: dict[str, Any] = {"a": [1], "b": [2]}
    values = PythonValues(_Watching(held), SimpleNamespace(network=nn.Identity(), loss_fn=None))  # type: ignore[arg-type]
    then, numbers = values.now()
    kept = {key: freeze(list(one.container)) for key, one in then.items()}
    held["a"] = held["b"] = shared
    values.put(kept, numbers)
    assert held == {"a": [1], "b": [2]}
    assert held["a"] is not held["b"]


def test_what_was_loaded_since_stays_where_what_was_kept_before_is_put_back():
    network: Any = nn.Identity()
    network.a, network.b, network.by_key = [1], [2], defaultdict(list, x=[1])
    values = PythonValues(
        _Watching(vars(network)),  # type: ignore[arg-type]
        SimpleNamespace(network=network, loss_fn=None),  # type: ignore[arg-type]
    )
    kept = values.kept()
    network.a = [5]
    values.note_put(["net.a", "net.by_key"])
    assert [one[0] for one in values.kept()] == ["net.a"]  # snapshots have the other one besides
    values.put_back(kept)
    assert (network.a, network.b, network.by_key) == ([5], [2], {"x": [1]})


class _PastTheClass(nn.Module):
    """Writes attributes where no hook on classes sees it; its layer keeps weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        object.__setattr__(self, "doubled", x * 2)
        self.__dict__.update(tripled=x * 3)
        object.__setattr__(self, "number", 3)
        assert vars(self)["number"] == 3
        found: torch.Tensor = self.layer(x)[0].sum()
        return found


def test_what_is_written_past_the_class_is_put_back_and_plain_values_are_left_by_each_step():
    network = _PastTheClass()
    before, flat = set(vars(network)), network.layer._flat_weights
    graph = captured(network, torch.zeros(2, 3, 4))
    assert set(vars(network)) == before
    assert network.layer._flat_weights is flat
    assert all(map(operator.is_, flat, network.layer.parameters()))
    (change,) = graph.state.changes
    assert change.named(()) == "net.number from (nothing) to 3"


def test_a_dictionary_that_grows_while_it_is_looked_at_keeps_keys_and_values_together() -> None:
    growing: dict[Any, int] = {"first": 0}

    def grow(*_: object) -> None:  # as another thread may, between any two lines
        growing[len(growing)] = len(growing)

    sys.setprofile(grow)
    try:
        found = freeze(growing)
    finally:
        sys.setprofile(None)
    assert len(growing) > len(found.items) > 1
    assert [key for key in found.keys if key != "first"] == list(found.items[1:])


class _InCircles(nn.Module):
    """Has a list that holds itself, and appends to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.ring: list[Any] = [2.0]
        self.ring.append(self.ring)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        return (x * self.ring[1][0]).sum()


def test_attributes_may_hold_themselves_and_are_the_same_objects_after_a_capture():
    network = _InCircles()
    ring, seen = network.ring, network.seen
    (change,) = captured(network, torch.ones(2)).state.changes
    assert change.told() == "net.seen: [1]"
    assert network.ring is ring
    assert network.seen is seen and not seen


class _Counting(nn.Module):
    """Counts in its class and in globals, under many names."""

    kept, seen, calls, steps, parts, total, first, last = (0,) * 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global _one, _two, _three, _four, _five, _six
        _one = _two = _three = _four = _five = _six = 1
        kind = type(self)
        kind.kept = kind.seen = kind.calls = kind.steps = 1
        kind.parts = kind.total = kind.first = kind.last = 1
        return x.sum()


def test_what_a_class_and_globals_keep_is_in_one_order_on_all_workers():
    labels = [change.place.label for change in captured(_Counting(), torch.ones(2)).state.changes]
    own = [label for label in labels if "_Counting" in label]
    assert own == [f"_Counting.{name}" for name in sorted(_COUNTERS)]
    others = [label for label in labels if label not in own]
    assert others == sorted(others)
    assert len(others) == 6


_COUNTERS = ("kept", "seen", "calls", "steps", "parts", "total", "first", "last")


def test_read_only_members_of_classes_of_extensions_are_no_slots() -> None:
    class Slotted:
        __slots__ = ("one",)

    assert [slot.__name__ for slot in slots_of(Slotted)] == ["one"]
    assert slots_of(functools.partial) == []  # func, args and keywords cannot be set
