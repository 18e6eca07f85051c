"""``tensor.data = value``, and what is computed of values that live on one worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from script_changes import Change, assert_refused_elsewhere, assert_written_on_the_owner
from simulated.equivalence import assert_same_bits
from torch import nn

from graphsplit.errors import CaptureError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.late: torch.Tensor
        self.register_buffer("late", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(torch.relu(self.first(x))) * self.late
        return made


def place(net: Any) -> None:
    net.first.place("MS_WORKER", 0)
    net.second.place("MS_WORKER", 1)


def computed(step: int, net: Any, loss_fn: Any) -> None:
    weight = net.second.weight
    weight.data = weight.data * 0.9 + torch.randn(4, 4) * 0.1
    weight.data = torch.where(weight.data.abs() > 0.2, weight.data, torch.zeros(4, 4))
    net.second.bias.data = net.second.bias.data.clamp(-0.1, 0.1)


def made(step: int, net: Any, loss_fn: Any) -> None:
    net.late.data = torch.full((4,), 0.5 + step)
    for parameter in net.parameters():
        parameter.data = torch.ones_like(parameter) * 0.1


def copied(step: int, net: Any, loss_fn: Any) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()


def normalized(step: int, net: Any, loss_fn: Any) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(parameter / (1 + parameter.norm()) + parameter.mean())


CHANGES: dict[str, Change] = {
    change.__name__: change for change in (computed, made, copied, normalized)
}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", CHANGES)
def test_data_that_the_script_sets_is_set_on_the_owner(name: str, microbatches: int) -> None:
    assert_written_on_the_owner(Net, place, CHANGES[name], microbatches=microbatches)


def _read_what_was_given(net: Any) -> None:
    given = torch.zeros(4, 4)
    net.second.weight.data = given
    given.sum().item()  # steps write to it, where it lives


def _share_memory(net: Any) -> None:
    net.second.weight.data = net.second.bias.data.expand(4, 4)


@pytest.mark.parametrize("change", [_read_what_was_given, _share_memory])
def test_what_would_share_memory_with_another_worker_s_value_is_refused(change: Any) -> None:
    assert_refused_elsewhere(Net, place, change)


class Momentum(nn.Module):
    """A key encoder that follows the query encoder, as MoCo's forward has it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(3, 4), nn.Linear(3, 4)
        self.key.requires_grad_(self.trains_key())
        self.m = 0.9

    @staticmethod
    def trains_key() -> bool:
        return False

    def follow(self) -> None:
        with torch.no_grad():
            for ours, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                ours.data = ours.data * self.m + other.data * (1.0 - self.m)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query: torch.Tensor = self.query(x)
        self.follow()
        return query * self.key(x)


class Clamped(Momentum):
    """Both are trained, and what was used before is set afterwards, with autograd on."""

    @staticmethod
    def trains_key() -> bool:
        return True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.query(x) * self.key(x)
        self.query.weight.data = torch.lerp(self.query.weight, self.key.weight, 0.1)
        self.key.bias.data = new = self.key.bias.data.clamp(-0.1, 0.1)
        del new
        self.key.bias.data.mul_(0.5)
        return product + self.key(x)


class Cast(Clamped):
    """Sets it to what it is, as ArcFaceLoss of pytorch-metric-learning does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.key.weight.view(-1)
        self.key.weight.data = self.key.weight.data.to(x.dtype)
        product: torch.Tensor = self.query(x) * self.key(x)
        return product * before.mean()


def _place_momentum(net: Any) -> None:
    net.query.place("MS_WORKER", 0)
    net.key.place("MS_WORKER", 1)


def _less(step: int, net: Any, loss_fn: Any) -> None:
    net.m = 0.9 - 0.1 * step


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("make", [Momentum, Clamped, Cast])
def test_data_that_forward_sets_to_what_it_computed_is_copied(make: Any, microbatches: int) -> None:
    assert_written_on_the_owner(make, _place_momentum, _less, microbatches=microbatches)


class Sharing(Momentum):
    """Somebody else holds the memory that is given, or that of before."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.register_buffer("held", torch.zeros(4, 3))
        self.tied = nn.Parameter(self.key.weight[:2] if case == "tied" else torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, before = self.key.weight, self.key.weight.data
        if self.case == "another's":
            key.data = self.query.weight.data
        elif self.case == "a buffer":
            key.data = self.held
        elif self.case == "another form":
            key.data = torch.ones(3, 4).t()
        elif self.case == "tied":
            self.tied.data = self.tied.data * 0.9
        else:
            key.data = new = key.data * 0.9
        if self.case == "of before":
            return self.query(x) * before.sum()
        if self.case == "by its name":
            new.mul_(2)
        if self.case == "kept":
            self.kept = new
        return self.query(x) * self.key(x)


@pytest.mark.parametrize(
    "case",
    ["another's", "a buffer", "another form", "tied", "of before", "by its name", "kept"],
)
def test_memory_that_has_two_names_is_refused_in_forward(case: str) -> None:
    with pytest.raises(CaptureError, match=r"setting its \.data") as caught:
        assert_same_bits(
            lambda: Sharing(case),
            batches_of(8, 3, num=1),
            num_workers=2,
            place=_place_momentum,
            loss_fn=rows_against_target,
        )
    assert "test_data_that_is_set.py" in str(caught.value)
