"""Five real workers give the bits of a plain loop, over each transport."""

from __future__ import annotations

import pytest

from system.helpers import run_job
from system.jobs import same_bits

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(400)]

# One is enough: what carries values does not change them.
GLOO_SCENARIO = "dropout and the rest in 4"


def test_five_workers_give_the_same_bits_over_gloo():
    (name,) = (s.name for s in same_bits.scenarios() if GLOO_SCENARIO in s.name)

    job = run_job("same_bits.py", GLOO_SCENARIO, workers=5, timeout_s=180, GS_TRANSPORT="gloo")

    assert job.status == 0, job.output[-4000:]
    for rank in range(5):
        assert job.said_by(f"worker {rank}") == [f"same bits: {name}"]


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_five_workers_give_the_bits_of_a_plain_loop(transport):
    names = [scenario.name for scenario in same_bits.scenarios()]

    job = run_job("same_bits.py", workers=5, timeout_s=380, GS_TRANSPORT=transport)

    assert job.status == 0, job.output[-4000:]
    for rank in range(5):
        assert job.said_by(f"worker {rank}") == [f"same bits: {name}" for name in names]
