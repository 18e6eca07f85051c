"""The cores of each worker of a host, for ``--bind``: neighbours, and as many for each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")

Share = tuple[int, int]
"""Of one worker: which it is of the host's, and how many these are."""


def cores_of(cores: Sequence[int], share: Share) -> Sequence[int]:
    """The part of some cores in order; where there are too few, several workers have the same."""
    index, count = share
    first = index * len(cores) // count
    return cores[first : max(first + 1, (index + 1) * len(cores) // count)]


def in_order(cores: Iterable[int], cpus: Path = _CPUS) -> list[int]:
    """Cores by package and core, so that a part of them shares as little as can be with others."""

    def place(cpu: int) -> tuple[int, int, int]:
        where = cpus / f"cpu{cpu}" / "topology"
        return _number(where / "physical_package_id"), _number(where / "core_id"), cpu

    return sorted(cores, key=place)


def bind(pid: int, share: Share) -> None:
    """Keep a process that has just begun, and all its threads, on its part of our own cores."""
    with contextlib.suppress(ProcessLookupError):  # it has ended, and will be told of
        os.sched_setaffinity(pid, cores_of(in_order(os.sched_getaffinity(0)), share))


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # a system that does not say
        return 0
