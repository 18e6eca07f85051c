"""Two towers of four blocks on two workers, against one process and two independent processes.

    python benchmarks/bench_towers.py [--rounds 5] [--steps 5] [--launches 3]
        [--microbatches 1 8] [--schedule auto] [--json FILE]

What two workers can reach is what two processes reach that know nothing of each other and train
one tower each: they share the memory's bandwidth, and nothing else. So three sides take turns in
the same two processes: one process trains everything (the other waits), each trains one tower
with a head of its own, and graphsplit trains everything on both. Rounds of several launches are
put together, as in bench_pipeline.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from common import Row, compared, environment, equal_conditions, parser, write
from common_cluster import (
    agreed,
    breakdown,
    breakdowns,
    by_launch,
    is_worker,
    launch,
    report,
    same_parameters,
    slowest_of_all,
    take_turns,
)
from common_models import LastLoss, Towers, made, plain_loop, token_batches
from torch.nn import functional as F

STEPS, ROWS = 5, 16
SETTLE = 10  # steps after which "auto" has measured its costs and chosen
REACH = 0.95


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    equal_conditions()
    import graphsplit as gs

    gs.init()
    rank, number = gs.get_rank(), arguments.microbatches[0]
    batches = token_batches(arguments.steps, ROWS)
    whole, whole_optimizer = made(Towers)
    single, single_optimizer = made(lambda: Towers(1))
    net, optimizer = made(Towers)
    for index, tower in enumerate(net.towers):
        tower.place("MS_WORKER", index)
    net.head.place("MS_WORKER", 0)
    schedule = arguments.schedule
    model = gs.Model(net, F.cross_entropy, optimizer, microbatches=number, schedule=schedule)
    keep = LastLoss()
    losses = []

    def one_process() -> None:
        losses[:] = [plain_loop(whole, whole_optimizer, batches, microbatches=number)]

    for _ in range(-(-SETTLE // arguments.steps)):
        model.train(1, batches)
        if rank == 0:
            one_process()
    turns = take_turns(
        {
            "one process": one_process if rank == 0 else None,
            "graphsplit": lambda: model.train(1, batches, callbacks=[keep]),
            "two processes": lambda: (
                plain_loop(single, single_optimizer, batches, microbatches=number),
                None,
            )[1],
        },
        rounds=arguments.rounds,
        steps=arguments.steps,
    )
    same = "equal"
    if rank == 0:
        same = same_parameters(net, whole)
        if losses != [float(keep.loss)]:
            same = f"losses differ: {float(keep.loss)!r} and {losses}"
    report({"turns": turns, "bits": same, "breakdown": breakdown(model, batches)})


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """One row for each number of microbatches."""
    for number in arguments.microbatches:
        options = ["--rounds", str(arguments.rounds), "--microbatches", str(number)]
        options += ["--schedule", arguments.schedule, "--steps", str(arguments.steps)]
        script = os.path.abspath(__file__)
        launches = [launch(script, 2, options) for _ in range(arguments.launches)]
        ours, one = (slowest_of_all(launches, side) for side in ("graphsplit", "one process"))
        two = slowest_of_all(launches, "two processes")
        # Two processes do the work of one whole step together, but for half a head.
        speedups = f"{one.median_s / ours.median_s:.2f} times one process; two processes reach "
        speedups += f"{one.median_s / two.median_s:.2f}; "
        yield compared(
            f"two towers, 2 workers, {number} microbatches, {arguments.schedule}, "
            f"{arguments.steps} steps in a row",
            ("graphsplit", ours),
            ("two processes", two),
            reach=REACH,
            inverse=True,
            bits=agreed([report["bits"] for reports in launches for report in reports]),
            breakdown=breakdowns(launches[-1]),
            further_sides={"one process": one.summary()},
            notes=speedups + by_launch(launches, "two processes", "graphsplit"),
        )


def main() -> None:
    """Read the command line."""
    made_parser = parser(__doc__, steps=STEPS)
    made_parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 8])
    made_parser.add_argument("--launches", type=int, default=3)
    made_parser.add_argument("--schedule", default="auto")
    arguments = made_parser.parse_args()
    if is_worker():
        work(arguments)
    else:
        conditions = environment()
        write(arguments, rows(arguments), conditions)


if __name__ == "__main__":
    main()
