"""The toy of PyTorch's DDP tutorial, on two replicas: `graphsplit run -n 2 ddp_toy.py`.

DDP's script wraps the model, shards the loader and averages gradients. Here one model is placed on
the workers, and each runs some of a batch's four microbatches: nothing is wrapped, every worker
passes the whole batch, and the bits are those of one process, whatever the number of workers.
"""

from __future__ import annotations

import torch
from torch import nn

import graphsplit as gs


class ToyModel(nn.Module):
    """As in the tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A batch of rows."""
        y: torch.Tensor = self.net2(self.relu(self.net1(x)))
        return y


def train(steps: int = 5, workers: int = 2) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and parameters."""
    torch.manual_seed(0)
    net = ToyModel()
    net.place("MS_WORKER", list(range(workers)))  # instead of DDP's wrapper
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    model = gs.Model(net, nn.MSELoss(), optimizer, microbatches=4)
    losses = [model.train_step(torch.randn(20, 10), torch.randn(20, 5)) for _ in range(steps)]
    return losses, model.state_dict()


if __name__ == "__main__":
    gs.init()
    print("losses:", [f"{loss:.4f}" for loss in train(workers=gs.get_world_size())[0]])
