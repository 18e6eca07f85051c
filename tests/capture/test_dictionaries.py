"""Places in dictionaries are compared where one was written to, and nowhere else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphsplit.guards import check
from graphsplit.guards.check import Dictionaries, Guards, Watched
from graphsplit.guards.compiled import IS_AT, IS_NOT_IN
from graphsplit.guards.places import entry
from graphsplit.guards.values import freeze

OLD = object()


def watching(*held: dict[str, Any]) -> Dictionaries:
    """Of each dictionary, that ``a`` is what it is now and that ``b`` is not there."""
    return Dictionaries(
        {
            IS_AT: [(one, "a", one["a"]) for one in held],
            IS_NOT_IN: [(one, "b") for one in held],
        }
    )


@pytest.fixture(params=[True, False], ids=["numbered", "not numbered"])
def _numbered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Python 3.11, and as in 3.12."""
    if request.param and check.dict_version is None:
        pytest.skip("this Python does not number writes")
    if not request.param:
        monkeypatch.setattr(check, "dict_version", None)


pytestmark = pytest.mark.usefixtures("_numbered")


def test_a_change_is_seen_until_it_is_taken_back() -> None:
    one, other = {"a": OLD}, {"a": OLD}
    watched = watching(one, other)
    assert watched.hold() and watched.hold()
    for _ in range(2 * check._MOST_CHANGES):
        other["a"] = object()
        assert not watched.hold() and not watched.hold()
        other["a"] = OLD
        assert watched.hold() and watched.hold()


def test_what_is_added_is_seen() -> None:
    one = {"a": OLD}
    watched = watching(one)
    assert watched.hold()
    one["b"] = OLD
    assert not watched.hold()
    del one["b"]
    assert watched.hold()


def test_what_is_gone_is_a_key_error() -> None:
    one = {"a": OLD}
    watched = watching(one)
    assert watched.hold()
    del one["a"]
    with pytest.raises(KeyError):
        watched.hold()


def test_equal_is_not_identical() -> None:
    one: dict[str, Any] = {"a": 1.0}
    watched = watching(one)
    assert watched.hold()
    one["a"] = 1
    assert not watched.hold()


def test_other_entries_may_change_at_every_step() -> None:
    one: dict[str, Any] = {"a": OLD, "step": 0}
    watched = watching(one)
    for step in range(3 * check._MOST_CHANGES):
        one["step"] = step
        assert watched.hold()
    one["a"] = None
    assert not watched.hold()


@pytest.mark.parametrize("write", ["setattr", "vars", "update", "setitem through a method"])
def test_writes_to_an_object_are_seen(write: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a: Any = OLD

        def put(self, value: Any) -> None:
            self.a = value

    net = Net()
    for _ in range(20):  # Python makes code fast that runs often
        net.put(OLD)
    watched = watching(vars(net))
    assert watched.hold()
    for value in (torch.zeros(1), OLD, 3, OLD):
        match write:
            case "setattr":
                net.a = value
            case "vars":
                vars(net)["a"] = value
            case "update":
                net.__dict__.update(a=value)
            case _:
                net.put(value)
        assert watched.hold() is (value is OLD)


def test_writes_by_fast_code_to_a_plain_object_are_seen() -> None:
    class Plain:
        def __init__(self) -> None:
            self.a: Any = OLD

        def put(self, value: Any) -> None:
            self.a = value

    one = Plain()
    for _ in range(100):
        one.put(OLD)
    watched = watching(vars(one))
    assert watched.hold()
    for step in range(100):
        one.put(step)
        assert not watched.hold()
        one.put(OLD)
        assert watched.hold()


def put_back_in_another_order(held: dict[str, Any]) -> None:
    held["a"] = held.pop("a")


CHANGES = [
    put_back_in_another_order,
    lambda held: held.update(a=object()),
    lambda held: held.update(b=0),
    lambda held: held.update(c=OLD),
    lambda held: held.clear(),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_what_is_in_a_dictionary_and_its_order_are_seen_whenever_they_change(
    change: Callable[[dict[str, Any]], None], kind: type[dict[str, Any]]
) -> None:
    held = kind(a=OLD, b=1.5, z=None)
    place = entry({"held": held}, "held", "held")
    before = {**held}
    guards = Guards([Watched(place, freeze(held))])
    for _ in range(2 * check._MOST_CHANGES):
        assert guards.hold() and guards.hold()
        change(held)
        assert not guards.hold() and not guards.hold()
        assert guards.failures()
        held.clear()
        held.update(before)
    assert guards.hold()
