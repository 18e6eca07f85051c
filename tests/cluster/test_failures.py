from __future__ import annotations

from dataclasses import replace

import pytest

from graphsplit.cluster.scheduler.job.events import Connected, Disconnected, Interrupted, Malformed
from graphsplit.cluster.scheduler.job.state import JobPhase
from graphsplit.cluster.wire.messages import (
    STOPPED,
    Abort,
    CallMade,
    CallsMade,
    Departed,
    Failed,
    FailureNoted,
    Heartbeat,
    Leave,
    MeetingKind,
    Progress,
    StopSoon,
)
from graphsplit.failure import FailureCause, Location

RAISED = FailureCause("exception", "ValueError: no", rank=3, traceback="Traceback ...\n")


def aborts(scheduler, node):
    return [message for message in scheduler.sent.get(node, []) if isinstance(message, Abort)]


def in_call(name: str) -> Heartbeat:
    call = CallMade(name, f"train.py:{len(name)}", 5)
    return Heartbeat(5, "between steps", calls=CallsMade(1, 5, (call,), call))


def leave_all(scheduler, nodes=range(5)):
    for node in nodes:
        scheduler.feed(Disconnected(node))


def test_a_worker_whose_stream_breaks_is_named_everywhere_after_a_short_grace(drive):
    scheduler = drive().form()
    scheduler.say(3, Heartbeat(12, "step 12, microbatch 0, conv1"))
    scheduler.feed(Disconnected(3))
    scheduler.pass_time(0.2)
    assert aborts(scheduler, 0) == []
    scheduler.pass_time(0.2)

    for node in (0, 1, 2, 4):
        (abort,) = aborts(scheduler, node)
        cause = abort.cause
        assert (cause.kind, cause.rank, cause.host, cause.pid) == ("lost", 3, "host-3", 103)
        assert cause.position == "step 12, microbatch 0, conv1"
        assert "killed or crashed" in cause.message
    assert aborts(scheduler, 3) == []
    leave_all(scheduler, (0, 1, 2, 4))
    assert scheduler.exit.status == 1
    assert scheduler.exit.cause.rank == 3


@pytest.mark.parametrize("told", ["step 1, conv1", ""])
def test_a_loss_tells_how_far_another_worker_was_then(drive, told):
    scheduler = drive().form()
    scheduler.say(3, Heartbeat(1, told, location=Location(step=1)))
    scheduler.say(0, Heartbeat(1, "step 700", location=Location(step=700)))
    scheduler.feed(Disconnected(3))
    seen = FailureCause("lost", "worker 3 is gone", location=Location(step=912))
    scheduler.say(2, Failed(seen))
    scheduler.pass_time(0.4)
    cause = scheduler.last(1).cause
    then = "worker 2 was then in step 912"
    assert (cause.rank, cause.position) == (3, f"{told}; {then}" if told else then)


def test_a_loss_tells_of_no_other_worker_that_was_not_further(drive):
    scheduler = drive().form()
    scheduler.say(3, Heartbeat(1, "step 12", location=Location(step=12)))
    scheduler.say(0, Heartbeat(1, "step 12", location=Location(step=12)))
    scheduler.feed(Disconnected(3))
    scheduler.pass_time(0.4)
    assert scheduler.last(1).cause.position == "step 12"


def test_a_worker_that_leaves_without_finishing_is_lost_too(drive):
    scheduler = drive().form()
    scheduler.say(2, Leave())
    scheduler.feed(Disconnected(2))
    scheduler.pass_time(0.4)
    assert "left before the job was finished" in scheduler.last(0).cause.message


def test_a_report_ends_the_job_at_once_and_is_acknowledged(drive):
    scheduler = drive().form()
    scheduler.say(3, Heartbeat(1, "step 1"))
    scheduler.say(3, Failed(RAISED))
    assert scheduler.sent[3][0] == FailureNoted()
    for node in range(5):
        (abort,) = aborts(scheduler, node)
        assert (abort.cause.kind, abort.cause.rank) == ("exception", 3)
        assert abort.cause.traceback == "Traceback ...\n"
        assert abort.cause.position == "step 1"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_message_of_another_call_ends_the_job_with_both_calls(drive, is_late):
    scheduler = drive().form()
    for node in (0, 1, 2, 4):
        scheduler.say(node, in_call("train"))
    alone = replace(in_call("state_dict"), location=Location(waits_for=1))
    if not is_late:
        scheduler.say(0, alone)
    scheduler.say(1, Failed(FailureCause("exception", "FrameError: worker 0 sent no text")))
    if is_late:
        assert aborts(scheduler, 2) == []
        scheduler.say(3, in_call("train"))
        scheduler.say(0, alone)
    cause = scheduler.last(2).cause
    assert cause.kind == "disagreement"
    assert "worker 0 is in state_dict() at train.py:10" in cause.message
    assert "in train() at train.py:5" in cause.message


