"""A network whose body draws: planned, or compared with the loop, over replicas."""

from __future__ import annotations

import functools
from typing import Any

import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures, SimulatedCluster
from torch import nn

from graphsplit.batches.microbatches import Divider
from graphsplit.capture.graph import Mode
from graphsplit.planning.task import Task


class Net(nn.Module):
    """A body with dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 6), nn.Tanh()
        )
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def whole(*ranks: int) -> Any:
    return lambda net: net.place("MS_WORKER", list(ranks))


def planned(
    place: Any,
    make: Any = Net,
    microbatches: int = 4,
    *,
    order: Any = "left",
    dtype: torch.dtype | None = None,
    is_cluster: bool = False,
) -> Any:
    def make_task() -> Task:
        torch.manual_seed(0)
        net = make()
        place(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return Task(
            net,
            rows_against_target,
            optimizer,
            "affinity",
            False,
            divider=Divider(microbatches),
            gradient_order=order,
            gradient_dtype=dtype,
        )

    cluster = SimulatedCluster(make_task, 3, captures=Captures())
    (batch,) = batches_of(max(8, microbatches), 6, 6, num=1)
    cluster.train_step((batch, {}))
    return cluster if is_cluster else cluster.latest(Mode.TRAIN)


same_over_two = functools.partial(
    assert_same_bits,
    num_workers=2,
    loss_fn=rows_against_target,
    place=whole(0, 1),
)
