"""A slow piece of a network on two workers of three, against all of it in one process.

    python benchmarks/bench_slow_piece.py [--rounds 5] [--unit 20] [--json FILE]

Its modules sleep, so that three workers need no three cores: the slow piece for four fifths of a
step, what comes before and behind it for the rest, backward twice as long as forward. Two workers
for the slow piece make the step take 0.2 + 0.8 / 2 of its time, says Amdahl; that is a speed of
1 / 0.6, of which nine tenths are wanted. (More is possible: worker 0 need not wait for the others.)

What real work takes is predicted by ``bench_prediction.py --only slow-piece``.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from common import Row, parser
from common_cluster import launch, report, row_of, run, same_parameters, take_turns
from common_models import made, plain_loop
from torch import nn
from torch.nn import functional as F

import graphsplit as gs

OURS, LOOP = "graphsplit, the slow piece on 2 workers", "one process"
NUM_WORKERS, PARTS, STEPS = 3, 8, 2
SLOW = 8  # units that its forward takes; those around it take one each
ALLOWED = 1 / (0.2 + 0.8 / 2)


@torch.library.custom_op("gs_benchmarks::nap", mutates_args=())
def nap(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """Sleep; a copy of ``x``."""
    time.sleep(seconds)
    return x.clone()


@nap.register_fake
def _(x: torch.Tensor, seconds: float) -> torch.Tensor:
    return torch.empty_like(x)


def _note(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.seconds = inputs[1]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return nap(gradient, 2 * ctx.seconds), None


nap.register_autograd(_backward, setup_context=_note)


class Napping(nn.Module):
    """A linear layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 16) to the same."""
        return nap(self.linear(x), self.seconds)


def _network(unit: float) -> nn.Sequential:
    return nn.Sequential(Napping(unit), Napping(SLOW * unit), Napping(unit))


def work(arguments: Namespace) -> None:
    """One worker's part."""
    unit = arguments.unit / 1e3
    generator = torch.Generator().manual_seed(1)
    shape = STEPS, 2, 2 * PARTS, 16
    batches = [(x, y) for x, y in torch.randn(shape, generator=generator)]
    net, optimizer = made(lambda: _network(unit))
    net.place("MS_WORKER", 0)
    net[1].place("MS_WORKER", [1, 2])
    model = gs.Model(net, F.mse_loss, optimizer, microbatches=PARTS)
    model.train(1, batches)
    loop, its_optimizer = made(lambda: _network(unit))
    plain_loop(loop, its_optimizer, batches, microbatches=PARTS, loss_fn=F.mse_loss)
    same = same_parameters(net, dict(loop.named_parameters()))

    def train_loop() -> object:
        return plain_loop(loop, its_optimizer, batches, microbatches=PARTS, loss_fn=F.mse_loss)

    sides = {
        OURS: lambda: model.train(1, batches),
        LOOP: train_loop if gs.get_rank() == 0 else None,
    }
    turns = take_turns(sides, rounds=arguments.rounds, steps=STEPS)
    report({"turns": turns, "bits": same, "breakdown": {}})


def rows(arguments: Namespace) -> Iterator[Row]:
    """One row."""
    reports = launch(__file__, NUM_WORKERS, arguments)
    yield row_of(
        f"a piece that takes 0.8 of a step, on 2 workers of 3, {PARTS} parts",
        *([reports], OURS, LOOP),
        reach=0.9 * ALLOWED,
        inverse=True,
        notes=f"Amdahl allows {ALLOWED:.3f}",
    )


def main() -> None:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--unit", type=float, default=20.0, help="milliseconds of a unit")
    run(options, work, rows)


if __name__ == "__main__":
    main()
