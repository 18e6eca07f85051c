"""``tensor.data = value``, and what is computed of values that live on one worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from script_changes import Change, assert_refused_elsewhere, assert_written_on_the_owner
from torch import nn


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
