"""Step time of LeNet on five workers against a plain eager loop in one process.

    python benchmarks/bench_lenet_step.py [--rounds 9] [--steps 50] [--json FILE]

Starts a scheduler and five workers of this very script. Four times in every round worker 0 first
runs the plain loop while the others wait at a barrier, then all five run the same batches through
the Model: A B A B ..., in one run, with the same threads and malloc settings. Prints medians, the
ratio's spread, minor page faults per step, and where the time of a step goes on each worker.
"""

from __future__ import annotations

import argparse
import os

from bench_one_worker import digits, lenet
from common import Row, compared, environment, equal_conditions, parser, write
from common_cluster import (
    Report,
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
from common_models import LastLoss, made, plain_loop
from torch.nn import functional as F

PLACEMENT = {"fc1": 0, "fc2": 1, "fc3": 2, "conv1": 3, "conv2": 4}
REACH, TURNS = 1.20, 4


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    equal_conditions()
    import graphsplit as gs

    gs.init()
    batches = digits(arguments.steps)
    plain, plain_optimizer = made(lenet)
    net, optimizer = made(lenet)
    for name, rank in PLACEMENT.items():
        getattr(net, name).place("MS_WORKER", rank)
    model = gs.Model(net, F.cross_entropy, optimizer, schedule=arguments.schedule)
    keep = LastLoss()
    losses = []

    def one_process() -> None:
        losses[:] = [plain_loop(plain, plain_optimizer, batches)]

    turns = take_turns(
        {
            "one process": one_process if gs.get_rank() == 0 else None,
            "graphsplit": lambda: model.train(1, batches, callbacks=[keep]),
        },
        rounds=arguments.rounds,
        steps=arguments.steps,
        turns=TURNS,
    )
    same = "equal"
    if gs.get_rank() == 0:
        same = same_parameters(net, plain)
        if losses != [float(keep.loss)]:
            same = f"losses differ: {float(keep.loss)!r} and {losses}"
    report({"turns": turns, "bits": same, "breakdown": breakdown(model, batches)})


def critical_path(reports: list[Report]) -> str:
    """LeNet's layers run one after the other, so what they compute adds up."""
    compute = sum(
        r["breakdown"].get(kind, 0.0) for r in reports for kind in ("FORWARD", "BACKWARD")
    )
    sends = sum(r["breakdown"].get("SEND", 0.0) for r in reports)
    step = sum(reports[0]["breakdown"].values())
    return (
        f"in a round with timers, on the critical path: {compute:.2f} ms of forward and backward, "
        f"{sends:.2f} ms of sends, {step - compute - sends:.2f} ms of wake-ups, receives, tickets "
        f"and one optimizer step"
    )


def rows(arguments: argparse.Namespace) -> list[Row]:
    """The row."""
    options = ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
    options += ["--schedule", arguments.schedule]
    reports = launch(os.path.abspath(__file__), 5, options)
    return [
        compared(
            f"LeNet on 5 workers, batch 32, {arguments.schedule}",
            ("graphsplit", slowest(reports, "graphsplit")),
            ("one process", slowest(reports, "one process")),
            reach=REACH,
            bits=agreed([report["bits"] for report in reports]),
            breakdown=breakdowns(reports),
            notes=critical_path(reports),
        )
    ]


def main() -> None:
    """Read the command line."""
    made_parser = parser(__doc__, rounds=9)
    made_parser.add_argument("--steps", type=int, default=50)
    made_parser.add_argument("--schedule", default="zero_bubble")
    arguments = made_parser.parse_args()
    if is_worker():
        work(arguments)
    else:
        conditions = environment()
        write(arguments, rows(arguments), conditions)


if __name__ == "__main__":
    main()
