"""What code that is kept whole leaves in Python is there on every worker, as in one process."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest
import torch
from recovery_helpers import Generators, ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))


class Remembering:
    """Asks for its value, so it is kept whole; in eval mode it is not, and reads what is left."""

    def __init__(self) -> None:
        self.past: list[float] = []
        self.last: deque[float] = deque(maxlen=2)
        self.table: dict[str, Any] = {"all": [], "nested": {"calls": 0}}
        self.best, self.recent = float("inf"), [0.0]
        self.limit = float("inf")

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(output, target)
        if not torch.is_grad_enabled():
            return loss * sum(self.past)
        value = loss.item()
        self.past.append(value)
        self.last.append(value)
        self.table["all"].append(value)
        self.table["nested"]["calls"] += 1
        self.recent = [*self.recent[-2:], value]
        if value > self.limit:
            self.table["nested"]["worse"] = value
        self.limit = min(self.limit, value)
        if value < self.best:
            self.best = value
        return loss


@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_calls_leave_is_known_to_the_script_and_to_other_modes(microbatches: int) -> None:
    def script() -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for rank, layer in enumerate(net):
            layer.place("MS_WORKER", rank)
        loss_fn = Remembering()
        held, found = loss_fn.table["all"], []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        metrics = {"Loss": gs.metrics.Loss()}
        model = gs.Model(net, loss_fn, optimizer, metrics=metrics, microbatches=microbatches)
        for step in range(5):
            if step == 3:
                loss_fn.past = [1.0]
            found.append(model.train_step(INPUTS, TARGETS).item())
            if step in (1, 4):
                found.append(model.eval([(INPUTS, TARGETS)])["Loss"])
            found.append(copy.deepcopy([*vars(loss_fn).values(), held]))
        return found

    before = Generators.now()
    expected = script()
    before.put_back()
    assert ThreadCluster(lambda rank: script(), 2, is_recoverable=False).run() == [expected] * 2


class Turning(nn.Module):
    """Kept whole, as it asks for a value; exchanges its layers in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            self.first, self.second = self.second, self.first
        x = self.second(torch.tanh(self.first(x)))
        return x if x.sum().item() < 1e9 else x * 2


class Keyed(nn.Module):
    """Likewise; its parameters are keys of a dictionary that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scales = {self.linear.weight: 2.0, self.linear.bias: 3.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x * self.scales[self.linear.weight])
        self.scales[self.linear.weight] *= 0.5
        return x if x.sum().item() < 1e9 else x * 2


@pytest.mark.parametrize("make", [Turning, Keyed])
def test_code_kept_whole_changes_its_layers_and_tables_once(make: Any) -> None:
    def script() -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), make())
        for rank, layer in enumerate(net):
            layer.place("MS_WORKER", rank)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = gs.Model(net, nn.functional.mse_loss, optimizer)
        return [model.train_step(INPUTS, TARGETS).item() for _ in range(4)]

    before = Generators.now()
    expected = script()
    before.put_back()
    assert ThreadCluster(lambda rank: script(), 2, is_recoverable=False).run() == [expected] * 2
