"""Scripts' own loops under ``gs.distribute`` in real jobs; ``tests/distribute`` has many more."""

from __future__ import annotations

import pytest

from system.helpers import run_job

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(240)]


def test_own_loops_have_the_bits_of_one_process_over_shared_memory() -> None:
    loops = [
        "all_at_once",
        "usual",
        "several",
        "language",
        "by_hand",
        "own_optimizer",
        "global_optimizer",
    ]
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


FEW = ("gan", "gpt_like", "loop_that_survives")
REST = ("ddp_toy", "two_stage_pipeline", "clip_towers", "encoder_decoder", "linear", "lenet")


@pytest.mark.parametrize(
    ("loops", "workers", "transport"), [((*FEW, *REST), 3, "shm"), (FEW, 5, "grpc")]
)
def test_the_examples_under_own_loops_have_the_bits_of_one_process(
    loops: tuple[str, ...], workers: int, transport: str
) -> None:
    """On 2, 3 and 5 workers that are threads: ``distribute/test_same_bits.py``."""
    job = run_job("own_loops.py", *loops, workers=workers, GS_TRANSPORT=transport)

    assert job.status == 0, job.output[-4000:]
    for rank in range(workers):
        assert sorted(job.said_by(f"worker {rank}")) == sorted(f"{one}: same bits" for one in loops)


def test_each_worker_runs_its_own_layers_and_has_memory_for_no_others() -> None:
    job = run_job("kept_apart.py", workers=2)

    assert job.status == 0, job.output[-4000:]
    for rank, numbers in ((0, range(12)), (1, range(12, 16))):
        ran, grown = job.said_by(f"worker {rank}")
        names = [f"{way} {number}" for way in ("forward", "backward") for number in numbers]
        assert ran.split(", ")[1:] == [f"{name}: 3" for name in sorted(names)]
        own = 16 * len(numbers)  # MiB: weights, gradients and two moments; all layers' are 256
        assert own <= int(grown.split()[-1]) < own + 40


def test_what_one_worker_asks_alone_ends_the_job_by_name() -> None:
    job = run_job("own_loops.py", "one-gradient", workers=2)

    assert job.status != 0
    assert "the workers have made different calls" in job.output and "Fix: " in job.output
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
