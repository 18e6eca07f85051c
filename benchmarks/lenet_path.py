"""The parts of a LeNet step on five workers, along its critical path.

    python benchmarks/lenet_path.py [--steps 150] [--schedule zero_bubble]

All workers note when each of their instructions begins and ends, on one clock. LeNet's layers run
one after the other, so a step is the sum of what stands on the path: computing, hops (from the end
of one worker's computing to the beginning of the next one's), and what the first worker does
between two steps. Medians over the steps, in microseconds; the timers cost some of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from common import equal_conditions
from common_cluster import Report, is_worker, latest_runner, launch, report
from common_models import CASES, LENET, LastLoss

ORDER = [LENET[name] for name in ("conv1", "conv2", "fc1", "fc2", "fc3")]
Spans = list[dict[int, tuple[float, float]]]  # for each step, begin and end by position


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    equal_conditions()
    import graphsplit as gs

    gs.init()
    batches = CASES["lenet"].batches(arguments.steps)
    model = CASES["lenet"].model(schedule=arguments.schedule)
    model.train(1, batches[:50], callbacks=[LastLoss()])
    runner = latest_runner(model)
    log: list[tuple[int, float, float]] = []

    def noting(position: int, action: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(state: Any) -> None:
            begin = time.perf_counter()
            action(state)
            log.append((position, begin, time.perf_counter()))

        return run

    runner.watch(noting)
    gs.barrier()
    model.train(1, batches, callbacks=[LastLoss()])
    report({"log": log, "names": [i.opcode.value for i in runner.instructions]})


def spans_of(found: Report) -> Spans:
    """One worker's log, step by step."""
    size, log = len(found["names"]), found["log"]
    steps = [log[start : start + size] for start in range(0, len(log), size)]
    return [{position: (begin, end) for position, begin, end in step} for step in steps]


def show(name: str, seconds: Sequence[float]) -> float:
    """Print one line of the table; returns its median."""
    ordered = sorted(seconds)
    median, high = statistics.median(ordered), ordered[len(ordered) * 9 // 10]
    print(f"{name:44} {median * 1e6:8.0f}   p90 {high * 1e6:8.0f}")
    return median


def path(reports: Sequence[Report]) -> list[tuple[int, int]]:
    """Worker and position of what is computed one after the other."""
    forward = [(w, reports[w]["names"].index("FORWARD")) for w in ORDER]
    backward = []
    for worker in reversed(ORDER):
        names = reports[worker]["names"]
        kind = "BACKWARD_INPUT" if "BACKWARD_INPUT" in names else "BACKWARD"
        backward.append((worker, names.index(kind)))
    return forward + backward


def table(reports: Sequence[Report]) -> None:
    """Print the critical path."""
    spans, parts = [spans_of(found) for found in reports], path(reports)
    steps = range(len(spans[0]))
    compute = hops = 0.0
    for index, (worker, position) in enumerate(parts):
        own = spans[worker]
        name = f"worker {worker} {reports[worker]['names'][position]}"
        compute += show(name, [own[s][position][1] - own[s][position][0] for s in steps])
        if index + 1 < len(parts) and parts[index + 1][0] != worker:
            other, begins = parts[index + 1]
            gaps = [spans[other][s][begins][0] - own[s][position][1] for s in steps]
            hops += show(f"  hop worker {worker} -> worker {other}", gaps)
    worker, last = parts[-1]
    first, own = parts[0][1], spans[worker]
    between = [own[s + 1][first][0] - own[s][last][1] for s in steps[:-1]]
    rest = show(f"worker {worker} optimizer, until the next FORWARD", between)
    step = [own[s + 1][first][0] - own[s][first][0] for s in steps[:-1]]
    show("a whole step", step)
    print(f"computing {compute * 1e6:.0f}, hops {hops * 1e6:.0f}, between {rest * 1e6:.0f}")


def main() -> None:
    """Read the command line."""
    made_parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made_parser.add_argument("--steps", type=int, default=150)
    made_parser.add_argument("--schedule", default="zero_bubble")
    arguments = made_parser.parse_args()
    if is_worker():
        work(arguments)
    else:
        table(launch(__file__, 5, arguments))


if __name__ == "__main__":
    main()
