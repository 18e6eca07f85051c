"""Optimizers of one's own on real workers: tried out beside gRPC, then stepped or refused."""

from __future__ import annotations

import pytest

from system.helpers import run_job
from system.jobs import own_optimizers

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(200)]


def test_one_that_may_be_split_gives_the_bits_and_one_that_may_not_ends_the_job():
    """Split by parameters; in parts of a step; on one worker; one that looks at all, over two."""
    cases = ("Momentum:0:1", "Momentum:0:1:parts", "Normalized:1:1", "Normalized:0:1")
    job = run_job("own_optimizers.py", *cases, workers=2)

    in_parts = own_optimizers.plain("Momentum", own_optimizers.SCALES)
    losses = (own_optimizers.plain("Momentum"), in_parts, own_optimizers.plain("Normalized"))
    expected = [" ".join(hexadecimal) for hexadecimal in losses]
    for rank in range(2):
        assert job.said_by(f"worker {rank}")[:3] == expected, job.output[-4000:]
    assert job.status == 1
    assert "ConfigurationError: Normalized (" in job.output
    assert "cannot be stepped worker by worker" in job.output
    assert "gs.per_parameter(optimizer)" in job.output
