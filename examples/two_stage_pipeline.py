"""MegEngine's pipeline of two stages: `graphsplit run -n 2 two_stage_pipeline.py`.

There each process builds its own stage, and calls `remote_send` and `remote_recv`. Here there is
one network; what crosses the cut follows from where layers live, its gradient too, and four
microbatches keep both workers busy.
"""

from __future__ import annotations

import torch
from torch import nn

import graphsplit as gs


def network() -> nn.Sequential:
    """Two stages of convolutions."""
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    return nn.Sequential(first, second)


def train(steps: int = 5) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and parameters."""
    torch.manual_seed(0)
    net = network()
    net[0].place("MS_WORKER", 0)
    net[1].place("MS_WORKER", 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, microbatches=4, schedule="1f1b")
    losses = []
    for _ in range(steps):
        losses.append(model.train_step(torch.randn(16, 3, 16, 16), torch.randint(10, (16,))))
    return losses, model.state_dict()


if __name__ == "__main__":
    gs.init()
    print("losses:", [f"{loss:.4f}" for loss in train()[0]])
