from __future__ import annotations

import pytest

from graphsplit.cluster.wire.fencing import FencingVerdict, StreamGuard
from graphsplit.cluster.wire.messages import Fence


def test_messages_in_order_are_taken():
    guard = StreamGuard()
    for number in range(1, 5):
        assert guard.check(Fence("job", 1, "life", number)) is FencingVerdict.TAKE


def test_a_message_that_comes_twice_is_dropped_however_late():
    guard = StreamGuard(Fence("job", 1, "life", 1))
    guard.check(Fence("job", 1, "life", 2))
    for number in (1, 2):
        assert guard.check(Fence("job", 1, "life", number)) is FencingVerdict.DROP
    assert guard.check(Fence("job", 1, "life", 3)) is FencingVerdict.TAKE


@pytest.mark.parametrize(
    ("fence", "why"),
    [
        (Fence("job", 1, "life", 3), "message 3 came after message 1"),
        (Fence("job", 1, "another life", 2), "of another process"),
        (Fence("other", 1, "life", 2), "a message of job 'other' came in job 'job'"),
    ],
)
def test_a_gap_or_a_stranger_breaks_the_stream(fence, why):
    guard = StreamGuard(Fence("job", 1, "life", 1))
    assert guard.check(fence) is FencingVerdict.BREAK
    assert why in guard.why_broken


def test_a_stream_begins_with_its_first_message():
    assert StreamGuard().check(Fence("job", 1, "life", 2)) is FencingVerdict.BREAK
    assert StreamGuard().check(Fence("job", 1, "life", 0)) is FencingVerdict.BREAK


def test_the_job_is_bound_as_soon_as_it_is_known():
    guard = StreamGuard(Fence("", 0, "life", 1))
    assert guard.check(Fence("job", 1, "life", 2)) is FencingVerdict.TAKE
    assert guard.check(Fence("", 1, "life", 3)) is FencingVerdict.BREAK
