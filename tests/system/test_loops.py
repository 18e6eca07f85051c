"""Real workers are killed in loops of the script's own: all begin anew, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from system.helpers import run_alone, run_job

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def plain() -> list[str]:
    """What one process prints."""
    return run_alone("loops.py")


@pytest.mark.parametrize(
    ("moments", "workers", "transport"),
    [
        ("1:FORWARD:12,0:BACKWARD:9", 2, "shm"),
        ("0:STEP:22,1:STEP:22", 2, "shm"),  # all at once: without a disk they begin anew
        ("2:STEP:14,1:ITER:2", 3, "grpc"),
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


@pytest.mark.parametrize(("workers", "workers_then"), [(2, 2), (2, 3), (3, 2)])
def test_a_job_that_is_started_again_goes_on_from_disk(
    plain: list[str], tmp_path: Path, workers: int, workers_then: int
) -> None:
    marks, kept = tmp_path / "marks", tmp_path / "kept"
    marks.mkdir()
    environment = {"GS_RECOVERY": "restart", "MS_RECOVERY_PATH": str(kept)}
    every = {"GS_SNAPSHOT_EVERY": "4", "GS_SNAPSHOT_DISK_EVERY": "4"}
    lost, done = (
        run_job("loops.py", str(marks), "1:STEP:22", workers=number, **environment, **every)
        for number in (workers, workers_then)
    )

    assert lost.status != 0 and "worker 1 was killed by SIGKILL" in lost.output
    assert done.status == 0, done.output[-6000:]
    assert [done.said_by(f"worker {rank}") for rank in range(workers_then)] == [
        plain
    ] * workers_then
    assert list((kept / "snapshots").iterdir()) == []
