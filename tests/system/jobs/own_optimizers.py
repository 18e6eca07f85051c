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


def plain(kind: str) -> list[str]:
    """The losses of a plain loop."""
    net, optimizer, batches = start(kind)
    losses = []
    for inputs, target in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def train(kind: str, first: int, second: int, in_parts: bool) -> None:
    """Train with the two layers on two workers, or on one."""
    import graphsplit as gs

    net, optimizer, batches = start(kind)
    net[0].place("MS_WORKER", first)
    net[2].place("MS_WORKER", second)
    model = gs.Model(net, nn.MSELoss(), optimizer)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        if not in_parts:
            return model.train_step(*batch)
        model.zero_grad()
        loss = model.forward_backward(*batch)
        model.step()
        return loss

    losses = [step(*batch).item().hex() for batch in batches]
    print(*losses, flush=True)


def main(cases: list[str]) -> None:
    """Train once for each KIND:FIRST:SECOND, with ``:parts`` behind it in the parts of a step."""
    import graphsplit as gs

    gs.init()
    for case in cases:
        kind, first, second, *rest = case.split(":")
        train(kind, int(first), int(second), in_parts=rest == ["parts"])


if __name__ == "__main__":
    main(sys.argv[1:])
