"""Real workers are killed in loops of the script's own: all begin anew, with the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from system.helpers import JOBS, run_job

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def plain() -> list[str]:
    """What one process prints."""
    done = subprocess.run(
        [sys.executable, str(JOBS / "loops.py")], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("moments", "workers", "transport"),
    [
        ("1:FORWARD:12,0:BACKWARD:9", 2, "shm"),
        ("0:STEP:14,1:ITER:2", 2, "grpc"),
        ("2:SNAPSHOT:2,1:END:1,0:FORWARD:34", 3, "shm"),
    ],
)
def test_killed_workers_come_back_and_nothing_is_different(
    plain: list[str], tmp_path: Path, moments: str, workers: int, transport: str
) -> None:
    environment = {"GS_RECOVERY": "wait_rejoin", "GS_SNAPSHOT_EVERY": "4"}
    job = run_job(
        "loops.py", str(tmp_path), moments, workers=workers, restarts=3, timeout_s=380,
        GS_TRANSPORT=transport, **environment,
    )  # fmt: skip

    assert job.status == 0, job.output[-6000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(moments.split(","))
    for rank in range(workers):
        assert job.said_by(f"worker {rank}")[-1:] == plain
