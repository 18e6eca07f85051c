"""Jobs of LeNet by some launcher: their environment, what they learn, and what they leave."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

Launch = Callable[..., AbstractContextManager[subprocess.Popen[str]]]

SCRIPT = Path(__file__).with_name("lenet_job.py")
RECOVERING = Path(__file__).parents[1] / "system" / "jobs" / "recovering.py"
TOKEN = "a token that only this job knows"
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
    with started([*command, str(SCRIPT)], environment(folder, **variables)) as process:
        yield process


@contextmanager
def started(
    command: Sequence[str], variables: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A launcher's process, which Ctrl-C ends even where the tests run in the background."""
    process = subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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


@functools.cache
def said_alone(script: Path, *arguments: str, **variables: str) -> tuple[str, ...]:
    """The lines of a script in one process; it is run once for all tests."""
    command = [sys.executable, str(script), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        own = environment(Path(folder), **variables)
        alone = subprocess.run(
            command, env=own, capture_output=True, text=True, check=True, timeout=LIMIT_S
        )
    return tuple(alone.stdout.splitlines())


def learned_alone(**variables: str) -> str:
    """What the script says at its end in one process."""
    lines = said_alone(SCRIPT, **variables)
    (learned,) = [line for line in lines if line.startswith("learned ")]
    return learned


def assert_learns_as_alone(launch: Launch, folder: Path, *, started: str) -> None:
    """Two workers learn what one process does; ``started`` says how it was launched, once."""
    learned = learned_alone(STEPS="5")
    with launch(folder, STEPS="5") as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert output.count(learned) == 2, output
    assert output.count(f"started by {started}: 2 workers, the scheduler is a child of") == 1
    assert "all workers have finished" in output
    assert_nothing_is_left(folder)


def assert_recovers_as_alone(
    launch: Callable[[tuple[str, ...]], AbstractContextManager[subprocess.Popen[str]]],
    folder: Path,
    *options: str,
    ranks: Sequence[int] = (0, 1, 2),
) -> str:
    """Worker 1 of three dies once, and those that are there end with the bits of one process.

    Args:
        launch: Launches a job, given its script and the script's arguments.
        folder: A folder of the test's own.
        options: More arguments of the script.
        ranks: The workers that are there at the end.

    Returns:
        What the launcher printed.
    """
    plain = list(said_alone(RECOVERING, *options))
    marks = folder / "marks"
    marks.mkdir()
    with launch((str(RECOVERING), "--die", "1:BACKWARD:5", "--marks", str(marks), *options)) as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    for rank in ranks:
        said = re.findall(rf"^\[worker {rank}\] (.*)$", output, re.MULTILINE)
        assert [line for line in said if line in plain][-len(plain) :] == plain
    return output


def interrupt(job: subprocess.Popen[str], pid: int, *hosts: object) -> None:
    """Press Ctrl-C."""
    job.send_signal(signal.SIGINT)


def kill_worker(job: subprocess.Popen[str], pid: int, *hosts: object) -> None:
    """Kill the worker with this number."""
    os.kill(pid, signal.SIGKILL)


def kill_launcher(job: subprocess.Popen[str], pid: int, *hosts: object) -> None:
    """Kill the launcher."""
    job.kill()


def parent_of(pid: int) -> int:
    """The process that started another one."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^PPid:\s(\d+)$", status, re.MULTILINE)
    assert found is not None
    return int(found[1])


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
