"""Jobs that Slurm's srun has started: real processes, where Slurm is installed."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from launched_jobs import (
    LIMIT_S,
    TOKEN,
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


def own_address() -> str:
    """An address of this machine that others reach; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as dialing, suppress(OSError):
        dialing.connect(("10.255.255.255", 1))  # sends nothing
        return str(dialing.getsockname()[0])
    return ""


@pytest.fixture(params=[1, 2], ids=["one node", "two nodes"])
def srun(request: pytest.FixtureRequest, cluster: dict[str, str]) -> Launch:
    """Two tasks. Nodes have names that only Slurm knows, so two are told where they meet."""
    nodes, own = request.param, {}
    if nodes == 2:
        if not (address := own_address()):
            pytest.skip("left out: this machine has no address beside loopback")
        own = {"GS_JOB_TOKEN": TOKEN, "MS_SCHED_HOST": address}
    command = ["srun", "-N", str(nodes), "-n", "2", "--overcommit", sys.executable]
    return partial(launched, command, **own, **cluster)


def test_lenet_learns_the_same_as_by_itself(srun: Launch, tmp_path: Path) -> None:
    assert_learns_as_alone(srun, tmp_path, started="a Slurm step")


def test_tasks_on_two_nodes_without_a_secret_are_told_the_lines_to_add(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    command = ["srun", "-N", "2", "-n", "2", "--overcommit", sys.executable]
    with launched(command, tmp_path, **cluster) as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    assert output.count("GS_JOB_TOKEN_FILE=") >= 2, output
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("whom", ["srun", "worker 0", "worker 1"])
def test_an_ended_job_leaves_nothing_behind(srun: Launch, tmp_path: Path, whom: str) -> None:
    """Ctrl-C, which srun wants twice; or a worker is killed, once the scheduler's parent."""
    with srun(tmp_path, STEPS="endless") as job:
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
