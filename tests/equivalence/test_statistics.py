"""Running statistics that are added afterwards have the bits of a batch norm; frozen ones stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import batches_of, rows_against_target
from simulated.simulate import SimulatedCluster
from torch import nn

from graphsplit.planning.task import Task
from graphsplit.rewrite import buffer_updates
from graphsplit.rewrite.buffer_updates import adds_so, fold_statistics

SHAPES = [(4, 3), (2, 32, 7), (3, 5, 4, 4), (2, 64, 8, 8), (2, 9, 2, 3, 4), (3, 1, 5), (2, 17, 1)]


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "channels last" and x.dim() > 3:
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        return x.contiguous(memory_format=last)
    if layout == "turned":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return torch.cat([x, x], -1)[..., ::2] if layout == "with gaps" else x


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["plain", "channels last", "turned", "with gaps"])
def test_statistics_of_any_input(
    layout: str, dtype: Any, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_known:
        monkeypatch.setattr(buffer_updates, "adds_so", lambda _: False)
    generator = torch.Generator().manual_seed(1)
    for shape in SHAPES:
        for momentum in (0.1, 0.01, 0.9, 1 / 3, 0.0, 1.0):
            mean, var = torch.rand(2, shape[1], generator=generator, dtype=dtype).unbind()
            own_mean, own_var = torch.zeros(2, shape[1], dtype=dtype).unbind()
            found = mean.clone(), var.clone()
            for scale in (1.0, 100.0, 1e-3):
                x = torch.randn(shape, generator=generator, dtype=dtype) * scale + scale
                x = laid_out(x, layout)
                F.batch_norm(x, mean, var, training=True, momentum=momentum)
                F.batch_norm(x, own_mean, own_var, training=True, momentum=1.0)
                fold_statistics(x, *found, own_mean, own_var, momentum)
                assert torch.equal(mean, found[0]) and torch.equal(var, found[1])


def test_statistics_that_are_not_finite() -> None:
    x = torch.ones(4, 3)
    x[1, 1], x[2, 2] = float("inf"), float("nan")
    mean, var = torch.zeros(3), torch.ones(3)
    found = mean.clone(), var.clone()
    own = torch.zeros(3), torch.zeros(3)
    F.batch_norm(x, mean, var, training=True)
    F.batch_norm(x, *own, training=True, momentum=1.0)
    fold_statistics(x, *found, *own, 0.1)
    assert mean.isfinite().tolist() == found[0].isfinite().tolist() == [True, False, False]
    assert torch.equal(mean.nan_to_num(7), found[0].nan_to_num(7))
    assert torch.equal(var.nan_to_num(7), found[1].nan_to_num(7))


def test_this_torch_adds_them_so() -> None:
    assert adds_so(torch.float32) and adds_so(torch.float64)
    assert not adds_so(torch.bfloat16)


class _Frozen(nn.Sequential):
    def train(self, mode: bool = True) -> _Frozen:
        super().train(mode)
        self[0].train(False)
        return self


def test_norms_that_a_train_of_the_networks_own_freezes_are_frozen_on_workers() -> None:
    def network() -> Any:
        torch.manual_seed(0)
        return _Frozen(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def make_task() -> Task:
        net = network()
        net[0].place("MS_WORKER", 0)
        net[3].place("MS_WORKER", 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        return Task(net, rows_against_target, optimizer, unplaced="affinity", with_loss=True)

    net = network().train()
    optimizer, cluster = torch.optim.SGD(net.parameters(), lr=0.05), SimulatedCluster(make_task, 2)
    for inputs, target in batches_of(8, 3, num=3):
        optimizer.zero_grad()
        loss = rows_against_target(net(inputs), target)
        loss.backward()
        optimizer.step()
        found = cluster.train_step(((inputs, target), {}))
        assert all(torch.equal(loss.detach(), other) for other in found)
    mean = cluster.owner_of("net.0.running_mean").task.network[0].running_mean
    assert torch.equal(mean, net[0].running_mean)
