"""Jobs for benchmarks: a scheduler and workers on this machine, and sides that take turns."""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    Row,
    Samples,
    checked,
    compared,
    environment,
    equal_conditions,
    ratios,
    tell_measuring,
    timed,
    words_of,
    write,
)

import graphsplit as gs
from graphsplit.capture.graph import Mode
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.planning.ready_plan import ReadyPlan
from graphsplit.runtime.runner import ProgramRunner

COMPUTE = ("FORWARD", "BACKWARD", "WEIGHT", "ACCUMULATE", "OPTIMIZER")
Report = dict[str, Any]
Work = Callable[[Namespace], None]
Rows = Callable[[Namespace], Iterable[Row]]


def is_worker() -> bool:
    """Whether this process is one of a job that ``launch`` has started."""
    return bool(os.environ.get("MS_ROLE"))


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(options: ArgumentParser, work: Work, rows: Rows) -> None:
    """Read the command line. A worker runs its part; who was started by hand writes the rows."""
    arguments = options.parse_args()
    if is_worker():
        equal_conditions()
        gs.init()
        work(arguments)
    else:
        conditions = environment()
        write(arguments, rows(arguments), conditions)


def launch(
    script: str,
    num_workers: int,
    arguments: Namespace,
    *,
    launcher: Sequence[str] = (),
    **changed: Any,
) -> list[Report]:
    """Run a script as a scheduler and workers; what each worker wrote with ``report``.

    Args:
        script: The script, which calls ``run``.
        num_workers: How many workers.
        arguments: Options of its command line, which the workers get as well.
        launcher: Options of ``graphsplit run``.
        changed: Those of them that are others, or more.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "graphsplit.cli", "run", "-n", str(num_workers)]
        # A machine that is stopped for a while by somebody else is no failure here.
        patient = {"MS_NODE_TIMEOUT": "600", **os.environ}
        variables = {**patient, "OMP_NUM_THREADS": "1", "GS_BENCH_REPORT": folder}
        given = words_of({**vars(arguments), "json": None, "notes": None, **changed})
        checked([*command, *launcher, "--", os.path.abspath(script), *given], env=variables)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(num_workers)]


def report(found: Report) -> None:
    """Hand this worker's findings to ``launch``."""
    if gs.get_rank() == 0:
        tell_measuring(False)
    Path(os.environ["GS_BENCH_REPORT"], str(gs.get_rank())).write_text(json.dumps(found))


def take_turns(
    sides: Mapping[str, Callable[[], object] | None], *, rounds: int, steps: int, turns: int = 1
) -> Report:
    """Every worker: A B A B, each behind a barrier; what a step took here, side by side.

    Args:
        sides: What each side runs on this worker in a turn; None where it only waits.
        rounds: How many rounds to count, after one that warms up.
        steps: How many steps a turn has.
        turns: How many turns of each side make a round. With several short ones in place of a
            long one, what the machine does besides hits both sides alike.
    """
    found: Report = {name: {"seconds": [], "faults": [], "turns": turns} for name in sides}
    for number in range(rounds + 1):
        if number == 1 and gs.get_rank() == 0:
            tell_measuring(True)
        for name, run in list(sides.items()) * turns:
            gs.barrier()
            seconds, faults = timed(run) if run is not None else (0.0, 0)
            if number:
                found[name]["seconds"].append(seconds / steps)
                found[name]["faults"].append(faults / steps)
    gs.barrier()
    return found


def slowest(
    reports: Sequence[Report], side: str, of: Callable[[list[float]], float] = statistics.fmean
) -> Samples:
    """For each round, the mean of its turns; in each the worker that took longest counts.

    A side is done when all its workers are.

    Args:
        reports: What the workers have reported.
        side: The side's name.
        of: What is made of the turns of a round: the median, where they are many and short.
    """
    of_workers = [report["turns"][side] for report in reports]
    turns = of_workers[0]["turns"]

    def by_round(what: str) -> list[float]:
        longest = [max(values) for values in zip(*(w[what] for w in of_workers), strict=True)]
        return [of(longest[i : i + turns]) for i in range(0, len(longest), turns)]

    return Samples(by_round("seconds"), by_round("faults"))


def slowest_of_all(launches: Sequence[Sequence[Report]], side: str) -> Samples:
    """The rounds of all launches, one launch after the other; see ``slowest``."""
    found = [slowest(reports, side) for reports in launches]
    return Samples(
        [seconds for one in found for seconds in one.seconds],
        [faults for one in found for faults in one.faults],
    )


def by_launch(launches: Sequence[Sequence[Report]], upper: str, lower: str) -> str:
    """The ratio of two sides in every launch by itself, in words; nothing for a single one."""
    if len(launches) < 2:
        return ""
    found = [ratios(slowest(reports, upper), slowest(reports, lower)) for reports in launches]
    return "launch by launch: " + ", ".join(f"{statistics.median(one):.3f}" for one in found)


