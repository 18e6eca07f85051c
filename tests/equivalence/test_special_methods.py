"""Classes whose special methods are replaced, and objects that get another class: both count."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from equivalence_helpers import KeptByWeakReference, batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:network or loss reads")
Use = Callable[[Any], float]
KINDS: dict[str, tuple[Any, Any, Use]] = {  # of a method: what it is, what it becomes, its use
    "__call__": (lambda s: 1.0, lambda s: 2.0, lambda one: one()),
    "__mul__": (lambda s, k: k, lambda s, k: 2 * k, lambda one: one * 1.5),
    "__rmul__": (lambda s, k: k, lambda s, k: 2 * k, lambda one: 1.5 * one),
    "__getitem__": (lambda s, k: 1.0, lambda s, k: 2.0, lambda one: one["x"]),
    "__len__": (lambda s: 1, lambda s: 2, len),
    "__bool__": (lambda s: True, lambda s: False, lambda one: 2.0 if one else 1.0),
    "__iter__": (lambda s: iter([1.0]), lambda s: iter([1.0, 2.0]), lambda one: sum(one)),
    "__contains__": (lambda s, k: True, lambda s, k: False, lambda one: 1.0 + (3 in one)),
    "__eq__": (lambda s, k: True, lambda s, k: False, lambda one: 1.0 + (one == 3)),
    "__float__": (lambda s: 1.0, lambda s: 2.0, float),
    "__index__": (lambda s: 1, lambda s: 2, lambda one: [0.0, 1.0, 2.0][operator.index(one)]),
    "__getattr__": (lambda s, n: 1.0, lambda s, n: 2.0, lambda one: one.anything),
}


class _Net(nn.Module):
    def __init__(self, one: Any, use: Use) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 4)
        self.one, self.use = one, use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.first(x) * self.use(self.one))
        return found


def _place(net: Any) -> None:
    net.first.place("MS_WORKER", 0)
    net.last.place("MS_WORKER", 1)


def _same(
    make: Callable[[], nn.Module], batches: list[Any], before: Callable[..., None], **options: Any
) -> None:
    assert_same_bits(
        make,
        batches,
        num_workers=2,
        place=_place,
        loss_fn=rows_against_target,
        before_step=before,
        plan_everywhere=True,
        **options,
    )


def _check(make: Callable[[], Any], use: Use, change: Callable[[Any], None]) -> None:
    def before(step: int, net: Any, loss_fn: Any) -> None:
        if step == 1:
            change(net.one)

    _same(lambda: _Net(make(), use), batches_of(4, 3), before, steps=2, evaluate_after=())


@pytest.mark.parametrize("name", KINDS)
def test_a_special_method_of_a_class_may_be_replaced(name: str) -> None:
    was, becomes, use = KINDS[name]

    def make() -> Any:  # a class for the loop and for each worker
        base = type("Base", (), {name: was})
        return type("Kind", (base,), {})()

    _check(make, use, lambda one: setattr(type(one).__bases__[0], name, becomes))
    _check(make, use, lambda one: setattr(type(one), name, becomes))


class _Plain:
    def __call__(self) -> float:
        return 1.0


class _Other:
    def __call__(self) -> float:
        return 2.0


class _Slotted:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self) -> float:
        return self.weight


class _OtherSlotted:
    __slots__ = ("weight",)

    def __call__(self) -> float:
        return 2 * self.weight


@pytest.mark.parametrize(("kind", "other"), [(_Plain, _Other), (_Slotted, _OtherSlotted)])
def test_an_object_that_is_only_called_may_get_another_class(kind: Any, other: Any) -> None:
    _check(kind, lambda one: float(one()), lambda one: setattr(one, "__class__", other))


class _OnceMade:
    weight = 1.0

    @functools.cached_property
    def twice(self) -> float:
        return 2 * self.weight


def test_what_a_cached_property_keeps_is_not_made_of_later_values() -> None:
    def before(step: int, net: Any, loss_fn: Any) -> None:
        net.one.weight = 1.0 + step
        if step == 2:  # by now the weight is an operand
            del net.one.twice

    _same(lambda: _Net(_OnceMade(), lambda one: float(one.twice)), batches_of(4, 3, num=4), before)


def test_values_under_weak_keys_may_be_operands() -> None:
    def make() -> Any:  # a class for the loop and for each worker
        one = type("Described", (), {"weight": KeptByWeakReference()})()
        one.weight = 1.0
        return one

    def before(step: int, net: Any, loss_fn: Any) -> None:
        net.one.weight = 1.0 + step

    _same(lambda: _Net(make(), lambda one: float(one.weight)), batches_of(4, 3, num=4), before)


class _Evaluated(_Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(eval(self.use(self.one), {"h": h}))  # type: ignore[no-any-return]


def test_a_text_may_be_evaluated_with_tensors() -> None:
    def before(step: int, net: Any, loss_fn: Any) -> None:
        net.one = ("h * 2", "h.tanh()")[step]

    _same(lambda: _Evaluated("h", lambda one: one), batches_of(4, 3), before, steps=2)


def test_a_module_that_the_script_made_itself_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_by_a_test", made := ModuleType("made_by_a_test"))
    made.weight = 1.0  # type: ignore[attr-defined]

    def use(one: Any) -> float:
        import made_by_a_test  # type: ignore[import-not-found]

        return float(made_by_a_test.weight)

    def change(one: Any) -> None:
        made.weight = 2.0  # type: ignore[attr-defined]

    _check(lambda: None, use, change)


class _Counting(type):
    """Has its classes count their objects."""

    made = 0

    def __call__(cls, *args: Any) -> Any:
        cls.made += 1
        return super().__call__(*args)


def test_a_metaclass_may_count_in_its_classes() -> None:
    def before(step: int, net: Any, loss_fn: Any) -> None:
        net.one = _Counting("One", (), {"weight": 1.0 + step})
        net.one.made = 5 * step

    def use(one: Any) -> float:
        return float(one().weight * one.made + one().made)

    _same(lambda: _Net(None, use), batches_of(4, 3, num=3), before)
