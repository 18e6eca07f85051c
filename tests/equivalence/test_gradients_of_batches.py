"""A batch that asks for gradients gets them, as do the parameters that a script has made it of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from equivalence_helpers import rows_against_target
from simulated.simulate import SimulatedCluster
from torch import nn

from graphsplit.batches.microbatches import Divider
from graphsplit.errors import ConfigurationError
from graphsplit.job.job import Job
from graphsplit.planning.task import Task


class Net(nn.Module):
    """Uses its inputs on two workers, the first one three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, factor: Any = None, shift: Any = None) -> torch.Tensor:
        made: torch.Tensor = self.second(torch.relu(self.first(x)) * x) + x
        made = made if factor is None else made + self.first(factor)
        return made if shift is None else made + shift.sum()


def _net(workers: Sequence[Any]) -> Any:
    torch.manual_seed(0)
    net: Any = Net()
    for module, worker in zip((net.first, net.second), workers, strict=True):
        module.place("MS_WORKER", worker)
    return net


def _ones(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"factor": torch.ones_like(x, requires_grad=True)}


def _nothing(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {}


def _row(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Its gradient is one row, expanded."""
    return {**_ones(x), "shift": torch.ones_like(x, requires_grad=True)}


def _batches(is_made: bool) -> list[tuple[Any, ...]]:
    generator, before = torch.Generator().manual_seed(1), nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        before.weight.copy_(torch.randn(3, 2, generator=generator))
    found = []
    for _ in range(3):
        given, target = torch.randn(6, 2, generator=generator), torch.randn(6, generator=generator)
        x = before(given) if is_made else given.repeat(1, 2)[:, :3].requires_grad_()
        found.append((x, target.requires_grad_(), before.weight))
    return found


def _left(x: torch.Tensor, rest: dict[str, Any], target: Any, weight: Any) -> list[Any]:
    asked = weight if x.grad_fn is not None else x
    return [asked.grad.clone(), target.grad, *(one.grad for one in rest.values())]


@pytest.mark.parametrize(
    ("workers", "microbatches", "is_made", "others"),
    [
        ((0, 1), 1, False, _nothing),
        ((0, 1), 1, True, _ones),
        ((0, 1), 1, False, _row),
        ((1, 0), 3, False, _row),
        ((1, 0), 3, False, _ones),
        (([0, 1], 1), 3, False, _nothing),
        (([0, 1], [0, 1]), 3, False, _ones),
    ],
)
def test_gradients_flow_into_batches_on_every_worker(
    workers: Sequence[Any], microbatches: int, is_made: bool, others: Any
) -> None:
    def task() -> Task:
        net = _net(workers)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        options: dict[str, Any] = {"unplaced": "affinity", "with_loss": True}
        divider = Divider(microbatches)
        return Task(net, rows_against_target, optimizer, divider=divider, **options)

    net: Any = _net((0, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    expected = []
    for x, target, weight in _batches(is_made):
        optimizer.zero_grad()
        rest = others(x)
        for part in range(microbatches):
            one, aim, *more = (
                torch.tensor_split(t, microbatches)[part] if microbatches > 1 else t
                for t in (x, target, *rest.values())
            )
            loss = rows_against_target(net(one, *more), aim)
            (loss * (len(one) / len(x)) if microbatches > 1 else loss).backward()
        optimizer.step()
        expected.append(_left(x, rest, target, weight))

    def train(worker: Any) -> list[Any]:
        found = []
        for x, target, weight in _batches(is_made):
            rest = others(x)
            given = (x, *rest.values(), target), {}
            worker.engine.train_step(worker.task.divider.divide_arguments(given))
            found.append(_left(x, rest, target, weight))
        return found

    for found in SimulatedCluster(task, 2).run(train):
        for step, (now, then) in enumerate(zip(found, expected, strict=True)):
            assert all(map(torch.equal, now, then)), step


@pytest.mark.parametrize("policy", ["wait_rejoin", "go_on"])
def test_a_step_that_may_run_twice_refuses_such_a_batch(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    def task() -> Task:
        options: dict[str, Any] = {"unplaced": "affinity", "with_loss": True}
        net = _net(([0, 1], 1) if policy == "go_on" else (0, 1))
        return Task(net, rows_against_target, None, divider=Divider(3), **options)

    def train(worker: Any) -> None:
        ((x, target, _), *_) = _batches(is_made=False)
        worker.engine.train_step(worker.task.divider.divide_arguments(((x, target), {})))

    cluster = SimulatedCluster(task, 2)
    monkeypatch.setattr(Job, "recovery_policy", policy)
    with pytest.raises(ConfigurationError, match=f"GS_RECOVERY={policy} a step may run twice"):
        cluster.run(train)


def test_a_loader_s_batch_with_a_history_is_refused_and_one_that_is_a_leaf_is_not() -> None:
    def task() -> Task:
        return Task(_net((0, 1)), rows_against_target, None, unplaced="affinity", with_loss=True)

    def train(worker: Any, is_made: bool) -> list[torch.Tensor]:
        batches = [(x, target.detach()) for x, target, _ in _batches(is_made)]
        return list(worker.engine.train_epoch(batches))

    assert all(
        len(losses) == 3 for losses in SimulatedCluster(task, 2).run(lambda w: train(w, False))
    )
    with pytest.raises(ConfigurationError, match=r"it has a grad_fn(.|\n)*call train_step on each"):
        SimulatedCluster(task, 2).run(lambda worker: train(worker, True))
