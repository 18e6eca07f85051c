"""Objects that get another dictionary of attributes with each assignment, across a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_model import PlainModel
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.recovery.settings import SnapshotSettings

assert threads_as_workers
BATCHES = torch.randn(6, 2, 8, 4, generator=torch.Generator().manual_seed(1)).unbind()


class Checked:
    """As pydantic's ``validate_assignment=True`` makes them."""

    __slots__ = ("__dict__", "spare")

    def __init__(self) -> None:
        object.__setattr__(self, "n", 0)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "__dict__", {**vars(self), name: value})


class Counting(nn.Module):
    def __init__(self, counts: Any) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(4, 4), counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts.n = self.counts.n + 1
        made: torch.Tensor = self.linear(x) * (1 + 0.1 * self.counts.n)
        return made


def _script(make: Any) -> tuple[list[Any], list[int], Any]:
    torch.manual_seed(0)
    counts = Checked()
    net = nn.Sequential(nn.Linear(4, 4), gs.opaque(Counting(counts)))
    for rank, layer in enumerate(net):
        layer.place("MS_WORKER", rank)
    model = make(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    losses, seen = [], []
    for step, batch in enumerate(BATCHES):
        losses.append(model.train_step(*batch).clone())
        seen.append(counts.n)
        if step in (1, 3):
            counts.n = 10 * step
    return losses, seen, model.state_dict()


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize("at", range(14, 27, 4))
def test_the_script_finds_what_code_kept_whole_has_counted(at: int) -> None:
    losses, seen, state = _script(PlainModel)
    settings = SnapshotSettings(every=1)
    cluster = ThreadCluster(lambda rank: _script(gs.Model), 2, settings, {1: [at]})
    for rank, found in enumerate(cluster.run()):
        assert difference((losses, state), (found[0], found[2])) is None
        assert rank == 1 or found[1] == seen  # calls are given to it again, without their effects
    assert cluster.num_killed == 1
