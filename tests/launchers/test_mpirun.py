"""Jobs that Open MPI's mpirun or MPICH's mpiexec has started, whichever is installed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []
COMMANDS = {
    "Open MPI": ["mpirun", *AS_ROOT, "--oversubscribe", "-n", "2"],
    "MPICH (PMI_RANK and PMI_SIZE)": ["mpiexec.hydra", "-n", "2"],
}
PACKAGES = {"mpirun": "openmpi-bin", "mpiexec.hydra": "mpich"}


def _is_there(command: str) -> bool:
    """Whether it is installed; ``mpirun`` is MPICH's where there is no other."""
    if shutil.which(command) is None:
        return False
    told = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    return command != "mpirun" or "Open MPI" in told.stdout


@dataclass(frozen=True)
class Mpi:
    """A launcher of MPI's that is installed."""

    name: str

    def __call__(
        self, folder: Path, **variables: str
    ) -> AbstractContextManager[subprocess.Popen[str]]:
        return launched([*COMMANDS[self.name], sys.executable], folder, **variables)


@pytest.fixture(
    params=[
        pytest.param(
            name,
            id=command[0],
            marks=pytest.mark.skipif(
                not _is_there(command[0]),
                reason=f"{name.partition(' (')[0]} is not here: apt-get install "
                f"{PACKAGES[command[0]]}, or make test-launchers",
            ),
        )
        for name, command in COMMANDS.items()
    ]
)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    return Mpi(request.param)


def test_lenet_learns_the_same_as_by_itself(tmp_path: Path, mpi: Mpi) -> None:
    assert_learns_as_alone(mpi, tmp_path, started=mpi.name)


@pytest.mark.parametrize("whom", ["launcher", "worker 0", "worker 1"])
def test_an_ended_job_leaves_nothing_behind(tmp_path: Path, mpi: Mpi, whom: str) -> None:
    """Ctrl-C for the launcher; or a worker is killed, once that whose child the scheduler is.

    MPICH's status counts no process whose own status has not reached it, as may be after Ctrl-C.
    """
    with mpi(tmp_path, STEPS="endless") as job:
        pids = pids_of_workers(job.stdout, count=2)
        if whom == "launcher":
            job.send_signal(signal.SIGINT)
        else:
            os.kill(pids[int(whom[-1])], signal.SIGKILL)
        output, _ = job.communicate(timeout=LIMIT_S)
    if whom == "launcher" and mpi.name != "Open MPI":
        assert "interrupted" in output
    else:
        assert job.returncode != 0, output
    assert_nothing_is_left(tmp_path)


def test_a_policy_that_it_cannot_do_is_refused_in_every_process(tmp_path: Path, mpi: Mpi) -> None:
    with mpi(tmp_path, STEPS="5", GS_RECOVERY="wait_rejoin") as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    assert re.search(r"GS_RECOVERY=wait_rejoin, and mpi\w+ ends all processes when one", output)
    assert_nothing_is_left(tmp_path)
