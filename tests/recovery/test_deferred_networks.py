"""What of a network that is built deferred is filled, and when."""

from __future__ import annotations

import pytest
import torch
from recovery_features.changed_parts import sgd
from recovery_features.parts import plain_net
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.deferred.construction import is_deferred

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


def test_a_model_fills_nothing() -> None:
    def run(rank: int) -> list[bool]:
        with gs.deferred_init():
            net = plain_net(place=True)
        model = gs.Model(net, nn.CrossEntropyLoss(), sgd(net))
        found = [is_deferred(net)]
        model.train_step(torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))
        return [*found, is_deferred(net)]

    for found in ThreadCluster(run, 3, is_recoverable=False).run():
        assert found == [True, False]
