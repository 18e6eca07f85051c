from __future__ import annotations

import pytest

from graphsplit.cluster.member.identity import ReportedPosition, failure_of
from graphsplit.cluster.member.state_machine import (
    BeginGeneration,
    EndJob,
    MemberPhase,
    MemberState,
    Say,
    ShowText,
    Tell,
)
from graphsplit.cluster.wire.messages import (
    Abort,
    Accepted,
    Arrive,
    Departed,
    FailureNoted,
    Formed,
    MeetingKind,
    Peer,
    Progress,
    Ready,
    Refused,
    Started,
    TextWanted,
)
from graphsplit.errors import (
    FrameError,
    JobFailedError,
    ReceiveTimeoutError,
    TransportError,
)
from graphsplit.failure import FailureCause

FORMED = Formed(0, "job", 1, 7, (Peer(0, "0", "life", "host", 1),), ("careful",))
CAUSE = FailureCause("exception", "no", rank=1)


@pytest.fixture
def running() -> MemberState:
    state = MemberState("10.0.0.1:8118")
    state.handle(Accepted("job"))
    state.handle(FORMED)
    state.handle(Started(1))
    return state


def test_a_worker_joins_waits_and_runs():
    state = MemberState("10.0.0.1:8118")
    assert state.phase is MemberPhase.JOINING
    assert state.handle(Accepted()) == []
    assert state.phase is MemberPhase.WAITING
    assert state.handle(FORMED) == [Tell(Ready(1)), Say("warning: careful")]
    assert (state.phase, state.formed) == (MemberPhase.READY, FORMED)
    assert state.handle(Started(1)) == [BeginGeneration(1)]
    assert (state.phase, state.generation) == (MemberPhase.RUNNING, 1)


def test_a_refusal_is_kept_and_what_follows_does_not_matter():
    state = MemberState("a")
    assert state.handle(Refused("no room")) == []
    assert (state.phase, state.refusal) == (MemberPhase.REFUSED, "no room")
    assert state.lose_stream("closed") == []


def test_a_refusal_of_a_running_worker_ends_the_job(running):
    (end,) = running.handle(Refused("malformed"))
    assert isinstance(end, EndJob)
    assert end.cause.kind == "refused"


def test_a_stream_that_ends_while_joining_is_only_a_failed_attempt():
    state = MemberState("a")
    assert state.lose_stream("refused") == []
    assert state.phase is MemberPhase.JOINING


@pytest.mark.parametrize("messages", [[Accepted()], [Accepted(), FORMED]])
def test_a_stream_that_ends_later_is_a_lost_scheduler(messages):
    state = MemberState("10.0.0.1:8118")
    for message in messages:
        state.handle(message)
    (end,) = state.lose_stream("UNAVAILABLE: Socket closed")
    assert end.cause.kind == "scheduler_lost"
    assert "10.0.0.1:8118 ended (UNAVAILABLE: Socket closed)" in end.cause.message
    assert state.phase is MemberPhase.FAILED


def test_an_abort_ends_the_job_once(running):
    assert running.handle(Abort(CAUSE)) == [EndJob(CAUSE)]
    assert running.handle(Abort(CAUSE)) == []
    assert running.lose_stream("closed") == []


def test_a_worker_leaves_a_place_when_told_and_is_finished_after_the_last(running):
    assert running.arrive(MeetingKind.BARRIER, "x") == Arrive(MeetingKind.BARRIER, "x", number=1)
    assert running.handle(Departed(MeetingKind.BARRIER, "x", 1)) == []
    assert running.waits_at is None
    assert running.arrive(MeetingKind.FINISH) == Arrive(MeetingKind.FINISH, number=2)
    running.handle(Departed(MeetingKind.BARRIER, "x", 1))  # once more
    assert running.waits_at is not None
    running.handle(Departed(MeetingKind.FINISH, number=2))
    assert running.phase is MemberPhase.FINISHED
    assert running.lose_stream("closed") == []


def test_being_let_go_from_where_one_does_not_wait_is_an_error(running):
    running.arrive(MeetingKind.BARRIER, "x")
    (end,) = running.handle(Departed(MeetingKind.BARRIER, "y"))
    assert "let us go from barrier 'y'" in end.cause.message


def test_progress_text_and_acknowledgement(running):
    assert 1 not in running.progress
    running.handle(Progress({0: 4, 1: 9}))
    assert running.progress == {0: 4, 1: 9}
    assert running.handle(TextWanted("plan")) == [ShowText("plan")]
    assert not running.is_failure_noted
    running.handle(FailureNoted())
    assert running.is_failure_noted


def test_a_position_that_cannot_be_told_is_empty_and_a_long_one_is_cut():
    position = ReportedPosition()
    assert position.text() == "before its first step"
    position.text_source = lambda: "x" * 5000 + "\ud800"
    assert len(position.text()) == 2000
    position.text_source = lambda: str(1 // 0)
    assert position.text() == ""


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("bad\nworse"), "exception", "ValueError: bad"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
        (TransportError("link"), "lost", "TransportError: link"),
        (ReceiveTimeoutError("late"), "timeout", "ReceiveTimeoutError: late"),
        (FrameError("odd"), "exception", "FrameError: odd"),
    ],
)
def test_an_error_becomes_a_failure_of_the_right_kind(error, kind, message):
    try:
        raise error
    except BaseException as caught:
        cause = failure_of(caught, rank=2, host="h", pid=9, position="step 1")
    assert cause is not None
    assert (cause.kind, cause.message) == (kind, message)
    assert (cause.rank, cause.host, cause.pid, cause.position) == (2, "h", 9, "step 1")
    assert "test_member_state.py" in cause.traceback


def test_an_error_that_only_echoes_the_end_of_the_job_is_no_failure():
    assert failure_of(JobFailedError("x"), rank=0, host="h", pid=1, position="") is None
