"""Optimizers of one's own on real workers: tried out beside gRPC, then stepped or refused."""

from __future__ import annotations

import pytest

from system.helpers import run_job
from system.jobs import own_optimizers

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(200)]


@pytest.mark.parametrize(("kind", "first", "second"), [("Momentum", 0, 1), ("Normalized", 1, 1)])
def test_one_that_may_be_split_gives_the_bits_of_a_plain_loop(kind, first, second):
    job = run_job("own_optimizers.py", kind, str(first), str(second), workers=2)

    assert job.status == 0, job.output[-4000:]
    for rank in range(2):
        assert job.said_by(f"worker {rank}") == [" ".join(own_optimizers.plain(kind))]


def test_one_that_looks_at_all_parameters_ends_the_job_with_its_name():
    job = run_job("own_optimizers.py", "Normalized", "0", "1", workers=2)

    assert job.status == 1
    assert "ConfigurationError: Normalized (" in job.output
    assert "cannot be stepped worker by worker" in job.output
    assert "gs.per_parameter(optimizer)" in job.output
