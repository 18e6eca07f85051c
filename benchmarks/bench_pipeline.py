"""A step of a GPT-like model on two workers, against torch.distributed.pipelining on Gloo.

    python benchmarks/bench_pipeline.py [--rounds 2] [--steps 5] [--launches 1]
        [--microbatches 8 4 32] [--schedule auto 1f1b] [--against "torch 1F1B" floor] [--json FILE]

Without options three rows, one a minute: 8, 4 and 32 microbatches, ``auto`` against torch's 1F1B.
``run_all.py`` asks for the rest: both schedules, every other side, five rounds of two launches.

8 blocks of width 256, 128 tokens, 32 rows, SGD with momentum; four blocks on each worker, or two
parts of two with torch's interleaved and zero-bubble schedules. The same two processes hold all
models, made from one seed, and train them on the same batches in turn. After the last round every
parameter and its gradient are compared byte by byte, and the loss, with each of torch's schedules.
Steps follow each other as they do in an epoch; there is a barrier before each side's round, and
none inside one. With ``--steps 1`` no worker can begin a step while another ends the one before.

The floor is each worker's half alone, with nothing to wait for. No schedule can be quicker that
computes the same halves.

Where memory comes to lie differs from launch to launch, and with it the time of the same matrix
products, on either side: by several percent. So rounds of several launches are put together.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product

from common import Row, parser
from common_cluster import (
    Report,
    agreed,
    breakdown,
    free_port,
    launch,
    report,
    row_of,
    run,
    same_parameters,
    take_turns,
)
from common_models import GPT, LastLoss, made, place_gpt, token_batches
from torch.nn import functional as F

import graphsplit as gs

# By number of microbatches, of torch's 1F1B.
REACH = {4: 0.88, 8: 0.90, 32: 0.98}
OURS, ONE_F_ONE_B, FLOOR = "graphsplit", "torch 1F1B", "floor"
AGAINST = (ONE_F_ONE_B, "torch interleaved", "torch zero bubble", "torch ZBV", FLOOR)
SETTLE = 10  # steps after which "auto" has measured its costs and chosen


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    from torch_pipeline import HalfAlone, TorchPipeline, dist, join

    rank = gs.get_rank()
    join(rank, arguments.port)
    batches = token_batches(arguments.steps)
    net, optimizer = made(GPT)
    place_gpt(net)
    (number,), (schedule,) = arguments.microbatches, arguments.schedule
    model = gs.Model(net, F.cross_entropy, optimizer, microbatches=number, schedule=schedule)
    keep = LastLoss()
    theirs = {n: TorchPipeline(n, rank, number) for n in arguments.against if n != FLOOR}
    trained = {OURS: lambda: model.train(1, batches, callbacks=[keep])}
    trained |= {name: lambda one=one: one.train(batches) for name, one in theirs.items()}
    if FLOOR in arguments.against:
        half = HalfAlone(rank, number)
        trained[FLOOR] = lambda: half.train(batches)
    for _ in range((SETTLE - 1) // arguments.steps):  # and once more as each side warms up
        for train in trained.values():
            train()
    turns = take_turns(trained, rounds=arguments.rounds, steps=arguments.steps)
    same = [same_parameters(net, one.parameters()) for one in theirs.values()]
    losses = {one.loss for one in theirs.values() if one.loss is not None} | {float(keep.loss)}
    if len(losses) > 1:
        same.append(f"losses differ: {losses}")
    dist.destroy_process_group()
    report({"turns": turns, "bits": agreed(same), "breakdown": breakdown(model, batches)})


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """One row for each number of microbatches, schedule, and other side."""
    for number, schedule in product(arguments.microbatches, arguments.schedule):
        launches: list[list[Report]] = [
            launch(
                *(__file__, 2, arguments),
                microbatches=[number],
                schedule=[schedule],
                port=free_port(),
            )
            for _ in range(arguments.launches)
        ]
        for other in arguments.against:
            is_judged = schedule == "auto" and other == ONE_F_ONE_B
            yield row_of(
                f"GPT-like, 8 blocks, 2 workers, {number} microbatches, {schedule}, "
                f"{arguments.steps} steps in a row",
                *(launches, OURS, other),
                reach=REACH.get(number) if is_judged else None,
            )


def main() -> None:
    """Read the command line."""
    options = parser(__doc__, rounds=2, steps=5)
    options.add_argument("--launches", type=int, default=1)
    options.add_argument("--microbatches", type=int, nargs="+", default=[8, 4, 32])
    options.add_argument("--schedule", nargs="+", default=["auto"])
    options.add_argument("--against", nargs="+", choices=AGAINST, default=[ONE_F_ONE_B])
    options.add_argument("--port", type=int, help=argparse.SUPPRESS)
    run(options, work, rows)


if __name__ == "__main__":
    main()
