"""Used by all benchmarks: equal conditions, page faults, figures, JSON.

A benchmark gives *rows*. A row is one piece of work done by two *sides* in turn, A B A B, and its
figure is the median of the rounds' ratios; see docs/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# 32 MiB is the most that glibc takes as its threshold for mmap.
MALLOC_BYTES = {"M_MMAP_THRESHOLD": 32 << 20, "M_TRIM_THRESHOLD": 1 << 30}
_MALLOPT = {"M_MMAP_THRESHOLD": -3, "M_TRIM_THRESHOLD": -1}
_PACKAGES = ("torch", "numpy", "grpcio", "protobuf", "graphsplit")


def equal_conditions() -> None:
    """One thread, and a malloc that keeps what is freed: the same for both sides.

    glibc otherwise returns and fetches memory again as it sees fit, by launch: hundreds of page
    faults a step apart, on either side.
    """
    torch.set_num_threads(1)
    if sys.platform == "linux":
        mallopt = ctypes.CDLL(None).mallopt
        for option, number in MALLOC_BYTES.items():
            if mallopt(_MALLOPT[option], number) != 1:
                raise SystemExit(f"mallopt({option}, {number}) was refused")


def malloc_variables() -> dict[str, str]:
    """The same malloc for processes that do not call ``equal_conditions``."""
    return {f"MALLOC_{name[2:]}_": str(number) for name, number in MALLOC_BYTES.items()}


def minor_faults() -> int:
    """Minor page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@dataclass
class Samples:
    """The times and page faults of one side, round by round.

    Attributes:
        seconds: Of one step, or one operation.
        faults: Minor page faults of the same, in the process that had most.
    """

    seconds: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """The figure that is quoted."""
        return statistics.median(self.seconds)

    def summary(self) -> dict[str, float]:
        """As it is written to JSON."""
        return {
            "median_s": self.median_s,
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
            "minor_faults": statistics.median(self.faults) if self.faults else 0.0,
        }


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        work: What was done.
        against: By whom else.
        figure: What the ratio is of, in words.
        ratio: The figure: the median of the rounds' ratios.
        spread: The smallest and the largest of them.
        reach: The bound that is wanted; None where there is none.
        at_most: Whether the bound is an upper one.
        sides: What each side took, by name.
        bits: ``"equal"`` where results were compared byte by byte and were equal; else why not.
        breakdown: Where the time goes, by worker: milliseconds a step of each kind of instruction.
        notes: What a reader must know besides.
    """

    work: str
    against: str
    figure: str
    ratio: float
    spread: tuple[float, float]
    reach: float | None
    at_most: bool
    sides: Mapping[str, Any]
    bits: str = ""
    breakdown: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: str = ""

    @property
    def verdict(self) -> str:
        """Whether the bound is reached, in words."""
        if self.reach is None:
            return ""
        held = self.ratio <= self.reach if self.at_most else self.ratio >= self.reach
        return f"{'reached' if held else 'MISSED'} ({'≤' if self.at_most else '≥'} {self.reach:g})"

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"{self.work}, against {self.against}",
            f"  {self.figure}: {self.ratio:.3f} ({self.spread[0]:.3f} to {self.spread[1]:.3f})  "
            f"{self.verdict}  {'bits ' + self.bits if self.bits else ''}".rstrip(),
        ]
        for name, side in self.sides.items():
            if "median_s" in side:
                lines.append(
                    f"    {name:28} {side['median_s'] * 1e3:10.3f} ms "
                    f"({side['min_s'] * 1e3:.3f} to {side['max_s'] * 1e3:.3f}), "
                    f"{side['minor_faults']:.1f} minor faults"
                )
            else:
                lines.append(f"    {name:28} {side}")
        if self.notes:
            lines.append(f"    {self.notes}")
        for worker, spent in self.breakdown.items():
            times = "  ".join(f"{kind} {ms:.3f}" for kind, ms in spent.items())
            lines.append(f"    {worker}: {times} (ms a step)")
        return lines


def ratios(upper: Samples, lower: Samples) -> list[float]:
    """The ratio of two sides' times, in each round."""
    return [a / b for a, b in zip(upper.seconds, lower.seconds, strict=True)]


