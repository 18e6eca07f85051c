"""Networks of the system tests."""

from __future__ import annotations

import torch
from torch import nn


class LeNet(nn.Module):
    """LeNet-5 for images of 32 by 32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.conv1(x)))
        x = self.pool(self.relu(self.conv2(x)))
        x = self.relu(self.fc1(x.flatten(1)))
        return self.fc3(self.relu(self.fc2(x)))


class Fan(nn.Module):
    """Residual, fan-out to three workers, A -> B -> A, an input used late, dropout, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.back = nn.Linear(12, 16), nn.Linear(16, 16)
        self.left = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3))
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        self.right = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.ReLU(inplace=True))
        self.head = nn.Linear(16 + 12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.stem(x))
        total = self.left(h) + self.middle(h) * self.right(h) + h
        total = self.back(total) + total
        with gs_place(2):
            total = nn.functional.dropout(total, 0.1, self.training)
        return self.head(torch.cat([total, x], dim=1))


class Wide(nn.Module):
    """A value of 64 MiB between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.spread, self.gather = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.spread(x)
        wide = wide.unsqueeze(1).repeat(1, 64 * 1024 * 1024 // 4 // 16 // max(len(x), 1), 1)
        return self.gather(wide).mean(dim=1)


def gs_place(rank: int):
    """Place operations on a worker; a test of one process has five ranks too."""
    import graphsplit as gs

    return gs.place("MS_WORKER", rank)
