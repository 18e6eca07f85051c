from __future__ import annotations

import hashlib

from graphsplit.cluster.scheduler.job.events import Disconnected
from graphsplit.cluster.scheduler.job.state import JobPhase
from graphsplit.cluster.wire.messages import (
    Abort,
    Departed,
    Heartbeat,
    MeetingKind,
    Text,
    TextWanted,
)
from graphsplit.text import cut_middle, first_difference, split_lines


def barrier(name="epoch"):
    return (MeetingKind.BARRIER, name)


def agreement(text, name="plan 0"):
    return (MeetingKind.AGREEMENT, name, hashlib.sha256(text.encode()).hexdigest())


def test_a_barrier_opens_when_all_are_there_and_can_be_used_again(drive):
    scheduler = drive(num_workers=3).form()
    for number in (1, 2):
        scheduler.sent.clear()
        scheduler.arrive(2, *barrier())
        scheduler.arrive(0, *barrier())
        assert scheduler.sent == {}
        scheduler.arrive(1, *barrier())
        departed = Departed(MeetingKind.BARRIER, "epoch", number)
        assert [scheduler.last(node) for node in range(3)] == [departed] * 3


def test_workers_at_different_places_are_told_so_at_once(drive):
    scheduler = drive().form()
    scheduler.arrive(1, *barrier("a"))
    scheduler.arrive(4, *barrier("b"))
    cause = scheduler.last(0).cause
    assert cause.kind == "disagreement"
    assert "worker 1 at the barrier 'a', worker 4 at the barrier 'b'" in cause.message


def test_a_barrier_that_a_finished_worker_will_never_reach_is_an_error(drive):
    scheduler = drive().form()
    scheduler.arrive(1, MeetingKind.FINISH)
    scheduler.arrive(4, *barrier("b"))
    assert "worker 1 at the end of the job, worker 4 at the barrier 'b'" in (
        scheduler.last(2).cause.message
    )


def test_a_worker_cannot_arrive_twice_or_before_the_job_has_formed(drive, registration):
    scheduler = drive().form()
    scheduler.arrive(1, *barrier())
    scheduler.arrive(1, *barrier())  # says it again, on a new stream: counts once
    assert scheduler.state.job.phase is JobPhase.RUNNING
    scheduler.arrive(1, *barrier("other"))
    assert scheduler.last(1).cause.kind == "refused"
    assert "arrived at the barrier 'other' out of turn" in scheduler.last(1).cause.message

    early = drive()
    early.register(0, registration("0"))
    early.arrive(0, *barrier())
    assert early.last(0).cause.rank == 0


def test_equal_digests_agree_without_any_text(drive):
    scheduler = drive(num_workers=2).form()
    scheduler.arrive(0, *agreement("same"))
    scheduler.arrive(1, *agreement("same"))
    assert scheduler.sent == {
        0: [Departed(MeetingKind.AGREEMENT, "plan 0")],
        1: [Departed(MeetingKind.AGREEMENT, "plan 0")],
    }


def disagree(scheduler, texts):
    for rank, text in enumerate(texts):
        scheduler.arrive(rank, *agreement(text))


def test_different_digests_ask_rank_zero_and_the_first_that_differs(drive):
    scheduler = drive(num_workers=4).form()
    disagree(scheduler, ["a", "a", "b", "c"])
    assert scheduler.sent == {0: [TextWanted("plan 0")], 2: [TextWanted("plan 0")]}


def test_a_disagreement_shows_the_first_differing_line_of_both(drive):
    scheduler = drive(num_workers=3).form()
    disagree(scheduler, ["a\nb\nc", "a\nb\nc", "a\nB\nC"])
    scheduler.say(2, Text("plan 0", b"a\nB\nC"))
    assert scheduler.state.job.phase is JobPhase.RUNNING
    scheduler.say(0, Text("plan 0", b"a\nb\nc"))

    cause = scheduler.last(1).cause
    assert (cause.kind, cause.rank) == ("disagreement", -1)
    assert cause.message.splitlines()[:3] == [
        "workers 0 and 2 disagree about 'plan 0': line 2 is the first that differs",
        "  worker 0: b",
        "  worker 2: B",
    ]
    assert "Fix: " in cause.message
    for node in range(3):
        scheduler.feed(Disconnected(node))
    assert scheduler.exit.status == 1