def test_a_failure_brings_the_calls_that_no_heartbeat_has_told_yet(drive):
    scheduler = drive().form()
    scheduler.say(0, replace(in_call("state_dict"), location=Location(waits_for=1)))
    odd = FailureCause("exception", "FrameError: worker 0 sent no text")
    scheduler.say(1, Failed(odd, in_call("train").calls))
    cause = scheduler.last(2).cause
    assert cause.kind == "disagreement"
    assert "worker 0 is in state_dict() at train.py:10" in cause.message
    assert "worker 1 is in train() at train.py:5" in cause.message


def test_a_message_that_nobody_explains_ends_the_job_with_what_was_read(drive):
    scheduler = drive().form()
    scheduler.say(1, Failed(FailureCause("exception", "FrameError: 3 bytes for a header")))
    scheduler.pass_time(1.2)
    assert aborts(scheduler, 2) == []
    scheduler.pass_time(0.2)
    assert scheduler.last(2).cause.message == "FrameError: 3 bytes for a header"


@pytest.mark.parametrize("is_past", [False, True])
def test_batches_that_differ_as_one_worker_is_in_another_call_are_no_fault_of_the_data(
    drive, is_past: bool
):
    """The other one need not wait: it may be at work behind that place."""
    scheduler = drive().form()
    odd = FailureCause("exception", "LoaderMismatchError: workers 0 and 1 were given other batches")
    train, predict = CallMade("train", "train.py:5", 1), CallMade("predict", "train.py:7", 5)
    scheduler.say(1, Failed(odd, CallsMade(2, 5, (train, predict), predict)))
    at_work = CallsMade(1, 6 if is_past else 5, (train,), train)
    scheduler.say(0, Heartbeat(6, "train step 6", calls=at_work))
    scheduler.pass_time(1.4)
    cause = scheduler.last(2).cause
    if is_past:
        assert cause.kind == "disagreement"
        assert "worker 1 is in predict() at train.py:7" in cause.message
        assert "worker 0 is in train() at train.py:5" in cause.message
    else:  # it may still come to that call
        assert cause.message == odd.message


def test_a_report_names_the_process_that_registered_not_the_one_it_claims(drive):
    scheduler = drive().form()
    claimed = FailureCause("exception", "boo", rank=0, host="innocent", pid=1, position="here")
    scheduler.say(3, Failed(claimed))
    cause = scheduler.last(0).cause
    assert (cause.rank, cause.host, cause.pid, cause.position) == (3, "host-3", 103, "here")


def test_a_report_beats_a_stream_that_broke_just_before(drive):
    scheduler = drive().form()
    scheduler.feed(Disconnected(1))
    scheduler.pass_time(0.2)
    scheduler.say(3, Failed(RAISED))
    assert scheduler.last(0).cause.kind == "exception"


def test_a_stream_that_breaks_after_its_report_does_not_hide_it(drive):
    scheduler = drive().form()
    scheduler.say(3, Failed(RAISED))
    scheduler.feed(Disconnected(3))
    scheduler.pass_time(1)
    assert [abort.cause.kind for abort in aborts(scheduler, 0)] == ["exception"]


def test_a_killed_worker_beats_what_its_peers_saw_of_it(drive):
    for order in ("peer first", "stream first"):
        scheduler = drive().form()
        seen = FailureCause("lost", "TransportError: worker 3 closed the link", rank=1)
        if order == "stream first":
            scheduler.feed(Disconnected(3))
        scheduler.say(1, Failed(seen))
        assert scheduler.last(1) == FailureNoted()
        if order == "peer first":
            scheduler.pass_time(0.8)  # a link may break well before anybody else knows why
            scheduler.feed(Disconnected(3))
        scheduler.pass_time(0.4)
        assert (scheduler.last(0).cause.rank, scheduler.last(0).cause.kind) == (3, "lost"), order


def test_what_a_peer_saw_is_the_cause_when_nothing_better_comes(drive):
    scheduler = drive().form()
    scheduler.say(1, Failed(FailureCause("timeout", "ReceiveTimeoutError: conv1", rank=1)))
    scheduler.pass_time(0.8)
    assert not aborts(scheduler, 0)
    scheduler.pass_time(0.4)
    assert (scheduler.last(0).cause.kind, scheduler.last(0).cause.rank) == ("timeout", 1)


def test_what_peers_saw_of_one_that_falls_silent_waits_for_its_loss(drive):
    scheduler = drive(num_workers=2, node_timeout_s=30).form()
    scheduler.pass_time(25)
    scheduler.say(0, Heartbeat(0, "step 0"))
    scheduler.say(0, Failed(FailureCause("lost", "TransportError: nothing came back", rank=0)))
    scheduler.pass_time(1.9)
    assert not aborts(scheduler, 0)
    scheduler.pass_time(0.6)
    cause = scheduler.last(0).cause
    assert (cause.kind, cause.rank) == ("lost", 1)


