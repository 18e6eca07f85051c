"""Jobs that torchrun has started: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from launched_jobs import (
    LIMIT_S,
    assert_learns_as_alone,
    assert_nothing_is_left,
    launched,
    pids_of_workers,
)

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(240)]


def torchrun(folder: Path, **variables: str) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return launched(command, folder, **variables)


def test_lenet_learns_the_same_as_by_itself(tmp_path: Path) -> None:
    assert_learns_as_alone(torchrun, tmp_path, started="torchrun")


@pytest.mark.parametrize("whom", ["torchrun", "worker 0"])
def test_an_ended_job_leaves_nothing_behind(tmp_path: Path, whom: str) -> None:
    """Ctrl-C for torchrun; or the worker is killed whose child the scheduler is."""
    with torchrun(tmp_path, STEPS="endless") as job:
        pids = pids_of_workers(job.stdout, count=2)
        if whom == "torchrun":
            job.send_signal(signal.SIGINT)
        else:
            os.kill(pids[0], signal.SIGKILL)
        job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    assert_nothing_is_left(tmp_path)
