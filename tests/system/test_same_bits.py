"""Five real workers give the bits of a plain loop, over each transport."""

from __future__ import annotations

import pytest

from system.helpers import run_job
from system.jobs import same_bits

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(400)]


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_five_workers_give_the_bits_of_a_plain_loop(transport):
    names = [scenario.name for scenario in same_bits.scenarios()]

    job = run_job("same_bits.py", workers=5, timeout_s=380, GS_TRANSPORT=transport)

    assert job.status == 0, job.output[-4000:]
    for rank in range(5):
        assert job.lines_of(f"worker {rank}") == [f"same bits: {name}" for name in names]
