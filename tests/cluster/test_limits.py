"""Numbers that bound what a cluster does."""

from __future__ import annotations

import pytest

from graphsplit.cluster.wire.limits import BEATS_PER_SILENCE, MAX_BEATS_PER_S, heartbeat_interval_s


@pytest.mark.parametrize(
    ("silence_s", "num_workers", "expected_s"),
    [(28.0, 1, 1.0), (28.0, 500, 1.0), (28.0, 1000, 2.0), (28.0, 10_000, 7.0), (2.0, 1000, 0.5)],
)
def test_workers_of_a_large_job_beat_more_rarely_but_often_enough(
    silence_s: float, num_workers: int, expected_s: float
) -> None:
    interval_s = heartbeat_interval_s(silence_s, num_workers)
    assert interval_s == expected_s
    assert interval_s * BEATS_PER_SILENCE <= silence_s
    if interval_s * BEATS_PER_SILENCE < silence_s:
        assert num_workers / interval_s <= MAX_BEATS_PER_S
