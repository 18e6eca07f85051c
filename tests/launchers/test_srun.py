"""Jobs that Slurm's srun has started: real processes, where Slurm is installed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from launched_jobs import (
    LIMIT_S,
    Launch,
    assert_learns_as_alone,
    assert_nothing_is_left,
    launched,
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


@pytest.fixture
def srun(cluster: dict[str, str]) -> Launch:
    return partial(launched, ["srun", "-n", "2", "--overcommit", sys.executable], **cluster)


def test_lenet_learns_the_same_as_by_itself(srun: Launch, tmp_path: Path) -> None:
    assert_learns_as_alone(srun, tmp_path, started="a Slurm step")


@pytest.mark.parametrize("whom", ["srun", "worker 0", "worker 1"])
def test_an_ended_job_leaves_nothing_behind(srun: Launch, tmp_path: Path, whom: str) -> None:
    """Ctrl-C, which srun wants twice; or a worker is killed, once the scheduler's parent."""
    with srun(tmp_path, STEPS="1000000") as job:
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
    srun: Launch, tmp_path: Path
) -> None:
    with srun(tmp_path, STEPS="5", GS_RECOVERY="restart") as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    assert output.count("GS_RECOVERY=restart, and srun starts no process again") >= 2
    assert_nothing_is_left(tmp_path)
