"""Data parallelism, a ResNet-like and a GPT-2-like network: `graphsplit run -n 2 replicas.py`.

What DDP does by copies of the network, replicas do inside one: each worker runs some of a batch's
microbatches. Gradients of two batches are added before each step, the learning rate warms up, and
evaluation is divided, too. Losses, parameters and metrics do not depend on how many workers run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpt_like import Gpt, batch, loss_of
from torch import nn
from torch.nn import functional

import graphsplit as gs

PARTS, ACCUMULATE, WARM_UP = 4, 2, 3
Result = tuple[list[torch.Tensor], dict[str, float], dict[str, torch.Tensor]]


class Residual(nn.Module):
    """Two convolutions with batch norms, beside a skip."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, inputs, H, W) to (rows, outputs, H / stride, W / stride)."""
        y = functional.relu(self.norm1(self.conv1(x)))
        found: torch.Tensor = functional.relu(self.norm2(self.conv2(y)) + self.skip(x))
        return found


class ResNet(nn.Module):
    """Three blocks, over images of 3 x 16 x 16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Residual(3, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 3, 16, 16) to (rows, 10)."""
        found: torch.Tensor = self.head(self.blocks(x).mean((2, 3)))
        return found


def pictures(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of images and their classes; the last one is shorter."""
    sizes = [16] * (number - 1) + [8]
    return [(torch.randn(n, 3, 16, 16), torch.randint(10, (n,))) for n in sizes]


def tokens(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of tokens, and what follows each."""
    return [batch(index) for index in range(number)]


def train(
    make: Callable[[], Any],
    loss_fn: Any,
    data: list[tuple[torch.Tensor, torch.Tensor]],
    workers: int,
) -> Result:
    """Two epochs; gives losses, metrics and parameters."""
    torch.manual_seed(0)
    net = make()
    net.place("MS_WORKER", list(range(workers)))  # instead of DDP's wrapper
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=WARM_UP)
    model = gs.Model(
        net,
        loss_fn,
        optimizer,
        metrics={"Loss": gs.metrics.Loss()},
        microbatches=PARTS,
        accumulate=ACCUMULATE,
        gradient_order="pairs",
    )
    losses = []
    for _ in range(2):
        for number, (inputs, target) in enumerate(data, 1):
            losses.append(model.train_step(inputs, target))
            if number % ACCUMULATE == 0:
                warm_up.step()
    return losses, model.eval(data), model.state_dict()


def train_both(workers: int) -> tuple[Result, Result]:
    """The images' network, then the text's."""
    torch.manual_seed(1)
    seen, read = pictures(4), tokens(4)
    of_images = train(ResNet, functional.cross_entropy, seen, workers)
    return of_images, train(Gpt, loss_of, read, workers)


if __name__ == "__main__":
    gs.init()
    for losses, metrics, _ in train_both(gs.get_world_size()):
        print("losses:", [f"{loss:.4f}" for loss in losses], "and", metrics)
