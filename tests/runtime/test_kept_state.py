"""All that code can reach is found, by the way to it."""

from __future__ import annotations

import functools
import random
import weakref
from collections import deque
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphsplit.optimizers.kept_state import kept_state

COUNTS = {"calls": 0}


class Slotted:
    __slots__ = ("value",)


class Shared:
    total = 0


def changed(make: Any, change: Any, names: Any = None) -> list[str]:
    """The places that a change is seen at."""
    root = make()
    before = kept_state({"root": root}, names or {})
    change(root)
    after = kept_state({"root": root}, names or {})
    return ["".join(p) for p in {**before, **after} if before.get(p) != after.get(p)]


def reader() -> Any:
    kept = [1.0]

    def read(scale: Any = SimpleNamespace(value=2)) -> Any:  # noqa: B008
        return kept, COUNTS, scale

    return read


@pytest.mark.parametrize(
    ("make", "change", "place"),
    [
        (lambda: SimpleNamespace(a=1), lambda o: setattr(o, "a", 2), "root.a"),
        (lambda: SimpleNamespace(a=1), lambda o: setattr(o, "a", 1.0), "root.a"),
        (lambda: {"a": [1, 2]}, lambda o: o["a"].append(3), "root['a'][2]"),
        (lambda: deque([1]), lambda o: o.append(2), "root[1]"),
        (lambda: [torch.zeros(2)], lambda o: o[0].add_(1), "root[0]"),
        (lambda: [torch.zeros(2).to_sparse()], lambda o: o[0].mul_(1).add_(o[0]), None),
        (lambda: [np.zeros(2)], lambda o: o[0].fill(1), "root[0]"),
        (lambda: [random.Random(1)], lambda o: o[0].random(), "root[0]"),
        (lambda: [torch.Generator()], lambda o: torch.rand(1, generator=o[0]), "root[0]"),
        (lambda: [{1}], lambda o: o[0].add(2), "root[0]"),
        (lambda: [list(range(100))], lambda o: o[0].append(1), "root[0]"),
        (lambda: functools.partial(print, [1]), lambda o: o.args[0].append(2), "root.args[0][1]"),
        (reader, lambda o: o()[0].append(1), "root kept[1]"),
        (reader, lambda o: o()[1].update(calls=COUNTS["calls"] + 1), "root COUNTS['calls']"),
        (reader, lambda o: setattr(o()[2], "value", 3), "root default 0.value"),
        (lambda: Shared, lambda o: setattr(o, "total", o.total + 1), "root.total"),
        (lambda: [Slotted()], lambda o: setattr(o[0], "value", 1), "root[0].value"),
    ],
)
def test_a_change_is_seen(make: Any, change: Any, place: str | None) -> None:
    assert changed(make, change) == ([] if place is None else [place])


def test_what_is_kept_by_tensor_is_told_by_its_name() -> None:
    weight = torch.zeros(2)
    names = {id(weight): "layer.weight"}
    for by_tensor in ({weight: 1}, {id(weight): 1}):
        assert kept_state({"root": by_tensor}, names)["root", "<layer.weight>"] == "int 1"
    assert kept_state({"root": [weight]}, names)["root", "[0]"] == "<layer.weight>"


def test_circles_and_weak_references_end() -> None:
    first: Any = reader()
    first.own, first.weak = first, weakref.ref(first)
    found = kept_state({"root": first}, {})
    assert found["root", ".own"] == "(seen before)"
    assert found["root", ".weak", "()"] == "(seen before)"


def test_it_ends_at_the_limit() -> None:
    found = kept_state({"root": [[i] for i in range(1000)]}, {}, limit=10)
    assert len(found) == 10


class Lazy(dict[str, Any]):
    """As the tables of transformers: who asks for all of it imports every model."""

    def items(self) -> Any:
        raise AssertionError


def test_no_code_of_a_mapping_runs() -> None:
    found = kept_state({"root": Lazy(a=1), "view": MappingProxyType({"b": 2})}, {})
    assert (found["root", "['a']"], found["view", "['b']"]) == ("int 1", "int 2")


class Held:
    """One of graphsplit's own objects, on which a script has set something."""

    __module__ = "graphsplit.somewhere"

    def __init__(self) -> None:
        self._plans, self.job, self.counted = [1], self, [2]


def test_of_graphsplits_own_objects_only_what_a_script_sets_is_seen() -> None:
    found = kept_state({"root": Held()}, {})
    assert list(map("".join, found)) == ["root", "root.counted", "root.counted[0]"]
