"""What snapshots cost: steps with one every ten steps against steps without any.

    python benchmarks/bench_snapshots.py [--rounds 9] [--steps 100] [--model NAME]

Real workers under ``GS_RECOVERY=wait_rejoin``. All run the same batches through the same Model in
turns: A B A B ..., in one run; only how often snapshots are taken differs. Both sides take the one
at the end of ``train``, which is the end of a round.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench_one_worker import digits, lenet
from common import Row, compared, environment, equal_conditions, parser, write
from common_cluster import is_worker, launch, report, slowest, take_turns
from common_models import GPT, made, token_batches
from torch import nn
from torch.nn import functional as F

REACH = 1.03
EVERY = 10
NEVER = 10**9


def place_lenet(net: nn.Module) -> None:
    """As in the example."""
    for name, rank in {"fc1": 0, "fc2": 1, "fc3": 2, "conv1": 3, "conv2": 4}.items():
        net.get_submodule(name).place("MS_WORKER", rank)


def place_halves(net: nn.Module) -> None:
    """The first half of the blocks on worker 0, all else on worker 1."""
    assert isinstance(net, GPT)
    net.place("MS_WORKER", 1)
    for module in (net.embedding, *net.blocks[: len(net.blocks) // 2]):
        module.place("MS_WORKER", 0)


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    workers: int
    build: Callable[[], nn.Module]
    place: Callable[[nn.Module], None]
    batches_of: Callable[[int], Any]
    microbatches: int = 1
    one_in: int = 1  # of the steps that --steps asks for


MODELS = {
    "LeNet on 5 workers": Case(5, lenet, place_lenet, digits),
    "GPT on 2 workers": Case(2, GPT, place_halves, token_batches, microbatches=8, one_in=10),
}


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    equal_conditions()
    import graphsplit as gs
    from graphsplit.runtime import joined
    from graphsplit.train.recovery.script import RecoveringScript

    gs.init()
    job = joined.current()
    assert job is not None and isinstance(job.script, RecoveringScript)
    script = job.script
    case = MODELS[arguments.model]
    batches = case.batches_of(arguments.steps)
    net, optimizer = made(case.build)
    case.place(net)
    model = gs.Model(net, F.cross_entropy, optimizer, microbatches=case.microbatches)

    def train(every: int) -> Callable[[], None]:
        def run() -> None:
            script.settings = replace(script.settings, every=every)
            model.train(1, batches)

        return run

    sides = {"every 10 steps": train(EVERY), "none": train(NEVER)}
    turns = take_turns(sides, rounds=arguments.rounds, steps=arguments.steps)
    report({"turns": turns})


def rows(arguments: argparse.Namespace) -> list[Row]:
    """One row for each model."""
    os.environ["GS_RECOVERY"] = "wait_rejoin"
    found = []
    for name, case in MODELS.items():
        if arguments.model not in (None, name):
            continue
        steps = max(EVERY, arguments.steps // case.one_in)
        options = ["--rounds", str(arguments.rounds), "--steps", str(steps), "--model", name]
        reports = launch(os.path.abspath(__file__), case.workers, options)
        sides = [(side, slowest(reports, side)) for side in ("every 10 steps", "none")]
        found.append(compared(f"snapshots of {name}", *sides, reach=REACH, bits=""))
    return found


def main() -> None:
    """Read the command line."""
    made_parser = parser(__doc__, rounds=9)
    made_parser.add_argument("--steps", type=int, default=100)
    made_parser.add_argument("--model", choices=list(MODELS), help="only this one")
    arguments = made_parser.parse_args()
    if is_worker():
        work(arguments)
    else:
        conditions = environment()
        write(arguments, rows(arguments), conditions)


if __name__ == "__main__":
    main()
