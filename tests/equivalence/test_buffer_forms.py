"""Buffers that forward makes, or gives another form: the bits of the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

from graphsplit.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore:network or loss reads:UserWarning")


class Net(nn.Module):
    """Two layers on two workers, with a buffer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.begin()

    def begin(self) -> None:
        self.register_buffer("kept", None)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.middle(torch.tanh(self.first(x))))


def place(net: Any) -> None:
    net.first.place("MS_WORKER", 0)
    net.second.place("MS_WORKER", 1)


class NoneAtFirst(Net):
    def middle(self, h: torch.Tensor) -> torch.Tensor:
        if self.kept is not None:
            h = h + self.kept
        self.kept = h.detach().mean(0)
        return h


class Grows(Net):
    """A mask as long as the longest sequence so far."""

    def begin(self) -> None:
        self.register_buffer("mask", torch.ones(1, 1).bool())

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        rows = h.shape[0]
        if self.mask.shape[0] < rows:
            self.mask = torch.ones(rows, rows).tril().bool()
        return self.mask[:rows, :rows].float() @ h


class RegistersItself(Net):
    """A table for every length of its own: each has its turn again."""

    def begin(self) -> None:
        pass

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        rows = h.shape[0]
        if not hasattr(self, "table") or self.table.shape[0] != rows:
            self.register_buffer("table", torch.arange(rows).cos()[:, None], persistent=False)
        return h * self.table


class TakesTurns(Net):
    """None, and a tensor; assigned, and deleted."""

    def begin(self) -> None:
        self.register_buffer("kept", None)
        self.register_buffer("once", torch.ones(4))

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "once"):
            h = h + self.once
            del self.once
        if self.kept is None:
            self.kept = h.detach().double().sum(0)
            return h
        h, self.kept = h + self.kept.float(), None
        return h


class PastTheModule(Net):
    def begin(self) -> None:
        self.register_buffer("kept", torch.ones(4))

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.kept
        self._buffers["kept"] = h.detach().mean(0)
        return h


class Queue(Net):
    def begin(self) -> None:
        self.register_buffer("queue", torch.zeros(0, 4))

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        self.queue = torch.cat([self.queue, h.detach()])[-10:]
        return h + self.queue.mean(0)


class MakesALossEachTime(Net):
    """As transformers' models do: a loss without weights registers a buffer that is None."""

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return h + nn.CrossEntropyLoss(label_smoothing=0.1)(h, h.detach().argmax(1))


def sizes(*rows: int) -> list[Any]:
    return [batch for number in rows for batch in batches_of(number, 3, num=1)]


@pytest.mark.parametrize(
    ("network", "microbatches"),
    [
        (NoneAtFirst, 4),
        (Grows, 1),
        (RegistersItself, 4),
        (TakesTurns, 1),
        (Queue, 2),
        (PastTheModule, 1),
        (MakesALossEachTime, 2),
    ],
)
def test_buffers_take_the_form_that_forward_gives_them(
    network: type[Net], microbatches: int
) -> None:
    assert_same_bits(
        network,
        sizes(4, 8),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        microbatches=microbatches,
        evaluate_after=(1,),
        plan_everywhere=True,
    )


def test_lengths_that_come_again_cost_no_new_plan() -> None:
    cluster = assert_same_bits(
        RegistersItself,
        sizes(4, 8, 4, 8, 4, 8),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        evaluate_after=(),
        plan_everywhere=True,
    )
    assert len(list(cluster.workers[0].planner.recordings)) == 3  # the first, and one each way


class PartOfAWeight(Net):
    def middle(self, h: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.second.weight.detach()[0]
        return h + self.kept


class OneTensorTwice(Net):
    def begin(self) -> None:
        self.register_buffer("kept", torch.zeros(4))
        self.register_buffer("other", torch.zeros(4))

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        self.kept = self.other = h.detach().mean(0)
        return h + self.kept


class WithAGradient(Net):
    def middle(self, h: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.second.bias + 1
        return h + self.kept


class Sparse(Net):
    def middle(self, h: torch.Tensor) -> torch.Tensor:
        self.kept = torch.eye(4).to_sparse()
        return h


@pytest.mark.parametrize(
    ("network", "told"),
    [
        (PartOfAWeight, r"the memory of second\.weight"),
        (OneTensorTwice, "the memory of other"),
        (WithAGradient, "a tensor with a gradient"),
        (Sparse, "cannot be followed"),
    ],
)
def test_what_a_copy_would_not_follow_is_refused(network: type[Net], told: str) -> None:
    with pytest.raises(CaptureError, match=told):
        assert_same_bits(
            network,
            sizes(4, 4),
            num_workers=2,
            place=place,
            loss_fn=rows_against_target,
            plan_everywhere=True,
        )
