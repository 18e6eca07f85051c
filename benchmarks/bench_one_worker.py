"""One worker with everything on it, against a plain eager loop in the same process.

    python benchmarks/bench_one_worker.py [--rounds 9] [--only LeNet GPT] [--json FILE]

What a step costs that has nothing to do with several workers: batches, plans, the captured graph.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Row, compared, environment, equal_conditions, parser, write
from common_cluster import (
    agreed,
    breakdown,
    breakdowns,
    is_worker,
    launch,
    report,
    same_parameters,
    slowest,
    take_turns,
)
from common_models import GPT, LastLoss, made, plain_loop, token_batches
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "lenet_mnist"))


def digits(num_steps: int) -> list[Any]:
    """Random batches for LeNet."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(32, 1, 32, 32, generator=generator),
            torch.randint(0, 10, (32,), generator=generator),
        )
        for _ in range(num_steps)
    ]


def lenet() -> torch.nn.Module:
    """The example's network."""
    from lenet import LeNet5

    return LeNet5()


@dataclass(frozen=True)
class Case:
    """One network, with how much of it is a round."""

    build: Callable[[], torch.nn.Module]
    batches: Callable[[], list[Any]]
    reach: float
    turns: int = 1


CASES = {
    "LeNet": Case(lenet, lambda: digits(50), 1.05, turns=6),
    "GPT": Case(lambda: GPT(8), lambda: token_batches(2, 8), 1.01),
}


def work(arguments: argparse.Namespace) -> None:
    """The only worker's part."""
    equal_conditions()
    import graphsplit as gs

    gs.init()
    case = CASES[arguments.only[0]]
    batches = case.batches()
    plain, plain_optimizer = made(case.build)
    net, optimizer = made(case.build)
    model = gs.Model(net, F.cross_entropy, optimizer)
    keep = LastLoss()
    losses = []
    turns = take_turns(
        {
            "plain loop": lambda: losses.append(plain_loop(plain, plain_optimizer, batches)),
            "graphsplit": lambda: model.train(1, batches, callbacks=[keep]),
        },
        rounds=arguments.rounds,
        steps=len(batches),
        turns=case.turns,
    )
    same = same_parameters(net, plain)
    if losses[-1] != float(keep.loss):
        same = f"losses differ: {float(keep.loss)!r} and {losses[-1]!r}"
    report({"turns": turns, "bits": same, "breakdown": breakdown(model, batches)})


def rows(arguments: argparse.Namespace) -> list[Row]:
    """One row for each network."""
    found = []
    for name in arguments.only:
        options = ["--rounds", str(arguments.rounds), "--only", name]
        reports = launch(os.path.abspath(__file__), 1, options)
        found.append(
            compared(
                f"{name}, one worker with everything on it",
                ("graphsplit", slowest(reports, "graphsplit")),
                ("plain loop", slowest(reports, "plain loop")),
                reach=CASES[name].reach,
                bits=agreed([report["bits"] for report in reports]),
                breakdown=breakdowns(reports),
            )
        )
    return found


def main() -> None:
    """Read the command line."""
    made_parser = parser(__doc__, rounds=9)
    made_parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    arguments = made_parser.parse_args()
    if is_worker():
        work(arguments)
    else:
        conditions = environment()
        write(arguments, rows(arguments), conditions)


if __name__ == "__main__":
    main()
