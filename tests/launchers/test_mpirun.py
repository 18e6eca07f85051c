"""Jobs that Open MPI's mpirun has started: real processes, where it is installed."""

from __future__ import annotations

import os
import shutil
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

pytestmark = [
    pytest.mark.real_processes,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        shutil.which("mpirun") is None,
        reason="there is no mpirun here: apt-get install openmpi-bin, or make test-launchers",
    ),
]


def mpirun(folder: Path, **variables: str) -> AbstractContextManager[subprocess.Popen[str]]:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *as_root, "--oversubscribe", "-n", "2", sys.executable]
    return launched(command, folder, **variables)


def test_lenet_learns_the_same_as_by_itself(tmp_path: Path) -> None:
    assert_learns_as_alone(mpirun, tmp_path, started="Open MPI")


@pytest.mark.parametrize("whom", ["mpirun", "worker 0", "worker 1"])
def test_an_ended_job_leaves_nothing_behind(tmp_path: Path, whom: str) -> None:
    """Ctrl-C for mpirun; or a worker is killed, once that whose child the scheduler is."""
    with mpirun(tmp_path, STEPS="1000000") as job:
        pids = pids_of_workers(job.stdout, count=2)
        if whom == "mpirun":
            job.send_signal(signal.SIGINT)
        else:
            os.kill(pids[int(whom[-1])], signal.SIGKILL)
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0, output
    assert_nothing_is_left(tmp_path)


def test_a_policy_that_mpirun_cannot_do_is_refused_in_every_process(tmp_path: Path) -> None:
    with mpirun(tmp_path, STEPS="5", GS_RECOVERY="wait_rejoin") as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    assert "GS_RECOVERY=wait_rejoin, and mpirun ends all processes when one is lost" in output
    assert_nothing_is_left(tmp_path)
