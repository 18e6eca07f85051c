"""A loop of its own under ``graphsplit check``: the same on all sides, or not, by its argument."""

from __future__ import annotations

import random
import sys

import torch
from torch import nn

import graphsplit as gs

WHAT = sys.argv[1]


def made(*sizes: int) -> nn.Sequential:
    """A linear layer on each worker, and between them everything that has state."""
    width = sizes[1]
    first, last = nn.Linear(sizes[0], width), nn.Linear(width, sizes[2])
    first.place("MS_WORKER", 0)
    last.place("MS_WORKER", 1)
    return nn.Sequential(first, nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), last)


gs.init()
torch.manual_seed(0)
trunk, head = gs.distribute(made(6, 16, 8)), gs.distribute(made(8, 12, 3))
optimizers = [
    torch.optim.Adam(trunk.parameters(), lr=0.01),
    torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9),
    torch.optim.LBFGS(head.parameters(), max_iter=2),
]
for step in range(4):
    if WHAT == "decay" and step == 1:
        optimizers[1].param_groups[0]["weight_decay"] = 0.01 * gs.get_world_size()
    if WHAT == "steps" and step == 1 and gs.get_world_size() > 1:
        optimizers.reverse()
    inputs, target = torch.randn(8, 6), torch.randint(0, 3, (8,))

    def closure(inputs: torch.Tensor = inputs, target: torch.Tensor = target) -> torch.Tensor:
        """Gradients of both networks."""
        trunk.zero_grad()
        head.zero_grad()
        loss: torch.Tensor = nn.functional.cross_entropy(head(trunk(inputs)), target)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for optimizer in optimizers:
        optimizer.step(closure)
    random.random()
print("not reached where six steps are asked for")
