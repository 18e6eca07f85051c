"""The step time that the simulator predicts, against the step time that is measured.

    python benchmarks/bench_prediction.py [--rounds 5] [--work lenet gpt towers] [--json FILE]

In each round some steps are trained and only the whole is timed, then some with the profiler on,
whose costs give the prediction: A B A B. The profiler's own measurement of the step is printed too.
Prediction and measurement see the same load, but only the measurement suffers from it: on a machine
where others compute as well, it is the longer one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Row, Samples, environment, equal_conditions, parser, timed, write
from common_cluster import Report, is_worker, launch, report
from common_models import GPT, Towers, made, token_batches
from torch import nn
from torch.nn import functional as F

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "lenet_mnist"
LENET_PLACEMENT = {"fc1": 0, "fc2": 1, "fc3": 2, "conv1": 3, "conv2": 4}
WARM_UP, TIMED = 2, 10  # steps that the profiler leaves alone, and that it times at the most
WITHIN = 0.10


def lenet() -> nn.Module:
    """LeNet over five workers."""
    sys.path.insert(0, str(EXAMPLE))
    from lenet import LeNet5

    net = LeNet5()
    for name, rank in LENET_PLACEMENT.items():
        getattr(net, name).place("MS_WORKER", rank)
    return net


def lenet_batches(number: int) -> list[Any]:
    """Random images."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(32, 1, 32, 32, generator=generator),
            torch.randint(0, 10, (32,), generator=generator),
        )
        for _ in range(number)
    ]


def gpt() -> nn.Module:
    """The first half here, the second half there."""
    net = GPT()
    net.embedding.place("MS_WORKER", 0)
    for index, block in enumerate(net.blocks):
        block.place("MS_WORKER", index // 4)
    net.norm.place("MS_WORKER", 1)
    net.head.place("MS_WORKER", 1)
    return net


def towers() -> nn.Module:
    """A tower on each worker."""
    net = Towers()
    for rank, tower in enumerate(net.towers):
        tower.place("MS_WORKER", rank)
    net.head.place("MS_WORKER", 0)
    return net


@dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        title: For people.
        build: Makes the placed network.
        batches: Makes some batches.
        num_workers: On how many workers.
        num_steps: Steps of a round that is timed as a whole.
        microbatches: Into how many microbatches a batch is split.
    """

    title: str
    build: Callable[[], nn.Module]
    batches: Callable[[int], list[Any]]
    num_workers: int
    num_steps: int
    microbatches: int = 1


WORKS = {
    "lenet": Work("LeNet, 5 workers", lenet, lenet_batches, 5, 60),
    "gpt": Work("GPT-like, 8 blocks, 8 microbatches, 2 workers", gpt, token_batches, 2, 4, 8),
    "towers": Work("two towers of 4 blocks, 1 microbatch, 2 workers", towers, token_batches, 2, 4),
    "towers8": Work(
        "two towers of 4 blocks, 8 microbatches, 2 workers", towers, token_batches, 2, 4, 8
    ),
}


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    equal_conditions()
    import graphsplit as gs

    gs.init()
    (name,) = arguments.work
    job = WORKS[name]
    net, optimizer = made(job.build)
    model = gs.Model(net, F.cross_entropy, optimizer, microbatches=job.microbatches)
    batches = job.batches(job.num_steps)
    model.train(1, batches)  # plans, and warms up
    found: dict[str, list[float]] = {"plain": [], "measured": [], "predicted": []}
    for _ in range(arguments.rounds):
        gs.barrier()
        seconds, _ = timed(lambda: model.train(1, batches))
        found["plain"].append(seconds / job.num_steps)
        gs.barrier()
        with model.profile() as profiling:
            model.train(1, (batches[:WARM_UP] + batches)[: WARM_UP + TIMED])
        found["measured"].append(profiling.result.measured.step_s)
        found["predicted"].append(profiling.result.predicted.step_s)
    report({"found": found, "table": str(profiling.result)})


def row_of(name: str, reports: list[Report], rounds: int) -> Row:
    """Predicted and measured, of all rounds."""
    # The profile is the same on all workers; a round is done when the last worker is.
    plain = [max(r["found"]["plain"][i] for r in reports) for i in range(rounds)]
    predicted, measured = (reports[0]["found"][key] for key in ("predicted", "measured"))
    ratios = [a / b for a, b in zip(predicted, plain, strict=True)]
    ratio = statistics.median(ratios)
    print(reports[0]["table"], end="\n\n")
    return Row(
        work=WORKS[name].title,
        against="the step as it was measured without the profiler",
        figure="predicted ÷ measured",
        ratio=ratio,
        spread=(min(ratios), max(ratios)),
        reach=None,
        at_most=True,
        sides={
            "measured": Samples(plain).summary(),
            "measured by the profiler": Samples(measured).summary(),
            "predicted": Samples(predicted).summary(),
            f"within {WITHIN:.0%}": "yes" if abs(ratio - 1) <= WITHIN else "NO",
            "load average": f"{os.getloadavg()[0]:.1f}",
        },
    )


def main() -> None:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--work", nargs="+", choices=sorted(WORKS), default=sorted(WORKS))
    arguments = options.parse_args()
    if is_worker():
        work(arguments)
        return
    conditions = environment()
    rows = []
    for name in arguments.work:
        given = ["--work", name, "--rounds", str(arguments.rounds)]
        reports = launch(__file__, WORKS[name].num_workers, given)
        rows.append(row_of(name, reports, arguments.rounds))
    write(arguments, rows, conditions)


if __name__ == "__main__":
    main()