def test_failures_that_follow_the_abort_are_acknowledged_but_never_causes(drive):
    scheduler = drive().form()
    scheduler.say(3, Failed(RAISED))
    scheduler.say(1, Failed(FailureCause("exception", "secondary", rank=1)))
    scheduler.feed(Malformed(2, "secondary too"))
    scheduler.arrive(4, MeetingKind.BARRIER, "x")
    assert scheduler.last(1) == FailureNoted()
    leave_all(scheduler)
    assert scheduler.exit.cause.message == "ValueError: no"
    assert len(aborts(scheduler, 0)) == 1


def test_workers_that_do_not_leave_are_waited_for_only_so_long(drive):
    scheduler = drive().form()
    scheduler.say(3, Failed(RAISED))
    leave_all(scheduler, (0, 1, 3))
    scheduler.pass_time(4.8)
    assert scheduler.exit is None
    scheduler.pass_time(0.4)
    assert scheduler.exit.status == 1
    assert "workers 2, 4 did not leave in 5 s" in scheduler.log


def test_silence_is_a_loss_and_any_message_breaks_it(drive):
    scheduler = drive(num_workers=2, node_timeout_s=30).form()
    for _ in range(4):
        scheduler.pass_time(25)
        scheduler.say(0, Heartbeat(0, "step 0"))
        scheduler.say(1, Heartbeat(0, "step 0"))
    scheduler.pass_time(25)
    scheduler.say(0, Heartbeat(0))
    assert scheduler.state.job.phase is JobPhase.RUNNING
    scheduler.pass_time(5.6)
    cause = scheduler.last(0).cause
    assert (cause.kind, cause.rank) == ("lost", 1)
    assert "27 s (see MS_NODE_TIMEOUT)" in cause.message
    assert len([line for line in scheduler.log if "nothing was heard" in line]) == 1


@pytest.mark.parametrize(("node_timeout_s", "frozen_s"), [(30, 3600), (4, 4.5), (4, 2)])
def test_a_scheduler_that_was_frozen_itself_blames_nobody(drive, node_timeout_s, frozen_s):
    """However short: what the workers sent meanwhile is read after the clock."""
    scheduler = drive(num_workers=2, node_timeout_s=node_timeout_s).form()
    scheduler.pass_time(2)
    scheduler.pass_time(frozen_s, step_s=frozen_s)
    assert scheduler.state.job.phase is JobPhase.RUNNING
    scheduler.pass_time(node_timeout_s + 1)
    assert scheduler.state.job.phase is JobPhase.FAILED


def test_a_worker_is_told_the_progress_of_those_it_asks_for_and_nobody_else_is(drive):
    scheduler = drive(num_workers=3).form()
    scheduler.say(1, Heartbeat(5, "step 5"))
    assert scheduler.sent == {}
    scheduler.say(0, Heartbeat(0, "", watched=(1, 2, 77)))
    assert scheduler.sent == {0: [Progress({1: 5, 2: 0})]}


def test_progress_never_shrinks(drive):
    scheduler = drive(num_workers=2).form()
    scheduler.say(0, Heartbeat(9))
    scheduler.say(0, Heartbeat(4))
    scheduler.say(1, Heartbeat(0, watched=(0,)))
    assert scheduler.last(1) == Progress({0: 9})


def test_the_job_finishes_when_all_have_and_ends_when_all_have_left(drive):
    scheduler = drive().form()
    for node in range(4):
        scheduler.arrive(node, MeetingKind.FINISH)
    assert scheduler.sent == {}
    scheduler.arrive(4, MeetingKind.FINISH)
    assert scheduler.state.job.phase is JobPhase.DRAINING
    for node in range(5):
        assert scheduler.last(node) == Departed(MeetingKind.FINISH)
        scheduler.say(node, Leave())
    leave_all(scheduler)
    assert (scheduler.exit.status, scheduler.exit.cause) == (0, None)
    assert (scheduler.state.job.phase, scheduler.state.job.is_over) == (JobPhase.FINISHED, True)


def test_a_released_worker_that_lingers_does_not_keep_the_scheduler(drive):
    scheduler = drive(num_workers=2).form()
    for node in (0, 1):
        scheduler.arrive(node, MeetingKind.FINISH)
    scheduler.pass_time(5.2)
    assert scheduler.exit.status == 0


