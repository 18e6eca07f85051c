"""Saved by five real workers in the middle of an epoch, loaded by others and by plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model

from system.helpers import Finished, run_alone, run_job
from system.jobs.nets import Fan
from system.jobs.training_state import digest

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return run_alone("training_state.py", "plain")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """A run on five workers that saves after the second step of the second epoch."""
    folder = tmp_path_factory.mktemp("state")
    job = run_job("training_state.py", "save", "--folder", str(folder), workers=5)
    assert job.status == 0, job.output[-4000:]
    return folder, job


def after_the_save(lines: list[str]) -> list[str]:
    """What a resumed run must print."""
    whole = [line for line in lines if not line.startswith("weights")]
    last = next(i for i, line in enumerate(whole) if line.startswith("loss 2 2 "))
    return whole[last + 1 :]


def test_saving_disturbs_nothing(plain: list[str], saved: tuple[Path, Finished]):
    _, job = saved
    expected = [line for line in plain if not line.startswith("weights")]
    for rank in range(5):
        said = job.lines_of(f"worker {rank}")
        assert [line for line in said if line.startswith(("loss", "state"))] == expected


def test_a_failed_save_is_told_on_every_worker_with_its_root_cause(saved: tuple[Path, Finished]):
    _, job = saved
    told = [
        line
        for rank in range(5)
        for line in job.lines_of(f"worker {rank}")
        if line.startswith("refused")
    ]
    assert len(told) == 5
    assert len({line.partition(": ")[2] for line in told}) == 1
    assert "worker 1: cannot save to" in told[0]
    assert "Not a directory" in told[0]


def test_plain_pytorch_reads_what_five_workers_saved(
    plain: list[str], saved: tuple[Path, Finished]
):
    folder, _ = saved
    (expected,) = [line.removeprefix("weights ") for line in plain if line.startswith("weights")]
    shards: dict[str, torch.Tensor] = {}
    for path in (folder / "shared").glob("weights-*.safetensors"):
        shards.update(load_file(path))
    assert len(list((folder / "shared").iterdir())) == 11
    for state in (
        shards,
        load_file(folder / "disk0" / "whole" / "weights.safetensors"),
        load_file(folder / "weights.safetensors"),
    ):
        assert digest(dict(sorted(state.items()))) == expected
    load_model(Fan(), folder / "weights.safetensors")


def test_three_workers_go_on_under_another_placement(
    plain: list[str], saved: tuple[Path, Finished]
):
    folder, _ = saved
    job = run_job("training_state.py", "resume", "--folder", str(folder / "shared"),
                  "--stride", "2", "--seed", "9", workers=3)  # fmt: skip
    assert job.status == 0, job.output[-4000:]
    for rank in range(3):
        assert job.said_by(f"worker {rank}") == after_the_save(plain)


def test_four_workers_of_which_one_sees_the_files_go_on(
    plain: list[str], saved: tuple[Path, Finished]
):
    folder, job = saved
    assert [job.lines_of(f"worker {rank}").count("latest whole") for rank in range(5)] == [1] * 5
    assert sorted(p.name for p in folder.glob("disk*")) == ["disk0"]
    job = run_job("training_state.py", "resume", "--folder", str(folder / "disk{rank}" / "whole"),
                  "--stride", "3", "--seed", "9", workers=4, GS_TRANSPORT="grpc")  # fmt: skip
    assert job.status == 0, job.output[-4000:]
    for rank in range(4):
        assert job.said_by(f"worker {rank}") == after_the_save(plain)
