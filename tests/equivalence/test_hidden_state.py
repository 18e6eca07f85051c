"""Tensors that forward keeps from step to step: hidden states, averages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from simulated.simulate import SimulatedCluster
from torch import nn

from graphsplit.errors import CaptureError
from graphsplit.planning.task import Task


class Cell(nn.Module):
    """Autograd saves the hidden state that it reads, and then assigns anew."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(3, 4), nn.Linear(4, 4)
        if is_buffer:
            self.register_buffer("h", torch.zeros(1, 4))
        else:
            self.h = torch.zeros(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.w(x) + self.u(self.h))
        self.h = h.detach().mean(0, keepdim=True)
        return h


class InPlace(Cell):
    """Writes into what it keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.u(self.w(x))
        self.h.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h - self.h


class Historic(Cell):
    """Forgets to detach."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.w(x) + self.u(self.h))
        self.h = h.mean(0, keepdim=True)
        return h


class Watching(Cell):
    """Keeps a tensor with a history that no loss depends on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.u(self.w(x))
        self.h = self.h * 0.5 + h.mean(0, keepdim=True)
        return h if self.training else h + self.h


class Centered(Cell):
    """Keeps in train mode what it reads in eval mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.u(self.w(x))
        if not self.training:
            return h - self.h
        self.h = h.detach().mean(0, keepdim=True)
        return h


class InTuple(Cell):
    """Keeps two tensors in one attribute."""

    def __init__(self) -> None:
        super().__init__(is_buffer=False)
        self.both = (torch.zeros(1, 4), torch.zeros(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.w(x) + self.u(self.both[0]) + self.both[1])
        self.both = (h.detach().mean(0, keepdim=True), h.detach().sum(0, keepdim=True))
        return h


class Shared(Cell):
    """Two buffers over one memory, of which one is assigned anew."""

    def __init__(self) -> None:
        super().__init__(is_buffer=True)
        self.register_buffer("same", self.h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.same  # type: ignore[operator]


class Mean(nn.Module):
    """A loss with a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(())

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = rows_against_target(outputs, target)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss * (1 + self.average)


def trained(
    make: Callable[[], nn.Module],
    *,
    microbatches: int = 1,
    recompute: bool = False,
    loss_fn: Callable[..., torch.Tensor] = rows_against_target,
    worker_of_u: int = 1,
) -> SimulatedCluster:
    def place(net: nn.Module) -> None:
        net.w.place("MS_WORKER", 0)  # type: ignore[union-attr]
        net.u.place("MS_WORKER", worker_of_u)  # type: ignore[union-attr]

    return assert_same_bits(
        make,
        batches_of(8, 3, num=4),
        num_workers=2,
        place=place,
        loss_fn=loss_fn,
        microbatches=microbatches,
        recompute=recompute,
        evaluate_after=(1, 3),
        plan_everywhere=True,
    )


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("is_buffer", [True, False])
@pytest.mark.parametrize("kind", [Cell, InPlace, Watching, Centered])
def test_the_next_step_reads_what_this_one_keeps(
    kind: type[Cell], is_buffer: bool, microbatches: int
) -> None:
    trained(lambda: kind(is_buffer=is_buffer), microbatches=microbatches)


@pytest.mark.parametrize("kind", [Cell, InPlace])
def test_what_is_run_again_reads_the_hidden_state_of_then(kind: type[Cell]) -> None:
    trained(lambda: kind(is_buffer=True), microbatches=4, recompute=True)


def test_a_hidden_state_may_live_on_either_worker() -> None:
    def make() -> nn.Module:
        return Cell(is_buffer=False)

    def owner_if(worker_of_u: int) -> int:
        return trained(make, worker_of_u=worker_of_u).owner_of("h").rank

    assert {owner_if(0), owner_if(1)} == {0, 1}


def test_a_plan_made_before_a_tensor_became_a_buffer_is_not_used_again() -> None:
    def place(net: nn.Module) -> None:
        net.w.place("MS_WORKER", 0)  # type: ignore[union-attr]
        net.u.place("MS_WORKER", 1)  # type: ignore[union-attr]

    x = batches_of(8, 3)[0][0]

    def task() -> Task:
        torch.manual_seed(0)
        net = Centered(is_buffer=False)
        place(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return Task(net, rows_against_target, optimizer, "affinity", with_loss=True)

    reference = task().network.eval()
    cluster = SimulatedCluster(task, 2)
    cluster.predict(((x,), {}))
    cluster.train_step(((x, torch.zeros(8)), {}))
    after = cluster.predict(((x,), {}))[0]
    assert not torch.equal(after, reference(x))
    net = task().network
    loss = rows_against_target(net(x), torch.zeros(8))
    loss.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert torch.equal(after, net.eval()(x))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_loss_may_keep_a_tensor_too(microbatches: int) -> None:
    trained(lambda: Cell(is_buffer=True), loss_fn=Mean(), microbatches=microbatches)


def test_state_dict_keeps_its_keys_where_an_attribute_has_become_a_buffer() -> None:
    cluster = trained(lambda: Cell(is_buffer=False))
    keys = {tuple(worker.task.network.state_dict(keep_vars=True)) for worker in cluster.workers}
    assert keys == {("w.weight", "w.bias", "u.weight", "u.bias")}


def test_a_hidden_state_with_a_history_is_refused() -> None:
    with pytest.raises(CaptureError, match="a second time") as caught:
        trained(lambda: Historic(is_buffer=True))
    assert "self.h = h.mean(0, keepdim=True)" in str(caught.value)
    assert "Fix: assign it without its history, with .detach()" in str(caught.value)


@pytest.mark.parametrize("make", [InTuple, Shared])
def test_two_tensors_are_kept_in_one_attribute_or_begin_as_one(make: Callable[[], Cell]) -> None:
    trained(make)


class InObject(Cell):
    """Keeps what it reads in an object that it makes."""

    class State:
        """Of one call."""

        def __init__(self, h: torch.Tensor) -> None:
            self.h = h

    def __init__(self) -> None:
        super().__init__(is_buffer=False)
        self.state: InObject.State | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.w(x) if self.state is None else self.w(x) + self.u(self.state.h)
        self.state = self.State(h.detach().mean(0, keepdim=True))
        return h


def test_a_hidden_state_in_an_object_of_forwards_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"changes net\.state at every call"):
        trained(InObject)
