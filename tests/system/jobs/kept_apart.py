"""An own loop that says on each worker what ran there, and how much memory it takes.

Prints how often forward and backward of each layer ran on this worker, and by how many MiB the
process has grown since before the network was built.
"""

from __future__ import annotations

import collections
import gc
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphsplit as gs

WIDTH, NUM_LAYERS, NUM_STEPS = 1024, 16, 3  # 4 MiB a layer, whose gradient and moments are as large
ran: collections.Counter[str] = collections.Counter()


@torch.library.custom_op("kept_apart::counted", mutates_args=())
def counted(x: torch.Tensor, number: int) -> torch.Tensor:
    """Counts where it runs."""
    ran[f"forward {number}"] += 1
    return x.clone()


@counted.register_fake
def _(x: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.number = inputs[1]


def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    ran[f"backward {ctx.number}"] += 1
    return gradient.clone(), None


counted.register_autograd(_backward, setup_context=_setup)


class Layer(nn.Module):
    """A large layer that counts."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(width, width), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        found: torch.Tensor = torch.tanh(counted(self.linear(x), self.number))
        return found


def trained(width: int, num_layers: int) -> Any:
    """A network after some steps, the last quarter of it on worker 1."""
    net = nn.Sequential(*(Layer(width, number) for number in range(num_layers)))
    for number, layer in enumerate(net):
        layer.place("MS_WORKER", int(number >= num_layers * 3 // 4))  # type: ignore[operator]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    net = gs.distribute(net)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        net(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
    return net, optimizer


def resident() -> int:
    """Bytes of this process in memory, by pages of its own."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith("Private_Dirty")]
    return int(found) << 10


def main() -> None:
    """Train a small network first, so that all code is there; then the large one."""
    gs.init()
    trained(8, 4)
    ran.clear()
    before = resident()
    held = trained(WIDTH, NUM_LAYERS)
    grown = (resident() - before) >> 20
    print("ran", *(f"{name}: {times}" for name, times in sorted(ran.items())), sep=", ")
    print("grown by", grown)
    del held


if __name__ == "__main__":
    main()
