"""The price of comparing, before every step, the Python values that the graph depends on.

    python benchmarks/bench_guards.py [--rounds 9] [--steps 8] [--json FILE]

LeNet on five workers takes turns with itself in one job: as it is, and with a comparison that
always says that nothing has changed. What is looked for is far less than what two turns differ by:
so turns are short, a round has many of each side, and its figure is that of their medians. Worker 0
also tells how long the comparison takes by itself.
"""

from __future__ import annotations

import argparse
import statistics
import timeit
from collections.abc import Iterator

from common import Row, compared, parser
from common_cluster import launch, report, run, slowest, take_turns
from common_models import CASES, LastLoss

from graphsplit.guards.check import Guards
from graphsplit.torch_ext.replaced import replaced

REACH, TURNS, NUMBER, REPEATS = 1.01, 40, 200, 150
WATCHED, UNWATCHED = "graphsplit", "graphsplit without comparing"


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    batches = CASES["lenet"].batches(arguments.steps)
    model = CASES["lenet"].model(schedule="zero_bubble")
    seen: list[Guards] = []

    def train() -> None:
        model.train(1, batches, callbacks=[LastLoss()])

    def train_unwatched() -> None:
        with replaced(Guards, "hold", _always_holds):
            train()

    def hold_and_note(guards: Guards) -> bool:
        seen.append(guards)
        return hold(guards)

    hold = Guards.hold
    with replaced(Guards, "hold", hold_and_note):
        train()
    sides = {WATCHED: train, UNWATCHED: train_unwatched}
    turns = take_turns(sides, rounds=arguments.rounds, steps=arguments.steps, turns=TURNS)
    found = min(timeit.repeat(seen[-1].hold, number=NUMBER, repeat=REPEATS)) / NUMBER
    report({"turns": turns, "hold_s": found, "places": len(seen[-1])})


def _always_holds(guards: Guards) -> bool:
    return True


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """The row."""
    reports = launch(__file__, 5, arguments)
    hold_s, places = reports[0]["hold_s"], reports[0]["places"]
    yield compared(
        "LeNet on 5 workers, batch 32, Python values compared before each step",
        (WATCHED, slowest(reports, WATCHED, statistics.median)),
        (UNWATCHED, slowest(reports, UNWATCHED, statistics.median)),
        reach=REACH,
        notes=f"comparing {places} places takes {hold_s * 1e6:.1f} µs, {hold_s / places * 1e9:.0f} "
        f"ns each, by itself",
    )


def main() -> None:
    """Read the command line."""
    run(parser(__doc__, rounds=9, steps=8), work, rows)


if __name__ == "__main__":
    main()
