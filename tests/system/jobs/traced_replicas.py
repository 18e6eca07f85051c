"""Run under ``graphsplit trace`` on two workers: replicas with batch norm and dropout.

Compares with a plain loop, and prints ``same bits``.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import graphsplit as gs

MICROBATCHES, NUM_STEPS = 4, 14


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
    )  # fmt: skip
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    one = torch.randn(16, 3, 48, 48, generator=generator), torch.arange(16) % 10
    return [one] * NUM_STEPS


def plain_loop() -> dict[str, torch.Tensor]:
    net, optimizer = made()
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        for m, ((x, y), weight) in enumerate(gs.split_microbatches(batch, MICROBATCHES)):
            torch.set_rng_state(gs.microbatch_rng_state(0, step, m))
            (cross_entropy(net(x), y) * weight).backward()
        optimizer.step()
    return net.state_dict()


def main() -> None:
    gs.init()
    net, optimizer = made()
    net.place("MS_WORKER", [0, 1])
    model = gs.Model(net, cross_entropy, optimizer, microbatches=MICROBATCHES, schedule="gpipe")
    model.train(1, batches())
    reference, mine = plain_loop(), model.state_dict()
    assert all(torch.equal(mine[name], reference[name]) for name in reference)
    print("same bits", flush=True)


if __name__ == "__main__":
    main()
