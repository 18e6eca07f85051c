"""Jobs that torchrun has started: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launched_jobs import (
    LIMIT_S,
    SCRIPT,
    assert_nothing_is_left,
    environment,
    learned_alone,
    pids_of_workers,
)

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(240)]


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


def test_lenet_learns_the_same_as_by_itself(tmp_path: Path) -> None:
    learned = learned_alone(tmp_path, STEPS="5")
    with torchrun(tmp_path, STEPS="5") as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert output.count(learned) == 2, output
    assert output.count("started by torchrun: 2 workers, the scheduler is a child of worker 0") == 1
    assert "all workers have finished" in output
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("whom", ["torchrun", "worker 0"])
def test_an_ended_job_leaves_nothing_behind(tmp_path: Path, whom: str) -> None:
    """Ctrl-C for torchrun; or the worker is killed whose child the scheduler is."""
    with torchrun(tmp_path, STEPS="1000000") as job:
        pids = pids_of_workers(job.stdout, count=2)
        if whom == "torchrun":
            job.send_signal(signal.SIGINT)
        else:
            os.kill(pids[0], signal.SIGKILL)
        job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    assert_nothing_is_left(tmp_path)
