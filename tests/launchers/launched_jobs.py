"""Jobs of LeNet by some launcher: their environment, what they learn, and what they leave."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

Launch = Callable[..., AbstractContextManager[subprocess.Popen[str]]]

SCRIPT = Path(__file__).with_name("lenet_job.py")
LIMIT_S = 120.0
_TRAINS = re.compile(r"worker (\d) has pid (\d+) and trains")


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """The test's own, without what an outer job may have left; ``MARK`` tells its processes."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MS_", "GS_"))}
    own = {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder), "MARK": str(folder)}
    return {**kept, **own, **variables}


@contextmanager
def launched(
    command: Sequence[str], folder: Path, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """The launcher's process, which runs the script; killed at the end if it is there still."""
    process = subprocess.Popen(
        [*command, str(SCRIPT)],
        env=environment(folder, **variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def processes_of(folder: Path) -> list[str]:
    """The processes that were started from ``environment`` and have not ended."""
    mark, found = f"MARK={folder}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def assert_nothing_is_left(folder: Path) -> None:
    end_s = time.monotonic() + LIMIT_S
    while (left := processes_of(folder)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert left == []
    assert [path.name for path in folder.rglob("*.job")] == []


def learned_alone(folder: Path, **variables: str) -> str:
    """What the script says at its end in one process."""
    alone = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    (learned,) = [line for line in alone.stdout.splitlines() if line.startswith("learned ")]
    return learned


def assert_learns_as_alone(launch: Launch, folder: Path, *, started: str) -> None:
    """Two workers learn what one process does; ``started`` says how it was launched, once."""
    learned = learned_alone(folder, STEPS="5")
    with launch(folder, STEPS="5") as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert output.count(learned) == 2, output
    assert output.count(f"started by {started}: 2 workers, the scheduler is a child of") == 1
    assert "all workers have finished" in output
    assert_nothing_is_left(folder)


def pids_of_workers(output: IO[str] | None, *, count: int) -> dict[int, int]:
    """The processes by rank, once so many of them train."""
    assert output is not None
    pids: dict[int, int] = {}
    lines = []
    while len(pids) < count:
        line = output.readline()
        lines.append(line)
        assert line, "".join(lines)
        pids |= {int(rank): int(pid) for rank, pid in _TRAINS.findall(line)}
    return pids
