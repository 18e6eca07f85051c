"""Jobs that Slurm's srun has started: real processes, where Slurm is installed."""

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
from slurm_cluster import slurm_cluster, why_not

pytestmark = [
    pytest.mark.real_processes,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@contextmanager
def srun(
    cluster: dict[str, str], folder: Path, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        ["srun", "-n", "2", "--overcommit", sys.executable, str(SCRIPT)],
        env=environment(folder, **cluster, **variables),
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


def test_lenet_learns_the_same_as_by_itself(cluster: dict[str, str], tmp_path: Path) -> None:
    learned = learned_alone(tmp_path, STEPS="5")
    with srun(cluster, tmp_path, STEPS="5") as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert output.count(learned) == 2, output
    assert output.count("started by a Slurm step: 2 workers, the scheduler is a child of") == 1
    assert "all workers have finished" in output
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("whom", ["srun", "worker 0", "worker 1"])
def test_an_ended_job_leaves_nothing_behind(
    cluster: dict[str, str], tmp_path: Path, whom: str
) -> None:
    """Ctrl-C, which srun wants twice; or a worker is killed, once the scheduler's parent."""
    with srun(cluster, tmp_path, STEPS="1000000") as job:
        pids = pids_of_workers(job.stdout, count=2)
        if whom == "srun":
            job.send_signal(signal.SIGINT)
            assert job.stdout is not None
            while "one more within 1 sec" not in (line := job.stdout.readline()):
                assert line
            job.send_signal(signal.SIGINT)
        else:
            os.kill(pids[int(whom[-1])], signal.SIGKILL)
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0, output
    if whom != "srun":
        assert f"worker {whom[-1]}" in output and "killed or crashed" in output
    assert_nothing_is_left(tmp_path)


def test_a_policy_that_srun_cannot_do_is_refused_in_every_process(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    with srun(cluster, tmp_path, STEPS="5", GS_RECOVERY="restart") as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    assert output.count("GS_RECOVERY=restart, and srun starts no process again") >= 2
    assert_nothing_is_left(tmp_path)
