"""``--bind``: which cores each worker of a host has."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from graphsplit.cli.job import shares_of
from graphsplit.cli.launch.cores import bind, cores_of, in_order


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "cores"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (5, 2, [[0, 1], [2, 3, 4]]),
        (3, 3, [[0], [1], [2]]),
        (2, 5, [[0], [0], [0], [1], [1]]),
        (1, 2, [[0], [0]]),
    ],
)
def test_cores_are_shared_out_in_the_order_of_ranks(
    num_cores: int, num_workers: int, cores: list[list[int]]
) -> None:
    shares = shares_of(range(7, 7 + num_workers))
    assert [cores_of(range(num_cores), shares[7 + n]) for n in range(num_workers)] == [
        range(one[0], one[-1] + 1) for one in cores
    ]


def test_two_threads_of_a_core_and_cores_of_a_package_stay_together(tmp_path: Path) -> None:
    """Eight processors: 0 to 3 and 4 to 7 are the same cores, and even ones are of package 0."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 2}\n")
        (topology / "core_id").write_text(f"{cpu % 4 // 2}\n")
    assert in_order(range(8), tmp_path) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert in_order({3, 1, 2}, tmp_path / "none") == [1, 2, 3]


def test_a_process_is_bound_and_one_that_has_ended_is_no_error() -> None:
    own = in_order(os.sched_getaffinity(0))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        bind(child.pid, (1, 2))
        assert os.sched_getaffinity(child.pid) == set(cores_of(own, (1, 2)))
        assert child.stdin is not None
        child.stdin.close()
    bind(child.pid, (0, 1))
