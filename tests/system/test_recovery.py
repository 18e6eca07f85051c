"""Real workers are killed, and the job ends in the bits of a run in which nothing happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from system.helpers import Finished, run_alone, run_job

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def plain() -> list[str]:
    """What one process prints."""
    return run_alone("recovering.py")


@pytest.fixture(scope="module")
def plain_replicated() -> list[str]:
    """The same of the network that is replicated."""
    return run_alone("recovering.py", "--replicated")


def recovering(
    moments: str,
    folder: Path,
    *,
    workers: int,
    restarts: int = 0,
    options: tuple[str, ...] = (),
    **environment: str,
) -> Finished:
    """A job whose workers die at some moments. Snapshots are taken after every second step."""
    environment = {"GS_SNAPSHOT_EVERY": "2", "GS_SNAPSHOT_DISK_EVERY": "2", **environment}
    return run_job(
        "recovering.py", "--die", moments, "--marks", str(folder), *options,
        workers=workers, restarts=restarts, timeout_s=380, **environment,
    )  # fmt: skip


def test_killed_workers_come_back_and_nothing_is_different(plain: list[str], tmp_path: Path):
    """In backward, while a snapshot leaves, and in evaluation; each of the three once."""
    moments = "1:BACKWARD:5,2:SNAPSHOT:6,0:EVAL:17"
    job = recovering(moments, tmp_path, workers=3, restarts=3, GS_RECOVERY="wait_rejoin")
    assert job.status == 0, job.output[-6000:]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(moments.split(","))
    for rank in range(3):
        said = job.said_by(f"worker {rank}")
        lives = 1 + sum(moment.startswith(f"{rank}:") for moment in moments.split(","))
        assert said[-len(plain) :] == plain
        assert all(line in plain for line in said)
        assert len(said) < (lives + 1) * len(plain)


def test_a_killed_job_goes_on_from_disk_with_fewer_and_with_more_workers(
    plain: list[str], tmp_path: Path
):
    path = tmp_path / "recovery"
    always = {"GS_RECOVERY": "restart", "MS_RECOVERY_PATH": str(path)}
    for workers, moment in ((3, "1:BACKWARD:8"), (2, "0:FORWARD:13")):
        job = recovering(moment, tmp_path, workers=workers, **always)
        assert job.status != 0
        assert list(path.glob("snapshots/*/snapshot.json")), job.output
    job = recovering("", tmp_path, workers=4, **always)
    assert job.status == 0, job.output[-4000:]
    for rank in range(4):
        assert job.said_by(f"worker {rank}") == plain
    assert list((path / "snapshots").iterdir()) == []


def test_a_job_that_is_asked_to_end_stops_in_order_and_goes_on_another_time(
    plain: list[str], tmp_path: Path
):
    """SIGTERM to one worker, in the middle of a step: all finish it, keep it, and leave."""
    marks, kept = tmp_path / "marks", tmp_path / "kept"
    marks.mkdir()
    restart = {"GS_RECOVERY": "restart", "MS_RECOVERY_PATH": str(kept)}
    first = recovering("0:FORWARD:5", marks, workers=3, options=("--by", "SIGTERM"), **restart)
    assert first.status == 143, first.output[-6000:]
    assert "worker 0 was asked to end: all workers leave when their step is done" in first.output
    assert "[scheduler] all workers have stopped in order" in first.output
    assert "Traceback" not in first.output
    assert len(list((kept / "snapshots").iterdir())) == 2
    again = recovering("0:FORWARD:5", marks, workers=3, options=("--by", "SIGTERM"), **restart)
    assert again.status == 0, again.output[-6000:]
    for rank in range(3):
        assert again.said_by(f"worker {rank}")[-len(plain) :] == plain


@pytest.mark.parametrize("restarts", [0, 2])
def test_the_others_go_on_in_the_same_bits_and_take_in_who_comes(
    restarts: int, plain_replicated: list[str], tmp_path: Path
):
    """Worker 0 dies in training, worker 2 in evaluation; with restarts both come back."""
    job = recovering(
        "0:BACKWARD:5,2:EVAL:9", tmp_path, workers=3, restarts=restarts,
        options=("--replicated",), GS_RECOVERY="go_on",
    )  # fmt: skip
    assert job.status == 0, job.output[-6000:]
    assert len(list(tmp_path.iterdir())) == 2
    for rank in range(3) if restarts else (1,):
        assert job.said_by(f"worker {rank}")[-len(plain_replicated) :] == plain_replicated
    if not restarts:  # one that is started again may be there before the others have left
        assert "going on with 2 of 3 workers, without workers 0" in job.logs["scheduler"]
        assert "going on with 1 of 3 workers, without workers 0, 2" in job.logs["scheduler"]


def test_one_that_comes_later_is_taken_in_at_a_step(tmp_path: Path):
    options = ("--replicated", "--epochs", "300")
    plain = run_alone("recovering.py", *options)
    job = recovering(
        "0:BACKWARD:5", tmp_path, workers=3, restarts=1,
        options=(*options, "--late", "0.5"), GS_RECOVERY="go_on",
    )  # fmt: skip
    assert job.status == 0, job.output[-6000:]
    for rank in range(3):
        assert job.said_by(f"worker {rank}") == plain
    assert "going on with 2 of 3 workers, without workers 0" in job.logs["scheduler"]
    assert "has come, and is to take part" in job.logs["scheduler"]
