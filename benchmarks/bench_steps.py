"""A step of networks of several kinds, against one process and what the machine can reach.

    python benchmarks/bench_steps.py [--rounds 5] [--only towers unet-2] [--json FILE]

Every case trains the same batches in turn with graphsplit, and by a plain loop on worker 0 while
the others wait. Bits are compared between the two. What a step is judged by differs:

- One worker that holds all: the plain loop. That is what a step costs that has nothing to do with
  several workers: batches, plans, the captured graph.
- Two towers: two processes that know nothing of each other and train one tower each. They share
  the memory's bandwidth, and nothing else.
- A U-Net and an encoder-decoder, which no pipeline of stages takes: the floor, which is what the
  busiest worker computes in the same rounds, with nobody ever waiting.

Where memory comes to lie differs from launch to launch, and with it the time of the same matrix
products, by several percent. So rounds of several launches may be put together.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common import Row, Samples, compared, parser
from common_cluster import (
    ComputeClock,
    agreed,
    breakdown,
    breakdowns,
    busiest,
    launch,
    report,
    row_of,
    run,
    same_training,
    slowest_of_all,
    take_turns,
)
from common_models import CASES, LastLoss, Towers, made, plain_loop

import graphsplit as gs

SETTLE = 10  # steps after which "auto" has measured its costs and chosen
OURS, ONE, ALONE, FLOOR = "graphsplit", "one process", "two processes", "busiest worker's compute"


@dataclass(frozen=True)
class Bound:
    """The side and the ratio that a case is judged by.

    Attributes:
        against: The other side.
        reach: The bound on the ratio.
        schedule: The schedule that is judged.
        launches: How many launches are put together.
        turns: How many turns of each side make a round.
    """

    against: str
    reach: float
    schedule: str = "1f1b"
    launches: int = 1
    turns: int = 1


BOUNDS = {
    "towers": Bound(ALONE, 0.95, "auto", launches=3),
    "towers-8": Bound(ALONE, 0.95, "auto", launches=3),
    "unet-2": Bound(FLOOR, 0.8),
    "unet-3": Bound(FLOOR, 0.8),
    "encoder-decoder-2": Bound(FLOOR, 0.8),
    "encoder-decoder-3": Bound(FLOOR, 0.8),
    "lenet-1": Bound(ONE, 1.05, turns=6),
    "gpt-1": Bound(ONE, 1.01),
}


def work(arguments: Namespace) -> None:
    """One worker's part."""
    (name,) = arguments.only
    case, bound, is_first = CASES[name], BOUNDS[name], gs.get_rank() == 0
    batches = case.batches(arguments.steps)
    whole, whole_optimizer = made(case.build)
    model, keep = case.model(schedule=arguments.schedule), LastLoss()
    losses: list[float] = []

    def one_process() -> None:
        losses[:] = [plain_loop(whole, whole_optimizer, batches, microbatches=case.microbatches)]

    def ours() -> None:
        model.train(1, batches, callbacks=[keep])

    for _ in range(-(-SETTLE // arguments.steps) if arguments.schedule == "auto" else 0):
        ours()
        if is_first:
            one_process()
    clock = ComputeClock(model, arguments.steps)
    sides: dict[str, Callable[[], object] | None] = {ONE: one_process if is_first else None}
    sides[OURS] = (lambda: clock.run(ours)) if bound.against == FLOOR else ours
    if bound.against == ALONE:
        tower, optimizer = made(lambda: Towers(1))
        sides[ALONE] = lambda: plain_loop(tower, optimizer, batches, microbatches=case.microbatches)
    turns = take_turns(sides, rounds=arguments.rounds, steps=arguments.steps, turns=bound.turns)
    same = same_training(model, whole, [float(keep.loss), *losses]) if is_first else "equal"
    found = {"turns": turns, "bits": same, "compute": clock.seconds}
    report({**found, "breakdown": breakdown(model, batches)})


def rows(arguments: Namespace) -> Iterator[Row]:
    """One row for each case."""
    for name in arguments.only:
        case, bound = CASES[name], BOUNDS[name]
        steps, schedule = arguments.steps or case.num_steps, arguments.schedule or bound.schedule
        launches = [
            launch(
                __file__, case.num_workers, arguments, only=[name], steps=steps, schedule=schedule
            )
            for _ in range(arguments.launches or bound.launches)
        ]
        title = f"{case.title}, {case.num_workers} workers, {case.microbatches} microbatches, "
        title += f"{schedule}, {steps} steps in a row"
        ours, one = (slowest_of_all(launches, side) for side in (OURS, ONE))
        speed = f"{one.median_s / ours.median_s:.2f} times one process"
        if bound.against == FLOOR:
            floors = [floor for reports in launches for floor in busiest(reports).seconds]
            yield compared(
                title,
                (OURS, ours),
                (FLOOR, Samples(floors)),
                reach=bound.reach,
                inverse=True,
                bits=agreed([one["bits"] for reports in launches for one in reports]),
                breakdown=breakdowns(launches[-1]),
                further_sides={ONE: one.summary()},
                notes=speed,
            )
        else:
            yield row_of(
                title,
                launches,
                OURS,
                bound.against,
                also=[ONE] if bound.against != ONE else [],
                reach=bound.reach,
                inverse=bound.against == ALONE,
                notes=speed,
            )


def main() -> None:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=BOUNDS, default=list(BOUNDS))
    options.add_argument("--steps", type=int, help="steps between two barriers")
    options.add_argument("--schedule", help="another one than each case is judged by")
    options.add_argument("--launches", type=int, help="launches whose rounds are put together")
    run(options, work, rows)


if __name__ == "__main__":
    main()
