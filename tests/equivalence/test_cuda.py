"""Networks on a GPU, cut: the bits of the plain loop on that GPU. Needs one; CI has none."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from simulated.equivalence import assert_same_bits
from torch import nn

import graphsplit as gs
from graphsplit.errors import PlacementError

assert threads_as_workers
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
BATCHES = [(torch.randn(8, 6), torch.randint(0, 4, (8,))) for _ in range(3)]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Net(nn.Module):
    """Moves what it is given to the GPU, and back; ``mixed``: its norm stays on the CPU."""

    def __init__(self, p: float = 0.0, *, mixed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.one = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8)).cuda()
        self.two = nn.Sequential(nn.Dropout(p), nn.Linear(8, 4)).cuda()
        if not mixed:
            self.norm.cuda()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.to(self.norm.weight.device)).to("cuda")
        h = self.one(x)
        return (self.two(h) * h.mean()).cpu()


def cut(net: nn.Module) -> None:
    net.get_submodule("norm").place("MS_WORKER", 0)
    net.get_submodule("one").place("MS_WORKER", 1)
    net.get_submodule("two").place("MS_WORKER", 0)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def test_cuts_on_the_gpu() -> None:
    for mixed in (False, True):
        for microbatches in (1, 4):
            assert_same_bits(
                lambda mixed=mixed: Net(mixed=mixed),  # type: ignore[misc]
                BATCHES,
                num_workers=2,
                place=cut,
                loss_fn=nn.CrossEntropyLoss(),
                make_optimizer=adamw,
                microbatches=microbatches,
            )


def test_dropout_there_in_one_process() -> None:
    found: list[list[torch.Tensor]] = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        net, loss_fn = Net(0.5), nn.CrossEntropyLoss()
        optimizer = adamw(net)
        model = None if is_plain else gs.Model(net, loss_fn=loss_fn, optimizer=optimizer)
        for x, y in BATCHES:
            if model is not None:
                model.train_step(x, y)
                continue
            optimizer.zero_grad()
            loss_fn(net(x), y).backward()
            optimizer.step()
        found.append([*net.parameters(), torch.cuda.get_rng_state()])
    assert all(map(torch.equal, *found))


def test_dropout_there_on_several_workers_is_refused() -> None:
    with pytest.raises(PlacementError, match="draws random numbers on cuda:0"):
        assert_same_bits(
            lambda: Net(0.5), BATCHES, num_workers=2, place=cut, loss_fn=nn.CrossEntropyLoss()
        )


def _two_calls(distribute: Any) -> list[Any]:
    """An own loop: two calls under one backward, what the script reads and writes in between."""
    torch.manual_seed(0)
    net = Net(mixed=True)
    cut(net)
    optimizer, net, found = adamw(net), distribute(net), []
    for x, y in BATCHES:
        optimizer.zero_grad()
        scores = net(x)
        loss = nn.functional.cross_entropy(scores.to("cuda"), y.to("cuda")) + net(x * 2).mean()
        assert scores.device == torch.device("cpu")
        loss.backward()
        found += [loss.item(), [p.grad.detach().clone() for p in net.parameters()]]
        optimizer.step()
    return [*found, copy.deepcopy(net.state_dict())]


@pytest.mark.usefixtures("threads_as_workers")
def test_an_own_loop_there_has_the_bits_of_one_process() -> None:
    expected = _two_calls(lambda net: net)
    cluster = ThreadCluster(
        lambda rank: copy.deepcopy(_two_calls(gs.distribute)), 2, is_recoverable=False
    )
    for found in cluster.run():
        assert difference(expected, found) is None


@pytest.mark.usefixtures("threads_as_workers")
def test_a_gradients_device_is_refused_in_an_own_loop() -> None:
    def loop(rank: int) -> None:
        net = Net()
        cut(net)
        net = gs.distribute(net)
        net(BATCHES[0][0]).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)

    with pytest.raises(Exception, match="as clip_grad_norm_ does"):
        ThreadCluster(loop, 2, is_recoverable=False).run()
