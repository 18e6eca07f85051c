"""Five real workers give the bits of a plain loop, over each transport."""

from __future__ import annotations

import pytest

from system.helpers import run_job
from system.jobs import same_bits

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(400)]

# What carries values does not change them: all scenarios over one transport, and over the others
# those that differ in what they ask of it.
SOME = {
    "gloo": ["dropout and the rest in 4"],
    "grpc": ["LeNet as in the example", "dropout", "LeNet in 4", "clipped", "64 MiB", "(0, 1, 0"],
    "shm": [""],
}


@pytest.mark.parametrize("transport", SOME)
def test_five_workers_give_the_bits_of_a_plain_loop(transport):
    some = SOME[transport]
    names = [s.name for s in same_bits.scenarios() if any(part in s.name for part in some)]
    assert len(names) >= len(some)

    job = run_job("same_bits.py", *some, workers=5, timeout_s=380, GS_TRANSPORT=transport)

    assert job.status == 0, job.output[-4000:]
    for rank in range(5):
        assert job.said_by(f"worker {rank}") == [f"same bits: {name}" for name in names]
