"""Whether a failed capture's error comes in plain PyTorch too is looked up without a trace."""

from __future__ import annotations

import copy
from typing import Any

import torch
from simulated.compare import difference
from torch import nn

from graphsplit.capture.own_errors import own_error


class Counting(nn.Module):
    """Writes into tensors of its own, some of them without any input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(1))
        self.seen = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.mul_(0.5).add_(self.calls)
        self.seen += x.mean(0)
        found: torch.Tensor = self.last(self.norm(x))
        return found.view(5, -1)


def test_a_network_is_left_as_it_was():
    network = Counting()
    before: dict[str, Any] = copy.deepcopy(vars(network))
    calls, seen, counted = network.calls, network.seen, network.norm.num_batches_tracked
    x = torch.randn(8, 4)
    try:
        copy.deepcopy(network)(x)
    except RuntimeError as error:
        found = own_error(network, network.__call__, ((x,), {}), error)
    assert found is not None
    assert found.text.startswith("RuntimeError: shape '[5, -1]' is invalid")
    assert network.calls is calls
    assert network.seen is seen
    assert network.norm.num_batches_tracked is counted
    assert (calls.item(), counted.item(), seen.tolist()) == (0, 0, [0.0] * 4)
    assert difference(before["_modules"]["norm"].state_dict(), network.norm.state_dict()) is None
