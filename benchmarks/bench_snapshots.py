"""The cost of snapshots: steps with one every ten steps against steps without any.

    python benchmarks/bench_snapshots.py [--rounds 9] [--steps 100] [--only lenet gpt]

Real workers under ``GS_RECOVERY=wait_rejoin``. All run the same batches through the same Model in
turns: A B A B ..., in one run; only how often snapshots are taken differs. Both sides take the one
at the end of ``train``, which is the end of a round.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace

from common import Row, compared, parser
from common_cluster import launch, report, run, slowest, take_turns
from common_models import CASES

from graphsplit.job import joined
from graphsplit.recovery.script import RecoveringScript

REACH = 1.03
EVERY, NEVER = 10, 10**9
SIDES = {"every 10 steps": EVERY, "none": NEVER}
ONE_IN = {"lenet": 1, "gpt": 10}  # of the steps that --steps asks for


def work(arguments: Namespace) -> None:
    """One worker's part."""
    job = joined.current()
    if job is None or not isinstance(job.script, RecoveringScript):
        raise SystemExit("this job takes no snapshots")
    script, case = job.script, CASES[arguments.only[0]]
    batches, model = case.batches(arguments.steps), case.model()

    def train(every: int) -> Callable[[], None]:
        def run_side() -> None:
            script.settings = replace(script.settings, every=every)
            model.train(1, batches)

        return run_side

    sides = {side: train(every) for side, every in SIDES.items()}
    report({"turns": take_turns(sides, rounds=arguments.rounds, steps=arguments.steps)})


def rows(arguments: Namespace) -> Iterator[Row]:
    """One row for each model."""
    os.environ["GS_RECOVERY"] = "wait_rejoin"
    for name in arguments.only:
        case, steps = CASES[name], max(EVERY, arguments.steps // ONE_IN[name])
        reports = launch(__file__, case.num_workers, arguments, only=[name], steps=steps)
        sides = [(side, slowest(reports, side)) for side in SIDES]
        title = f"snapshots of {case.title} on {case.num_workers} workers"
        yield compared(title, *sides, reach=REACH)


def main() -> None:
    """Read the command line."""
    options = parser(__doc__, rounds=9, steps=100)
    options.add_argument("--only", nargs="+", choices=ONE_IN, default=list(ONE_IN))
    run(options, work, rows)


if __name__ == "__main__":
    main()
