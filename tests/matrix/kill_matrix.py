"""Every process in every phase, killed, stopped, or raising: what happens to the job.

    python tests/matrix/kill_matrix.py --out results.jsonl [--only PATTERN] [--jobs 2] [--limit S]

Runs that are in the file already are not run again, so the matrix can be run in stretches.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from matrix.faults import EXCEPTION, Fault
from matrix.forked import warm_up
from matrix.runs import (
    FAIL_FAST,
    GO_ON,
    JOURNAL,
    LOOP,
    NEWCOMER,
    NUM_WORKERS,
    WAIT_REJOIN,
    Case,
    Run,
)
from matrix.table import PHASES, read, to_line

HOWS = ("SIGKILL", "SIGSTOP", EXCEPTION)
EVAL_STEP = 12


def moments(phase: str, seed: int, policy: str) -> tuple[str, int]:
    """What stands for a phase in one run: the name of a moment, and which of that name."""
    match phase:
        case "registering":
            return (("JOIN", 0), ("WAIT", 0))[seed % 2]
        case "planning":
            return (("PLAN", 0), ("AGREE", 0))[seed % 2]
        case "first step":
            return (("FORWARD", 0), ("BACKWARD", 0))[seed % 2]
        case "snapshot":
            # Nothing is kept in memory where a job fails fast; then it is a save that is hit.
            return ("SAVE", 0) if policy == FAIL_FAST else ("SNAPSHOT", 2 * (1 + seed % 5))
        case "eval":
            return "EVAL", EVAL_STEP + seed % 4
        case "finishing":
            return (("FINISH", 0), ("AT FINISH", 0))[seed % 2]
        case _:
            return phase.upper(), 1 + (3 * seed) % 10
    raise AssertionError(phase)


def fault_of(victim: str, phase: str, how: str, seed: int, policy: str) -> Fault:
    """The fault of one run."""
    what, number = moments(phase, seed, policy)
    observer = victim
    if victim == "scheduler":
        if phase == "registering":
            observer, what, number = "scheduler", ("REGISTER", "REGISTERED")[seed % 2], seed % 3
        elif what != "AT FINISH":
            observer = f"worker {seed % NUM_WORKERS}"
    elif what == "AT FINISH":
        if how == EXCEPTION:  # it only waits there
            what = "FINISH"
        else:
            observer = "scheduler"
    return Fault(victim, observer, what, number, how)


def all_cases() -> Iterator[Case]:
    """The whole matrix, two runs for a cell of a worker and of the scheduler each.

    Of those that go on without a worker, one without and one with another one in its place.
    """
    for seed in range(2):
        for policy in (FAIL_FAST, WAIT_REJOIN, JOURNAL, LOOP, NEWCOMER if seed else GO_ON):
            for victim in ("scheduler", *(f"worker {rank}" for rank in range(NUM_WORKERS))):
                if policy == JOURNAL and victim != "scheduler":
                    continue
                for how in HOWS:
                    if policy == NEWCOMER and (victim == "scheduler" or how == EXCEPTION):
                        continue  # nobody is to come
                    for phase in PHASES:
                        fault = fault_of(victim, phase, how, seed, policy)
                        yield Case(phase, policy, seed, fault)


def reference(job: Path, folder: Path) -> list[str]:
    """What one process prints that runs a job's script, and in which nothing happens."""
    environment = {k: v for k, v in os.environ.items() if k[:3] not in ("MS_", "GS_")}
    done = subprocess.run(
        [sys.executable, str(job), str(folder)], env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def run_all(cases: list[Case], folder: Path, *, jobs: int, limit_s: float, out: Path) -> int:
    """Run the cases, some at a time, and write a line for each. Returns how many deviated."""
    expected = {job: reference(job, folder) for job in {case.job for case in cases}}
    running: list[Run] = []
    num_wrong = 0
    end = time.monotonic() + limit_s
    while cases or running:
        while cases and len(running) < jobs and time.monotonic() < end:
            case = cases.pop(0)
            running.append(Run(case, folder / case.name))
        ended = [run for run in running if run.poll()]
        for run in ended:
            running.remove(run)
            row = run.row(expected[run.case.job])
            num_wrong += not row.ok
            seconds = time.monotonic() - run.began
            with out.open("a") as file:
                file.write(to_line(row) + "\n")
            shown = "ok" if row.ok else f"WRONG: {row.why}"
            print(f"{run.case.name} {seconds:.1f} s, {row.detected_s} s: {shown}", flush=True)
        if not ended:
            if not running:
                break
            time.sleep(0.02)
    return num_wrong


def main() -> int:
    """Run what is asked for; the status is 1 if anything deviated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1e9, help="start nothing after so long")
    parser.add_argument("--real", action="store_true", help="start processes by graphsplit run")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    done = set()
    if arguments.out.exists():
        done = {(r.process, r.phase, r.fault, r.policy, r.seed) for r in read(arguments.out)}
    cases = [
        Case(c.phase, c.policy, c.seed, c.fault, is_real=arguments.real)
        for c in all_cases()
        if (c.fault.victim, c.phase, c.fault.how, c.policy, c.seed) not in done
        and re.search(arguments.only, c.name)
    ]
    warm_up()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kill-matrix-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(cases)} runs, in {folder}", flush=True)
    num_wrong = run_all(
        cases,
        folder,
        jobs=arguments.jobs,
        limit_s=arguments.limit,
        out=arguments.out,
    )
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
