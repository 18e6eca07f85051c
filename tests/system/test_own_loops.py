"""Scripts' own loops under ``gs.distribute`` give the bits of the same loops without it."""

from __future__ import annotations

import pytest

from system.helpers import run_job
from system.jobs.own_loops import LOOPS

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(240)]


def test_own_loops_have_the_bits_of_one_process() -> None:
    workers = 2
    job = run_job("own_loops.py", workers=workers)

    assert job.status == 0, job.output[-4000:]
    expected = [f"{loop.__name__}: same bits" for loop in LOOPS]
    for rank in range(workers):
        said = job.said_by(f"worker {rank}")
        assert said[: len(expected)] == expected
        refused = said[len(expected) :]
        assert len(refused) == 5
        assert all(line.startswith("refused, with a fix: ") for line in refused)
