"""Jobs that Open MPI's mpirun has started: real processes, where it is installed."""

from __future__ import annotations

import os
import shutil
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

pytestmark = [
    pytest.mark.real_processes,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        shutil.which("mpirun") is None,
        reason="there is no mpirun here: apt-get install openmpi-bin, or make test-launchers",
    ),
]


@contextmanager
def mpirun(folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    process = subprocess.Popen(
        ["mpirun", *as_root, "--oversubscribe", "-n", "2", sys.executable, str(SCRIPT)],
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


def test_lenet_learns_the_same_as_by_itself(tmp_path: Path) -> None:
    learned = learned_alone(tmp_path, STEPS="5")
    with mpirun(tmp_path, STEPS="5") as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert output.count(learned) == 2, output
    assert output.count("started by Open MPI: 2 workers, the scheduler is a child of worker 0") == 1
    assert "all workers have finished" in output
    assert_nothing_is_left(tmp_path)


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
