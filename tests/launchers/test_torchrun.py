"""Jobs that torchrun has started: real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("lenet_job.py")
LIMIT_S = 120.0
TRAINS = re.compile(r"worker (\d) has pid (\d+) and trains")


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """The test's own, without what an outer job may have left; ``MARK`` tells its processes."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MS_", "GS_"))}
    own = {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder), "MARK": str(folder)}
    return {**kept, **own, **variables}


def processes_of(folder: Path) -> list[str]:
    """The processes that were started from ``environment`` and have not ended."""
    mark, found = f"MARK={folder}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@contextmanager
def torchrun(folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*command, "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint",
         "127.0.0.1:0", str(SCRIPT)],
        env=environment(folder, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def assert_nothing_is_left(folder: Path) -> None:
    end_s = time.monotonic() + LIMIT_S
    while (left := processes_of(folder)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert left == []
    assert [path.name for path in folder.rglob("*.job")] == []


def test_lenet_learns_the_same_as_by_itself(tmp_path: Path) -> None:
    alone = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=environment(tmp_path, STEPS="5"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    (learned,) = [line for line in alone.stdout.splitlines() if line.startswith("learned ")]
    with torchrun(tmp_path, STEPS="5") as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert output.splitlines().count(learned) == 2, output
    assert output.count("started by torchrun: 2 workers, the scheduler is a child of worker 0") == 1
    assert "all workers have finished" in output
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("whom", ["torchrun", "worker 0"])
def test_an_ended_job_leaves_nothing_behind(tmp_path: Path, whom: str) -> None:
    """Ctrl-C for torchrun; a worker is killed, also the one whose child the scheduler is."""
    with torchrun(tmp_path, STEPS="1000000") as job:
        assert job.stdout is not None
        pids: dict[str, int] = {}
        output = []
        for line in job.stdout:
            output.append(line)
            if match := TRAINS.search(line):
                pids[f"worker {match[1]}"] = int(match[2])
            if len(pids) == 2:
                break
        assert len(pids) == 2, "".join(output)
        if whom == "torchrun":
            job.send_signal(signal.SIGINT)
        else:
            os.kill(pids[whom], signal.SIGKILL)
        rest, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    assert_nothing_is_left(tmp_path)
    if whom == "torchrun":
        assert "the job was interrupted by SIGINT" in rest