def breakdown(model: gs.Model, batches: Sequence[Any]) -> dict[str, float]:
    """Milliseconds a step of each kind of instruction, in a round of its own with timers in it.

    ``RECEIVE`` holds the waiting; ``rest`` is what a step costs besides its instructions.
    """
    spent: Counter[str] = Counter()
    runner = watch(model, spent, time.perf_counter)
    gs.barrier()
    whole, _ = timed(lambda: model.train(1, batches))
    runner.watch(None)
    spent["rest"] = whole - sum(spent.values())
    return {kind: seconds * 1e3 / len(batches) for kind, seconds in spent.items()}


def latest_plan(model: gs.Model) -> ReadyPlan:
    """The plan of training that this worker made last."""
    planned: ReadyPlan | None = model._engine.planner.latest(Mode.TRAIN)  # type: ignore[union-attr]
    if planned is None:
        raise SystemExit("nothing has been planned yet")
    return planned


def latest_runner(model: gs.Model) -> ProgramRunner:
    """The runner of the train program that this worker planned last."""
    return latest_plan(model).runner


def watch(model: gs.Model, spent: Counter[str], clock: Callable[[], float]) -> ProgramRunner:
    """Have the seconds of every instruction of this worker added up, by kind."""
    runner = latest_runner(model)

    def with_clock(position: int, action: Callable[[Any], None]) -> Callable[[Any], None]:
        kind = runner.instructions[position].opcode.value

        def run(state: Any) -> None:
            start = clock()
            action(state)
            spent[kind] += clock() - start

        return run

    runner.watch(with_clock)
    return runner


class ComputeClock:
    """The seconds that this worker computes in each round, whoever else has the core meanwhile."""

    def __init__(self, model: gs.Model, num_steps: int) -> None:
        self._model, self._num_steps = model, num_steps
        self._spent: Counter[str] = Counter()
        self._is_watching = False
        self.seconds: list[float] = []

    def run(self, train: Callable[[], None]) -> None:
        """Run a round; its first call, which plans, is not watched."""
        self._spent.clear()
        train()
        if self._is_watching:
            spent = sum(s for kind, s in self._spent.items() if kind in COMPUTE)
            self.seconds.append(spent / self._num_steps)
        else:
            watch(self._model, self._spent, time.thread_time)
            self._is_watching = True


def breakdowns(reports: Sequence[Report]) -> dict[str, dict[str, float]]:
    """Those of all workers, by name."""
    return {f"worker {rank}": report["breakdown"] for rank, report in enumerate(reports)}


def row_of(
    work: str,
    launches: Sequence[Sequence[Report]],
    ours: str,
    theirs: str,
    *,
    also: Sequence[str] = (),
    notes: str = "",
    **more: Any,
) -> Row:
    """Two sides of some launches of one job, whose workers have reported alike.

    Args:
        work: What was done.
        launches: Of each launch, the workers' reports.
        ours: The side that is judged.
        theirs: The other.
        also: Further sides to print.
        notes: What a reader must know besides.
        more: As for ``compared``.
    """
    upper, lower = (theirs, ours) if more.get("inverse") else (ours, theirs)
    further = {side: slowest_of_all(launches, side).summary() for side in also}
    return compared(
        work,
        *((side, slowest_of_all(launches, side)) for side in (ours, theirs)),
        bits=agreed([one["bits"] for reports in launches for one in reports]),
        breakdown=breakdowns(launches[-1]),
        further_sides=further | more.pop("further_sides", {}),
        notes="; ".join(filter(None, (notes, by_launch(launches, upper, lower)))),
        **more,
    )


def busiest(reports: Sequence[Report]) -> Samples:
    """Seconds of a step if nothing but computing took time, and nobody waited, round by round.

    The busiest worker, or all of them divided by the cores, whichever is more.
    """
    rounds = zip(*(report["compute"] for report in reports), strict=True)
    cores = os.cpu_count() or 1
    return Samples([max(max(compute), sum(compute) / cores) for compute in rounds])


def same_parameters(net: torch.nn.Module, theirs: Mapping[str, torch.nn.Parameter]) -> str:
    """Compare what this worker owns of ``net`` with the same names of others, bit by bit.

    Args:
        net: Trained by graphsplit.
        theirs: The reference, by name; it may hold more, or fewer, parameters.

    Returns:
        ``"equal"``, or the first name that differs.
    """
    compared = 0
    for name, mine in net.named_parameters():
        if is_elsewhere(mine) or name not in theirs:
            continue
        compared += 1
        reference = theirs[name]
        if not torch.equal(mine, reference):
            return f"{name} differs"
        if (mine.grad is None) != (reference.grad is None):
            return f"the gradient of {name} is missing on one side"
        if mine.grad is not None and not torch.equal(mine.grad, reference.grad):
            return f"the gradient of {name} differs"
    return "equal" if compared else "nothing to compare"


def same_training(model: gs.Model, other: torch.nn.Module, losses: Sequence[float]) -> str:
    """Compare parameters, and the last losses of all sides; ``"equal"``, or what differs."""
    if len(set(losses)) > 1:
        return f"losses differ: {losses}"
    return same_parameters(model.network, dict(other.named_parameters()))


def agreed(words: Sequence[str]) -> str:
    """The common finding of all workers: ``"equal"``, or what differs."""
    different = [word for word in words if word != "equal"]
    return different[0] if different else "equal"