def compared(
    work: str,
    ours: tuple[str, Samples],
    theirs: tuple[str, Samples],
    *,
    reach: float | None,
    inverse: bool = False,
    **more: Any,
) -> Row:
    """A row from the rounds of two sides.

    The two sides of a round ran in the same second, so they are compared with each other first. Two
    launches may go at different paces, and the ratio of the medians of all their rounds can then
    lie outside of both launches' own.

    Args:
        work: What was done.
        ours: Name and samples of the side that is judged.
        theirs: Name and samples of the other.
        reach: The bound on the ratio.
        inverse: The ratio is theirs ÷ ours (speed, at least), not ours ÷ theirs (time, at most).
        more: Further attributes of the row.
    """
    pairs = ratios(*((theirs[1], ours[1]) if inverse else (ours[1], theirs[1])))
    more.setdefault(
        "figure", f"{theirs[0]} ÷ {ours[0]}, time" if inverse else f"{ours[0]} ÷ {theirs[0]}, time"
    )
    sides = {ours[0]: ours[1].summary(), theirs[0]: theirs[1].summary()}
    sides.update(more.pop("further_sides", {}))
    return Row(
        work=work,
        against=theirs[0],
        ratio=statistics.median(pairs),
        spread=(min(pairs), max(pairs)),
        reach=reach,
        at_most=not inverse,
        sides=sides,
        **more,
    )


def timed(run: Any) -> tuple[float, int]:
    """Seconds and minor page faults of a call."""
    faults, start = minor_faults(), time.perf_counter()
    run()
    return time.perf_counter() - start, minor_faults() - faults


def tell_measuring(is_measuring: bool) -> None:
    """Make the file that ``GS_BENCH_MEASURING`` names, until measuring is over.

    Whoever shares the machine may look at it, and be quiet meanwhile.
    """
    path = os.environ.get("GS_BENCH_MEASURING")
    if path and is_measuring:
        Path(path).touch()
        time.sleep(1.0)
    elif path:
        Path(path).unlink(missing_ok=True)


def processor() -> str:
    """The name of the processor."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "source"


def environment() -> dict[str, Any]:
    """Hardware, versions and conditions, as they stand in every JSON file."""
    return {
        "hardware": {"processor": processor(), "cores": os.cpu_count(), "kernel": os.uname()[2]},
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
        },
        "conditions": {
            "omp_num_threads": os.environ["OMP_NUM_THREADS"],
            "mallopt": MALLOC_BYTES,
            "load_average_before": os.getloadavg()[0],
        },
    }


def parser(
    description: str | None, *, rounds: int = 5, steps: int | None = None
) -> argparse.ArgumentParser:
    """The options that all benchmarks have; ``--steps`` where a number is given for it."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--rounds", type=int, default=rounds, help="rounds after the warm-up")
    if steps is not None:
        made.add_argument("--steps", type=int, default=steps, help="steps between two barriers")
    made.add_argument("--json", help="where to write the results")
    made.add_argument("--notes", default="", help="what a reader of the JSON file must know")
    return made


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Options as they stand on a command line; those that are None or False are left out."""
    words = []
    for name, value in options.items():
        if value is not None and value is not False:
            words.append("--" + name.replace("_", "-"))
            several = value if isinstance(value, (list, tuple)) else [value]
            words += [] if value is True else map(str, several)
    return words


def write(arguments: argparse.Namespace, rows: Iterable[Row], conditions: dict[str, Any]) -> None:
    """Print each row as it comes, and write all so far to where that was asked for."""
    done: list[Row] = []
    _write_json(arguments, done, conditions)
    for row in rows:
        print("\n".join(row.lines()), flush=True)
        done.append(row)
        _write_json(arguments, done, conditions)


def _write_json(
    arguments: argparse.Namespace, rows: Sequence[Row], conditions: dict[str, Any]
) -> None:
    if not arguments.json:
        return
    content = {
        **conditions,
        "rounds": arguments.rounds,
        "notes": arguments.notes,
        "rows": [asdict(row) for row in rows],
    }
    path = Path(arguments.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def checked(command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; end with the last of its output where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **more)
    if done.returncode:
        raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
    return done
