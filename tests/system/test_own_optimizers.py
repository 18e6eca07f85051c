"""Optimizers of one's own on real workers: tried out beside gRPC, then stepped or refused."""

from __future__ import annotations

import pytest

from system.helpers import run_job
from system.jobs import own_optimizers

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(200)]


def test_one_that_may_be_split_gives_the_bits_and_one_that_may_not_ends_the_job():
    """Split by parameters, whole and in parts; all on one worker; and one that is refused."""
    job = run_job(
        "own_optimizers.py",
        *("Momentum:0:1", "Momentum:0:1:parts", "Normalized:1:1", "Normalized:0:1"),
        workers=2,
    )

    kinds = ("Momentum", "Momentum", "Normalized")
    expected = [" ".join(own_optimizers.plain(kind)) for kind in kinds]
    for rank in range(2):
        assert job.said_by(f"worker {rank}")[:3] == expected, job.output[-4000:]
    assert job.status == 1
    assert "ConfigurationError: Normalized (" in job.output
    assert "cannot be stepped worker by worker" in job.output
    assert "gs.per_parameter(optimizer)" in job.output