def test_a_worker_that_is_lost_at_the_finish_before_all_are_there_is_lost(drive):
    scheduler = drive(num_workers=3).form()
    scheduler.arrive(0, MeetingKind.FINISH)
    scheduler.arrive(1, MeetingKind.FINISH)
    scheduler.feed(Disconnected(1))
    scheduler.pass_time(1)
    [told] = aborts(scheduler, 0)
    assert (told.cause.rank, told.cause.kind) == (1, "lost")


def test_signals_end_the_job_with_the_usual_status(drive):
    for name, number, status in (("SIGINT", 2, 130), ("SIGTERM", 15, 143)):
        scheduler = drive(num_workers=2).form()
        scheduler.feed(Interrupted(name, number))
        cause = scheduler.last(1).cause
        assert (cause.kind, cause.message) == ("interrupted", f"the job was interrupted by {name}")
        leave_all(scheduler, (0, 1))
        assert scheduler.exit.status == status


def test_a_signal_before_any_worker_came_ends_the_scheduler_at_once(drive):
    scheduler = drive()
    scheduler.feed(Interrupted("SIGTERM", 15))
    assert scheduler.exit.status == 143


def test_a_second_signal_does_not_wait_for_anybody(drive):
    scheduler = drive().form()
    scheduler.feed(Interrupted("SIGINT", 2))
    assert scheduler.exit is None
    scheduler.feed(Interrupted("SIGINT", 2))
    assert scheduler.exit.status == 130


def test_a_worker_that_was_interrupted_gives_the_status_of_an_interrupt(drive):
    scheduler = drive(num_workers=2).form()
    scheduler.say(1, Failed(FailureCause("interrupted", "KeyboardInterrupt", rank=1)))
    leave_all(scheduler, (0, 1))
    assert scheduler.exit.status == 130


def test_a_worker_that_breaks_the_protocol_ends_the_job(drive):
    scheduler = drive().form()
    scheduler.feed(Malformed(2, "position has 9999 characters"))
    cause = scheduler.last(0).cause
    assert (cause.kind, cause.rank) == ("refused", 2)
    assert "it sent a malformed message: position has 9999 characters" in cause.message


def test_who_comes_while_the_job_ends_is_told_why_or_refused(drive, registration):
    scheduler = drive().form()
    scheduler.feed(Connected(77))
    scheduler.say(3, Failed(RAISED))
    scheduler.register(50, registration("late"))
    assert scheduler.last(50).cause.message == RAISED.message
    leave_all(scheduler)
    assert scheduler.refused[77] == "the job is ending"


def test_a_worker_that_was_asked_to_end_takes_all_with_it_in_order(drive):
    scheduler = drive(num_workers=2).form()
    scheduler.say(1, Heartbeat(7, "train step 3", location=Location(step=3), wants_stop=True))
    assert scheduler.last(0) == scheduler.last(1) == StopSoon()
    scheduler.sent.clear()
    scheduler.say(1, Heartbeat(8, "train step 3", location=Location(step=3), wants_stop=True))
    assert scheduler.sent == {}
    assert "worker 1 was asked to end: all workers leave when their step is done" in scheduler.log
    for node in (0, 1):
        scheduler.arrive(node, MeetingKind.FINISH, STOPPED)
        scheduler.say(node, Leave())
    leave_all(scheduler, (0, 1))
    assert (scheduler.exit.status, scheduler.exit.cause) == (143, None)
    assert "all workers have stopped in order" in scheduler.log


def test_sigterm_ends_a_job_in_order_once_it_has_begun_and_at_once_when_it_comes_again(drive):
    scheduler = drive(num_workers=2).form()
    scheduler.say(0, Heartbeat(7, "train step 3", location=Location(step=3)))
    scheduler.feed(Interrupted("SIGTERM", 15))
    assert scheduler.last(0) == scheduler.last(1) == StopSoon()
    assert scheduler.state.job.phase is JobPhase.RUNNING
    scheduler.feed(Interrupted("SIGTERM", 15))
    assert scheduler.last(0).cause.message == "the job was interrupted by SIGTERM"
    leave_all(scheduler, (0, 1))
    assert scheduler.exit.status == 143


def test_a_job_that_finishes_before_it_can_stop_has_finished(drive):
    scheduler = drive(num_workers=1).form()
    scheduler.say(0, Heartbeat(7, "train step 3", location=Location(step=3)))
    scheduler.feed(Interrupted("SIGTERM", 15))
    scheduler.arrive(0, MeetingKind.FINISH)
    scheduler.say(0, Leave())
    leave_all(scheduler, (0,))
    assert scheduler.exit.status == 0


def test_an_interrupt_from_the_keyboard_never_waits_for_a_step(drive):
    scheduler = drive(num_workers=1).form()
    scheduler.say(0, Heartbeat(7, "train step 3", location=Location(step=3)))
    scheduler.feed(Interrupted("SIGINT", 2))
    assert scheduler.last(0).cause.kind == "interrupted"
