"""The simulation itself: it is the same every time, and it says what is wrong."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.compare import difference
from simulated.equivalence import assert_same_bits
from simulated.simulate import SimulatedCluster, SimulatedWorker, SimulationError
from torch import nn

from graphsplit.batches.signature import Arguments
from graphsplit.errors import OwnershipError
from graphsplit.planning.task import Task


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)
        self.first.place("MS_WORKER", 0)
        self.second.place("MS_WORKER", 1)

    def forward(self, x):
        return self.second(self.dropout(self.first(x)))


def make_task() -> Task:
    torch.manual_seed(0)
    network = Two()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return Task(network, rows_against_target, optimizer, "affinity", with_loss=True)


def arguments() -> Arguments:
    return (*batches_of(4, 8)[0],), {}


def test_a_simulation_leaves_the_default_generator_alone() -> None:
    torch.manual_seed(7)
    before = torch.default_generator.get_state()
    SimulatedCluster(make_task, 2).train_step(arguments())
    assert torch.equal(torch.default_generator.get_state(), before)


def test_what_a_worker_does_not_own_cannot_be_read_there() -> None:
    cluster = SimulatedCluster(make_task, 2)
    cluster.train_step(arguments())
    told = r"(?s)lives on worker 1.*model\.predict.*before the first step"
    with pytest.raises(OwnershipError, match=told):
        cluster.workers[0].task.network.second.weight.sum()  # type: ignore[operator, union-attr]


def test_a_deadlock_names_every_worker() -> None:
    cluster = SimulatedCluster(make_task, 2)
    cluster.train_step(arguments())

    def wait_for_the_other(worker: SimulatedWorker) -> None:
        next(worker.engine.group().receive(8, source=1 - worker.rank))

    with pytest.raises(SimulationError, match=r"(?s)worker 0: .* 1 -> w.*worker 1: .* 0 -> w"):
        cluster.run(wait_for_the_other)
    assert not [t for t in threading.enumerate() if t.name.startswith("simulated worker")]


def test_a_difference_is_named_with_step_parameter_and_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = SimulatedCluster.train_step

    def nudged(self: SimulatedCluster, given: Arguments, **options: Any) -> list[torch.Tensor]:
        losses = step(self, given, **options)
        with torch.no_grad():
            self.workers[1].task.network.second.bias[3] += 1e-3  # type: ignore[index, union-attr]
        return losses

    monkeypatch.setattr(SimulatedCluster, "train_step", nudged)
    with pytest.raises(AssertionError, match=r"step 0: value of 'second.bias' on worker 1 .*\[3\]"):
        assert_same_bits(Two, batches_of(4, 8), num_workers=2, loss_fn=rows_against_target)


@pytest.mark.parametrize(
    ("expected", "actual", "text"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0), "1 of 1 elements differ"),
        (torch.tensor([1.0]), torch.tensor(1.0), "shape"),
        (torch.tensor(1), torch.tensor(1.0), "dtype"),
        (torch.tensor(0.0), None, "expected a torch.float32 tensor"),
        ({"a": [1, 2]}, {"a": [1]}, "structure"),
        ((1, torch.tensor([1, 2])), (1, torch.tensor([1, 3])), r"\[1\]: 1 of 2 .* at \[1\]"),
    ],
)
def test_every_difference_counts(expected: object, actual: object, text: str) -> None:
    import re

    found = difference(expected, actual)
    assert found is not None and re.search(text, found), found


def test_a_nan_equals_itself() -> None:
    assert difference(torch.tensor([float("nan")]), torch.tensor([float("nan")])) is None
