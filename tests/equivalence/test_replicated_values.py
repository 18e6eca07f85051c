"""Python values that forward leaves, where replicas share the microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of
from replica_helpers import Net, planned, same_over_two, whole
from simulated.simulate import Captures
from torch.nn.utils import prune

from graphsplit.capture.graph import Mode
from graphsplit.errors import PlacementError


class Once(Net):
    """As in transformers: the first call installs something, and a flag says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "is_ready", False):
            self.widths = [x.shape[1]]
            self.is_ready = True
        return super().forward(x)


class Told(Net):
    """Leaves at each call what no call reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows, self.shapes = x.shape[0], {"x": [*x.shape]}
        return super().forward(x)


@pytest.mark.parametrize("order", ["left", "pairs"])
@pytest.mark.parametrize("make", [Once, Told])
def test_what_every_worker_leaves_by_itself(make: Any, order: str) -> None:
    cluster = same_over_two(
        make,
        batches_of(8, 6, 6, num=2),
        steps=3,
        microbatches=4,
        gradient_order=order,
        captures=Captures(),
    )
    plan = cluster.latest(Mode.TRAIN)
    assert plan is not None and len(plan.plan.lanes) == 2  # at once, not in turns
    left = [vars(worker.task.network) for worker in cluster.workers]
    if make is Once:
        assert all(net["is_ready"] is True and net["widths"] == [6] for net in left)
    else:
        found = [(net["rows"], net["shapes"]) for net in left]
        assert found == [(8, {"x": [8, 6, 6]})] * 2  # it was evaluated last


class Normed(Net):
    """A weight that is computed before each call, and left where a parameter was."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.weight_norm(self.body[0])


class Pruned(Net):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.body[0], "weight", amount=0.3)
        prune.random_unstructured(self.head, "bias", amount=0.3)


class Beside(Net):
    """Leaves a tensor, with its history, that the same call reads elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        self.body.size = hidden.pow(2).mean()
        return self.head(hidden) * (1 + self.body.size)


class Seen(Net):
    """Leaves tensors in containers, with a history and without, for the script alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        self.seen = [hidden, hidden.detach()]
        self.parts = {"x": x, "size": {"of": hidden.pow(2).mean().detach(), "n": 3}}
        return self.head(hidden)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("order", ["left", "pairs"])
@pytest.mark.parametrize("make", [Normed, Pruned, Beside, Seen])
def test_tensors_that_forward_leaves_and_nobody_reads_later(make: Any, order: str) -> None:
    same_over_two(
        make,
        batches_of(10, 6, 6, num=2),  # microbatches of two sizes
        steps=3,
        microbatches=4,
        gradient_order=order,
        captures=Captures(),
    )


class Counts(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * self.calls


class Collects(Net):
    """A list that grows with each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.mean())
        return super().forward(x)


class Thaws(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.head.weight.requires_grad_(True)
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Counts, r"leaves net\.calls: .*, one"),
        (Collects, r"leaves net\.seen: .*, one"),
        (Thaws, r"leaves .*head\.weight.*: True, one"),
    ],
)
def test_what_each_microbatch_finds_of_the_one_before_is_refused(make: Any, why: str) -> None:
    with pytest.raises(PlacementError, match=why):
        planned(whole(0, 1), make)
