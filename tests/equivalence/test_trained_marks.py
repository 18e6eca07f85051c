"""Parameters that forward itself freezes and unfreezes are trained as in the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

import graphsplit as gs
from graphsplit.capture.graph import Mode
from graphsplit.errors import CaptureError, StepFailedError
from graphsplit.optimizers.clip import GlobalNorm

pytestmark = pytest.mark.filterwarnings("ignore:network or loss reads")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls, self.flag = 0, True

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return made


class EverySecond(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.weight.requires_grad_(self.calls % 2 == 0)
        self.calls += 1
        return self.compute(x)


class ByFlag(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b.requires_grad_(self.flag)
        y = self.compute(x)
        return y if self.b.weight.requires_grad else 2 * y


class AfterUse(Net):
    """Frozen, and thawed again, once the parameter was used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.compute(x)
        if self.calls in (1, 9):
            for parameter in self.b.parameters():
                parameter.requires_grad = self.calls == 9
        self.calls += 1
        return y


class FrozenForOneUse(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        self.b.requires_grad_(False)
        h = torch.tanh(self.b(h))
        self.b.requires_grad_(True)
        made: torch.Tensor = self.c(h) + self.b(h)
        return made


class FrozenForACallKeptWhole(FrozenForOneUse):
    def __init__(self) -> None:
        super().__init__()
        self.b = gs.opaque(self.b)


class FreezesWhenCounted(Net):
    """A call kept whole that freezes a parameter in its third run: no plan can know."""

    def __init__(self) -> None:
        super().__init__()
        self.b = gs.opaque(_Freezing(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)


class _Freezing(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.weight.requires_grad_(self.calls < 3)
        return super().forward(x)


def _place(net: Any) -> None:
    net.a.place("MS_WORKER", 0)
    net.b.place("MS_WORKER", 1)
    net.c.place("MS_WORKER", 0)


def _follows(make_network: Callable[[], nn.Module], **options: Any) -> Any:
    return assert_same_bits(
        make_network,
        batches_of(8, 3, num=4),
        num_workers=2,
        place=_place,
        loss_fn=rows_against_target,
        plan_everywhere=True,
        steps=5,
        **{"evaluate_after": (1, 4), **options},
    )


def _flip(step: int, net: Any, loss_fn: Any) -> None:
    net.flag = step % 3 != 1


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("make", [EverySecond, AfterUse, FrozenForOneUse, FrozenForACallKeptWhole])
def test_marks_that_forward_sets(make: Any, microbatches: int) -> None:
    _follows(make, microbatches=microbatches)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_marks_that_follow_a_flag_of_the_script(microbatches: int) -> None:
    _follows(ByFlag, microbatches=microbatches, before_step=_flip, clip=GlobalNorm(0.1))


def test_a_gradient_of_zeros_moves_what_is_frozen() -> None:
    cluster = _follows(EverySecond, set_to_none=False)
    planned = cluster.latest(Mode.TRAIN)
    assert planned is not None
    label = "requires_grad of net.a.weight"
    assert label in [c.place.label for c in planned.plan.placed.graph.changes]


def test_a_call_kept_whole_that_freezes_by_its_own_count_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GS_RECAPTURE_EVERY")  # it would be refused when it is captured again
    with pytest.raises(StepFailedError, match=r"Freezing \(b\) freezes weight of _Freezing"):
        _follows(FreezesWhenCounted, evaluate_after=())


class FreezesByValues(FreezesWhenCounted):
    def __init__(self) -> None:
        super().__init__()
        self.b = gs.opaque(_FreezingByValues(4, 4))


class _FreezingByValues(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().sum() - 1000) > 0:  # never
            self.weight.requires_grad_(False)
        return super().forward(x)


def test_a_call_kept_whole_that_may_freeze_by_values_is_refused_when_it_is_captured() -> None:
    with pytest.raises(CaptureError, match=r"(?s)freezes or thaws parameters.*values of tensors"):
        _follows(FreezesByValues)


class ByDtype(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.compute(x.to(self.a.weight.dtype))
        return y * 0.5 if self.c.weight.dtype == torch.float64 else y


@pytest.mark.parametrize("microbatches", [1, 4])
def test_another_dtype_of_parameters_counts(microbatches: int) -> None:
    """The graph of before was used, without a word or with an error about dtypes."""

    def change(step: int, net: Any, loss_fn: Any) -> None:
        if step in (2, 4):
            net.to(torch.float64 if step == 2 else torch.float32)

    assert_same_bits(
        ByDtype,
        batches_of(8, 3, num=6),
        num_workers=1,
        loss_fn=lambda outputs, target: rows_against_target(outputs.float(), target),
        before_step=change,
        microbatches=microbatches,
        plan_everywhere=True,
    )
