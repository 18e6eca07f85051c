"""The step time that the simulator predicts, against the step time that is measured.

    python benchmarks/bench_prediction.py [--rounds 5] [--only lenet gpt gpt-replicas] [--json FILE]

In each round some steps are trained and only the whole is timed, then some with the profiler on,
whose costs give the prediction: A B A B. The profiler's own measurement of the step is printed too.
Prediction and measurement see the same load, but only the measurement suffers from it: on a machine
where others compute as well, it is the longer one.
"""

from __future__ import annotations

import os
import statistics
from argparse import Namespace
from collections.abc import Iterator

from common import Row, Samples, parser, timed
from common_cluster import launch, report, run
from common_models import CASES

import graphsplit as gs

NAMES = (
    *("gpt", "lenet", "towers", "towers-8"),
    *("gpt-replicas", "resnet-replicas", "slow-piece"),
)
WARM_UP, TIMED = 2, 10  # steps that the profiler leaves alone, and that it times at the most
WITHIN = 0.10


def work(arguments: Namespace) -> None:
    """One worker's part."""
    case = CASES[arguments.only[0]]
    model, batches = case.model(), case.batches(case.num_steps)
    model.train(1, batches)  # plans, and warms up
    found: dict[str, list[float]] = {"plain": [], "measured": [], "predicted": []}
    for _ in range(arguments.rounds):
        gs.barrier()
        seconds, _ = timed(lambda: model.train(1, batches))
        found["plain"].append(seconds / case.num_steps)
        gs.barrier()
        with model.profile() as profiling:
            model.train(1, (batches[:WARM_UP] + batches)[: WARM_UP + TIMED])
        found["measured"].append(profiling.result.measured.step_s)
        found["predicted"].append(profiling.result.predicted.step_s)
    report({"found": found, "table": str(profiling.result)})


def rows(arguments: Namespace) -> Iterator[Row]:
    """Predicted and measured, of all rounds."""
    for name in arguments.only:
        case = CASES[name]
        reports = launch(__file__, case.num_workers, arguments, only=[name])
        # The profile is the same on all workers; a round is done when the last worker is.
        plain = [max(times) for times in zip(*(r["found"]["plain"] for r in reports), strict=True)]
        predicted, measured = (reports[0]["found"][key] for key in ("predicted", "measured"))
        ratios = [a / b for a, b in zip(predicted, plain, strict=True)]
        ratio = statistics.median(ratios)
        print(reports[0]["table"], end="\n\n")
        yield Row(
            work=f"{case.title}, {case.microbatches} microbatches, {case.num_workers} workers",
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
    options.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    run(options, work, rows)


if __name__ == "__main__":
    main()
