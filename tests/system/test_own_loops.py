"""Scripts' own loops under ``gs.distribute`` in real jobs; ``tests/distribute`` has many more."""

from __future__ import annotations

import pytest

from system.helpers import run_job

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(240)]


def test_own_loops_have_the_bits_of_one_process_over_shared_memory() -> None:
    loops = ["usual", "several", "language", "by_hand", "own_optimizer"]
    job = run_job("own_loops.py", *loops, "refused", workers=2, GS_TRANSPORT="shm")

    assert job.status == 0, job.output[-4000:]
    for rank in range(2):
        said = job.said_by(f"worker {rank}")
        assert said[: len(loops)] == [f"{loop}: same bits" for loop in loops]
        assert len(said) == len(loops) + 5
        assert all(line.startswith("refused, with a fix: ") for line in said[len(loops) :])


def test_own_loops_have_the_bits_of_one_process_over_grpc() -> None:
    loops = ["usual", "projected", "distilled"]
    job = run_job("own_loops.py", *loops, workers=3, GS_TRANSPORT="grpc")

    assert job.status == 0, job.output[-4000:]
    for rank in range(3):
        assert job.said_by(f"worker {rank}") == [f"{loop}: same bits" for loop in loops]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("global-step", "cannot be stepped worker by worker"),
        ("one-gradient", "the workers have made different calls"),
    ],
)
def test_what_one_worker_cannot_do_alone_ends_the_job_by_name(what: str, text: str) -> None:
    job = run_job("own_loops.py", what, workers=2)

    assert job.status != 0
    assert text in job.output and "Fix: " in job.output
    assert job.seconds < 60


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_worker_that_is_killed_in_an_own_loop_ends_the_job_by_name(transport: str) -> None:
    job = run_job("own_loops.py", "killed", workers=3, GS_TRANSPORT=transport)

    assert job.status != 0
    assert "worker 1" in job.output.splitlines()[-1] and "SIGKILL" in job.output
    assert job.seconds < 60


def test_an_own_loop_is_refused_where_lost_workers_may_come_back() -> None:
    job = run_job("own_loops.py", "killed", workers=2, GS_RECOVERY="wait_rejoin")

    assert job.status != 0 and "SIGKILL" not in job.output
    assert "a loop of the script's own cannot go on from a snapshot" in job.output
    assert "Fix: for batch in gs.loop(loader, keep=[" in job.output
