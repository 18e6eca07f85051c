"""Trains with an optimizer of one's own; prints the losses as hexadecimal numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "equivalence"))
import own_optimizers


def start(kind: str) -> tuple[nn.Sequential, torch.optim.Optimizer, list[tuple[torch.Tensor, ...]]]:
    """Network, optimizer and batches."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(5)]
    if kind == "Momentum":
        return net, own_optimizers.Momentum(net.parameters()), batches
    return net, getattr(own_optimizers, kind)(net.parameters(), lr=0.05), batches


SCALES = (0.25, 0.75)  # of what is added up in one step


def plain(kind: str, scales: tuple[float, ...] = (1.0,)) -> list[str]:
    """The losses of a plain loop, which adds up a batch's gradients once for each scale."""
    net, optimizer, batches = start(kind)
    losses = []
    for inputs, target in batches:
        optimizer.zero_grad()
        for scale in scales:
            loss = nn.functional.mse_loss(net(inputs), target)
            (loss * scale).backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def train(kind: str, first: int, second: int, *, in_parts: bool) -> None:
    """Train with the two layers on two workers, or on one."""
    import graphsplit as gs

    net, optimizer, batches = start(kind)
    net[0].place("MS_WORKER", first)
    net[2].place("MS_WORKER", second)
    model = gs.Model(net, nn.MSELoss(), optimizer)
    losses = []
    for batch in batches:
        if in_parts:
            model.zero_grad()
            loss = [model.forward_backward(*batch, scale=scale) for scale in SCALES][-1]
            model.step()
        else:
            loss = model.train_step(*batch)
        losses.append(loss.item().hex())
    print(*losses, flush=True)


def main(cases: list[str]) -> None:
    """Train once for each KIND:FIRST:SECOND, or KIND:FIRST:SECOND:parts."""
    import graphsplit as gs

    gs.init()
    for case in cases:
        kind, first, second, *parts = case.split(":")
        train(kind, int(first), int(second), in_parts=parts == ["parts"])


if __name__ == "__main__":
    main(sys.argv[1:])
