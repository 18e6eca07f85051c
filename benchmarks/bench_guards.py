"""The price of comparing, before every step, the Python values that the graph depends on.

    python benchmarks/bench_guards.py [--rounds 5] [--steps 5] [--json FILE]

LeNet on five workers trains once, and takes turns with itself meanwhile: some steps as it is, as
many with a comparison that always says that nothing has changed. All workers change sides behind
the same step. What is looked for is far less than what two steps differ by: so turns are short, in
the order A B C C B A, and a round's figure is that of the medians of many single steps, as the
worker that reads the loader sees them; the first of a turn is left out. C is A by another name:
what these two differ by is noise. Behind that, every worker tells how long the comparison takes
within a step, where its places have left the caches, and by itself, one worker after the other.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Callable, Iterator

from common import Row, Samples, compared, parser, tell_measuring
from common_cluster import Report, launch, report, run, slowest
from common_models import CASES, LENET, LastLoss

import graphsplit as gs
from graphsplit.guards.check import Guards
from graphsplit.torch_ext.replaced import replaced

REACH, REACH_NS, NUMBER, REPEATS, WATCHED_STEPS = 1.01, 50, 200, 150, 300
TURNS, READER = 64, LENET["conv1"]  # turns of each side in a round; the worker that is timed
WATCHED, UNWATCHED, AGAIN = "graphsplit", "graphsplit without comparing", "graphsplit once more"
ORDER = (WATCHED, UNWATCHED, AGAIN, AGAIN, UNWATCHED, WATCHED)
hold = Guards.hold


class Turns(LastLoss):
    """Changes sides every so many steps, and notes what each step took."""

    def __init__(self, steps: int, rounds: int) -> None:
        self._steps, self._num_steps = steps, 0
        self.warm_up = len(ORDER) * steps
        self.num_steps = self.warm_up + rounds * TURNS // 2 * len(ORDER) * steps
        self.found: Report = {
            side: {"seconds": [], "faults": [], "turns": TURNS * (steps - 1)} for side in set(ORDER)
        }
        self._began = time.perf_counter()

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        """Another step is done."""
        super().on_step_end(context)
        now, began = time.perf_counter(), self._began
        turn, number = divmod(self._num_steps, self._steps)
        if number and self._num_steps >= self.warm_up:
            found = self.found[ORDER[turn % len(ORDER)]]
            found["seconds"].append(now - began)
            found["faults"].append(0.0)
        self._num_steps += 1
        is_watched = ORDER[self._num_steps // self._steps % len(ORDER)] != UNWATCHED
        Guards.hold = hold if is_watched else _always_holds  # type: ignore[method-assign]
        self._began = time.perf_counter()


def _always_holds(guards: Guards) -> bool:
    return True


def noting(seen: list[Guards], spent: list[float], clock: Callable[[], float]) -> object:
    """A comparison that notes who compares, and how long it takes."""

    def hold_and_note(guards: Guards) -> bool:
        seen.append(guards)
        began = clock()
        found = hold(guards)
        spent.append(clock() - began)
        return found

    return hold_and_note


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    batches = CASES["lenet"].batches(arguments.steps)
    model = CASES["lenet"].model(schedule="zero_bubble")
    model.train(1, batches, callbacks=[LastLoss()])
    turns = Turns(arguments.steps, arguments.rounds)
    gs.barrier()
    if gs.get_rank() == 0:
        tell_measuring(True)
    model.train(1, batches * (turns.num_steps // arguments.steps), callbacks=[turns])
    seen: list[Guards] = []
    spent: list[float] = []
    with replaced(Guards, "hold", noting(seen, spent, time.thread_time)):
        model.train(1, batches * (WATCHED_STEPS // arguments.steps + 1), callbacks=[LastLoss()])
    clock = statistics.median(-time.thread_time() + time.thread_time() for _ in range(1000))
    for rank in range(gs.get_world_size()):
        gs.barrier()  # five at once would share two cores
        if rank == gs.get_rank():
            warm = min(timeit.repeat(seen[-1].hold, number=NUMBER, repeat=REPEATS)) / NUMBER
    gs.barrier()
    within = statistics.median(spent) - clock
    report({"turns": turns.found, "warm_s": warm, "within_s": within, "places": len(seen[-1])})


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """With and without, noise, and a place."""
    reports = launch(__file__, 5, arguments)
    work = "LeNet on 5 workers, batch 32, Python values compared before each step"
    reader = [reports[READER]]
    sides = {side: (side, slowest(reader, side, statistics.median)) for side in set(ORDER)}
    yield compared(work, sides[WATCHED], sides[UNWATCHED], reach=REACH)
    yield compared(
        f"{work}: noise", sides[AGAIN], sides[WATCHED], reach=None, notes="equal sides, in turn"
    )
    places = reports[0]["places"]
    each = [found["warm_s"] / places * 1e9 for found in reports]
    within = ", ".join(f"{found['within_s'] * 1e6:.0f}" for found in reports)
    yield Row(
        work=f"comparing {places} places by itself",
        against="nothing",
        figure="ns a place",
        ratio=statistics.median(each),
        spread=(min(each), max(each)),
        reach=REACH_NS,
        at_most=True,
        sides={"once": Samples([found["warm_s"] for found in reports]).summary()},
        notes=f"within a step it takes {within} µs of thread time on workers 0 to 4, which all but "
        f"the one that reads the loader spend while they wait",
    )


def main() -> None:
    """Read the command line."""
    run(parser(__doc__, rounds=5, steps=5), work, rows)


if __name__ == "__main__":
    main()
