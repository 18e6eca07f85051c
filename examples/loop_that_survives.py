"""A training loop of one's own that survives the loss of workers, with the same bits.

    GS_RECOVERY=wait_rejoin graphsplit run -n 2 --restarts 3 loop_that_survives.py

Kill a worker while it runs, `kill -9 PID`: all workers start this script anew, and the loop goes on
at the batch of the last snapshot. Without the lines of graphsplit it is the loop of one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import graphsplit as gs


class Classifier(nn.Module):
    """Two halves, with batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 32), nn.BatchNorm1d(32)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of each class, for a batch of rows."""
        scores: torch.Tensor = self.head(self.dropout(torch.relu(self.norm(self.first(x)))))
        return scores


def batches() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Rows whose largest number of the first four is their class; shuffled by its own generator."""
    rows = torch.randn(240, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(rows, rows[:, :4].argmax(1))
    order = torch.Generator().manual_seed(2)
    return DataLoader(data, batch_size=16, shuffle=True, generator=order)


def train(epochs: int = 3) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Counts, parameters, and averaged parameters."""
    torch.manual_seed(0)
    net = Classifier()
    net.first.place("MS_WORKER", 0)
    net.head.place("MS_WORKER", 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 45)
    net = gs.distribute(net)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loader, criterion = batches(), nn.CrossEntropyLoss()

    counts: dict[str, Any] = {"losses": [], "right": []}
    for _ in gs.loop(range(epochs), keep=[optimizer, scheduler, ema, counts]):
        for x, y in gs.loop(loader):
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            ema.update_parameters(net)
            counts["losses"].append(loss.item())
        ema.eval()
        with torch.no_grad():
            right = sum((ema(x).argmax(1) == y).sum().item() for x, y in loader)
        counts["right"].append(right / 240)
    return counts, net.state_dict(), ema.module.state_dict()


if __name__ == "__main__":
    gs.init()
    found, *_ = train()
    print("losses:", [f"{loss:.4f}" for loss in found["losses"][::15]], "right:", found["right"])
