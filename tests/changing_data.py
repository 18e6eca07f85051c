"""A network of three workers, and a data set that does something to it when it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset


class Net(nn.Module):
    """Worker 0 reads inputs, worker 1 targets; worker 2 reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        if hasattr(nn.Module, "place"):
            for rank, layer in ((0, self.a), (2, self.b), (1, self.c)):
                layer.place("MS_WORKER", rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return made


class Changing(Dataset[Any]):
    """Does something to a network when a sample is asked for."""

    def __init__(self, net: Any, change: Callable[[Any, int], object]) -> None:
        self.net, self.change, self.num_read = net, change, 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        self.change(self.net, self.num_read)
        return torch.arange(3.0) * 0.1 + index, torch.full((2,), index * 0.2)