def test_a_disagreement_beyond_the_limit_says_so(drive):
    scheduler = drive(num_workers=2).form()
    disagree(scheduler, ["x" * 10 + "1", "x" * 10 + "2"])
    for rank in (0, 1):
        scheduler.say(rank, Text("plan 0", b"x" * 10))
    assert "they differ beyond the first 10 bytes" in scheduler.last(0).cause.message


def test_a_disagreement_does_not_wait_for_ever_for_the_texts(drive):
    scheduler = drive(num_workers=2).form()
    disagree(scheduler, ["a", "b"])
    scheduler.say(0, Text("plan 0", b"a"))
    scheduler.pass_time(10.2)
    assert "could not be fetched in time" in scheduler.last(0).cause.message


def test_texts_that_nobody_asked_for_are_refused(drive):
    scheduler = drive(num_workers=2).form()
    scheduler.say(0, Text("plan 0", b"a"))
    assert "a text that nobody asked for" in scheduler.last(0).cause.message

    scheduler = drive(num_workers=3).form()
    disagree(scheduler, ["a", "b", "a"])
    scheduler.say(2, Text("plan 0", b"a"))
    assert scheduler.last(0).cause.rank == 2

    scheduler = drive(num_workers=2).form()
    disagree(scheduler, ["a", "b"])
    scheduler.say(0, Text("plan 0", b"a"))
    scheduler.say(0, Text("plan 0", b"a"))
    assert scheduler.last(1).cause.rank == 0


def test_a_barrier_waits_for_workers_that_make_progress_and_names_those_that_do_not(drive):
    scheduler = drive(num_workers=3, receive_timeout_s=60, node_timeout_s=1000).form()
    scheduler.arrive(0, *barrier())
    for progress in range(1, 5):
        scheduler.pass_time(50, step_s=1)
        scheduler.say(1, Heartbeat(progress, "step 3"))
    assert scheduler.state.job.phase is JobPhase.RUNNING
    scheduler.pass_time(62, step_s=1)

    cause = scheduler.last(0).cause
    assert (cause.kind, cause.rank, cause.position) == ("timeout", 1, "step 3")
    assert "workers 1, 2 did not come to the barrier 'epoch'" in cause.message
    assert "60 s (MS_RECEIVE_MSG_TIMEOUT)" in cause.message


def test_workers_at_the_end_wait_for_the_others_as_long_as_they_live(drive):
    scheduler = drive(num_workers=2, receive_timeout_s=60, node_timeout_s=10_000).form()
    scheduler.arrive(0, MeetingKind.FINISH)
    scheduler.pass_time(1000, step_s=1)
    assert scheduler.state.job.phase is JobPhase.RUNNING


def test_a_long_text_is_split_at_the_ends_of_lines():
    assert list(split_lines(b"ab\ncd\nef", 9)) == [(b"ab\ncd\nef", True)]
    assert list(split_lines(b"ab\ncd\nef", 7)) == [(b"ab\ncd\n", False), (b"ef", True)]
    assert list(split_lines(b"ab\ncd\n", 3)) == [(b"ab\n", False), (b"cd\n", True)]
    assert list(split_lines(b"abcd\nef", 3)) == [(b"abc", False), (b"d\n", False), (b"ef", True)]
    assert list(split_lines(b"", 3)) == [(b"", True)]


def test_the_first_difference_counts_lines_from_one_and_sees_a_shorter_text():
    assert first_difference("a\nb", "a\nb") is None
    assert first_difference("a\nb", "a\nc") == (2, "b", "c")
    assert first_difference("a", "a\nc") == (2, "<end of text>", "c")


def test_a_long_traceback_keeps_both_ends():
    text = "start" + "x" * 10_000 + "end"
    cut = cut_middle(text, 200)
    assert len(cut) <= 200
    assert cut.startswith("start")
    assert cut.endswith("end")
    assert "characters left out" in cut
    assert cut_middle("short", 200) == "short"


def test_an_abort_during_an_agreement_reaches_everyone_once(drive):
    scheduler = drive(num_workers=2).form()
    disagree(scheduler, ["a", "b"])
    for rank, text in enumerate((b"a", b"b")):
        scheduler.say(rank, Text("plan 0", text))
    for node in (0, 1):
        aborts = [message for message in scheduler.sent[node] if isinstance(message, Abort)]
        assert len(aborts) == 1
