"""Trained under ``graphsplit check``: the same on all sides, or not, as its argument says."""

from __future__ import annotations

import random
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import graphsplit as gs

WHAT = sys.argv[1]


class Net(nn.Module):
    """A network with everything that has state: BatchNorm, dropout, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(16, 3)
        self.scale = 1.25 if WHAT == "scale" and gs.get_world_size() > 1 else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.relu(self.norm(self.first(x))))
        if WHAT == "refused":
            hidden = hidden + float(hidden.detach().numpy().size > 0)
        return self.last(hidden * self.scale)


class Drawing(gs.callbacks.Callback):
    """Evaluates, and draws, in the middle of an epoch."""

    def __init__(self, loader: DataLoader[tuple[torch.Tensor, ...]]) -> None:
        self.loader = loader

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        random.random()
        np.random.rand()
        context.model.eval(self.loader)


gs.init()
if WHAT != "unseeded":
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
net = Net()
net.first.place("MS_WORKER", 0)
net.last.place("MS_WORKER", 1)
if WHAT == "gradient":
    factor = 2 if gs.get_rank() == 1 else 1
    net.last.weight.register_hook(lambda gradient: gradient * factor)
inputs, target = torch.randn(32, 8), torch.randint(0, 3, (32,))
loader = DataLoader(TensorDataset(inputs, target), batch_size=8, shuffle=True)
model = gs.Model(
    net,
    loss_fn=nn.CrossEntropyLoss(),
    optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
    metrics={"Accuracy": gs.metrics.Accuracy()},
    microbatches=1 if WHAT == "gradient" else 2,
)
if WHAT in ("same", "unseeded", "refused"):
    model.predict(inputs[:4])
if WHAT == "refused":
    model.eval(loader)
model.train_step(inputs, target)
model.train(2, loader, callbacks=[Drawing(loader)] if WHAT in ("same", "unseeded") else [])
print("not reached where four steps are asked for")
