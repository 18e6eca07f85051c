"""A stall becomes a report: who waits for whom, and who is at the end of every chain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphsplit.cluster.scheduler.decisions import view
from graphsplit.cluster.status.job_status import JobStatus, WorkerStatus
from graphsplit.cluster.status.watchdog import Watchdog, stall_report, standing_still
from graphsplit.cluster.wire.messages import Failed, Heartbeat, MeetingKind
from graphsplit.failure import FailureCause
from graphsplit.root_cause import Location


def status_of(*workers: WorkerStatus) -> JobStatus:
    return JobStatus("ab" * 16, "running", 1, len(workers), workers=workers)


def waiting(rank: int, peer: int, what: str) -> WorkerStatus:
    at = Location(step=3, edge=7, waits_for=peer, waits_what=what)
    return WorkerStatus(rank, str(rank), "host", 100 + rank, location=at, position="train step 3")


def busy(rank: int, source: str = "train.py:31, in load") -> WorkerStatus:
    at = Location(step=2, source=source)
    position = "between steps, after step 2"
    return WorkerStatus(rank, str(rank), "host", 100 + rank, location=at, position=position)


def arrived(rank: int) -> WorkerStatus:
    return WorkerStatus(rank, str(rank), "host", 100 + rank, meets_at="the barrier 'barrier 1'")


STALLS = {
    "a chain that ends in the script": status_of(
        waiting(0, 1, "relu (conv1): worker 1 -> worker 0 (plan 0, edge 7)"),
        waiting(1, 2, "step tickets: worker 2 -> worker 1"),
        busy(2),
    ),
    "a circle": status_of(waiting(0, 1, "a"), waiting(1, 2, "b"), waiting(2, 0, "c")),
    "two ends of a channel": status_of(waiting(0, 1, "a"), waiting(1, 0, "a")),
    "two that lead to the same": status_of(
        waiting(0, 2, "a"), waiting(1, 0, "b"), waiting(3, 0, "d"), busy(2)
    ),
    "a barrier that two did not come to": status_of(arrived(0), busy(1), arrived(2), busy(3)),
    "one that waits for itself alone": status_of(busy(0, source="")),
    "a peer that is gone": status_of(waiting(0, 1, "a")),
}


def test_who_waits_for_whom(golden):
    parts = [f"# {name}\n{stall_report(stall, 60)}\n" for name, stall in STALLS.items()]
    golden("stalls.txt", "\n".join(parts))


def test_who_stands_still_is_at_the_end_of_the_chain_and_in_no_circle():
    found = {name: [standing_still(s, one.rank) for one in s.workers] for name, s in STALLS.items()}
    assert found["a chain that ends in the script"] == [2, 2, None]
    assert found["two that lead to the same"] == [2, 2, 2, None]
    assert set(found["a circle"] + found["a peer that is gone"]) == {None}


def test_a_report_of_many_workers_stays_short():
    chains = status_of(*(waiting(rank, 999, "x") for rank in range(900)), busy(999))
    assert len(stall_report(chains, 60).splitlines()) < 40
    line = status_of(*(waiting(rank, rank + 1, "x") for rank in range(900)), busy(900))
    assert len(stall_report(line, 60).splitlines()) < 200


def test_reports_become_rarer_and_begin_anew_after_progress():
    dog = Watchdog(300)
    due = [second for second in range(1, 1000) if dog.is_due(second)]
    assert due == [20, 40, 80, 160, 320, 640]
    assert not dog.is_due(1)
    assert dog.is_due(20)
    assert Watchdog(5).is_due(1)


def test_the_scheduler_reports_a_stall_well_before_waits_end(drive):
    scheduler = drive(num_workers=2, receive_timeout_s=300, node_timeout_s=1000).form()
    at = Location(step=3, edge=7, waits_for=1, waits_what="relu: worker 1 -> worker 0")
    scheduler.say(0, Heartbeat(5, "train step 3, RECEIVE mb0 edge7", location=at))
    scheduler.say(1, Heartbeat(9, "train step 3, FORWARD mb0 seg0"))
    scheduler.pass_time(19)
    assert scheduler.log == []
    scheduler.pass_time(2)
    (report,) = scheduler.log
    assert report.splitlines() == [
        "nobody has made progress for 20 s",
        "  worker 0 waits for worker 1: relu: worker 1 -> worker 0",
        "    which is here: train step 3, FORWARD mb0 seg0",
    ]
    scheduler.say(1, Heartbeat(10, "train step 3, FORWARD mb0 seg1"))
    scheduler.pass_time(15)
    assert len(scheduler.log) == 1
    scheduler.pass_time(6)
    assert len(scheduler.log) == 2


def test_at_the_timeout_the_chain_is_told_before_the_cause(drive):
    scheduler = drive(num_workers=2).form()
    at = Location(waits_for=1, waits_what="relu", source="train.py:9")
    scheduler.say(0, Heartbeat(5, "train step 3", location=at))
    late = FailureCause("timeout", "ReceiveTimeoutError: relu", rank=0, traceback="Traceback")
    scheduler.say(0, Failed(late))
    scheduler.pass_time(1)
    report, failed = scheduler.log
    assert "worker 0 waits for worker 1: relu" in report
    assert failed.startswith("the job failed: worker 1 (host host-1, pid 101): it made no progress")


def test_who_waits_is_told_of_the_progress_of_those_at_the_end_of_the_chain(drive):
    scheduler = drive(num_workers=4).form()
    told = []
    for progress in (7, 7, 8):
        scheduler.say(3, Heartbeat(progress, "saving"))
        scheduler.say(2, Heartbeat(1, "", location=Location(waits_for=3)))
        scheduler.say(1, Heartbeat(1, "", location=Location(waits_for=2)))
        scheduler.say(0, Heartbeat(0, "", watched=(1,)))
        told.append(scheduler.last(0).values[1])
    assert told[0] == told[1] < told[2]


def test_a_circle_makes_no_progress_and_neither_does_the_end_of_a_script(drive):
    scheduler = drive(num_workers=3).form()
    for rank, peer in ((0, 1), (1, 0)):
        scheduler.say(rank, Heartbeat(5, "", watched=(peer,), location=Location(waits_for=peer)))
    scheduler.say(0, Heartbeat(5, "", watched=(1,), location=Location(waits_for=1)))
    assert scheduler.last(0).values == {1: 10}
    scheduler.say(2, Heartbeat(1 << 62, ""))
    scheduler.arrive(2, MeetingKind.FINISH)
    scheduler.say(1, Heartbeat(5, "", location=Location(waits_for=2)))
    scheduler.say(0, Heartbeat(5, "", watched=(1, 2)))
    assert scheduler.last(0).values == {1: 5, 2: 1 << 62}


def awaiting_all(rank: int) -> WorkerStatus:
    return WorkerStatus(rank, str(rank), "host", 100 + rank, location=Location(waits_what="all"))


def test_who_waits_for_all_waits_for_those_who_do_not():
    status = status_of(awaiting_all(0), busy(1), awaiting_all(2))
    assert [status.waits_for(one) for one in status.workers] == [(1,), (), (1,)]
    assert standing_still(status, 0) == 1


@pytest.mark.parametrize("stuck", [True, False])
def test_a_wait_for_all_ends_when_nobody_has_gone_on_for_too_long(drive, stuck: bool):
    """Worker 1 is in the script for ever; or a snapshot is under way between the two for long."""
    scheduler = drive(num_workers=2, receive_timeout_s=30).form(host="alpha")
    for second in range(40):
        scheduler.say(0, Heartbeat(5, "", location=Location(waits_what="a snapshot")))
        at = Location(source="train.py:9, in on_train_end")
        scheduler.say(1, Heartbeat(5 if stuck else second // 20, "", location=at))
        scheduler.pass_time(1)
    failed = [line for line in scheduler.log if "the job failed" in line]
    assert bool(failed) is stuck
    if stuck:
        assert "worker 1 (host alpha, pid 101): it made no progress for 30 s" in failed[0]
        assert "train.py:9, in on_train_end" in failed[0]


def test_all_that_wait_for_each_other_and_do_not_go_on_end_too(drive):
    scheduler = drive(num_workers=2, receive_timeout_s=30).form(host="alpha")
    for _ in range(32):
        for rank in range(2):
            scheduler.say(rank, Heartbeat(5, "", location=Location(waits_what="a snapshot")))
        scheduler.pass_time(1)
    (failed,) = [line for line in scheduler.log if "the job failed" in line]
    assert "workers 0, 1 waited for a snapshot, and nobody made progress for 30 s" in failed


def test_who_waits_for_one_that_waits_for_all_is_told_of_their_progress(drive):
    scheduler = drive(num_workers=3).form()
    told = []
    for progress in (7, 8):
        scheduler.say(2, Heartbeat(progress, "writing"))
        scheduler.say(1, Heartbeat(1, "", location=Location(waits_what="a snapshot")))
        scheduler.say(0, Heartbeat(0, "", watched=(1,)))
        told.append(scheduler.last(0).values[1])
    assert told[0] < told[1]


def test_a_worker_that_has_finished_is_not_expected_to_make_progress(drive):
    scheduler = drive(num_workers=2, node_timeout_s=1000).form()
    scheduler.arrive(0, MeetingKind.FINISH)
    scheduler.pass_time(19)
    scheduler.say(1, Heartbeat(1, "saving"))
    scheduler.pass_time(19)
    assert scheduler.log == []


def circle(edge: int | None = None) -> list[Heartbeat]:
    waits = [(1, "values of gs.send: worker 1 -> worker 0"), (0, "step tickets: worker 0 -> 1")]
    places = [
        Location(source=f"train.py:{peer}, in f", edge=edge, waits_for=peer, waits_what=what)
        for peer, what in waits
    ]
    return [Heartbeat(5, "between steps", location=place) for place in places]


@pytest.mark.parametrize("is_one_host", [True, False])
def test_workers_that_wait_for_each_other_in_a_circle_end_the_job(drive, is_one_host: bool):
    scheduler = drive(num_workers=2).form(**({"host": "alpha"} if is_one_host else {}))
    seconds, told = 0, ""
    while not told and seconds < 60:
        seconds += 1
        for rank, beat in enumerate(circle()):
            scheduler.say(rank, beat)
        scheduler.pass_time(1)
        told = next((line for line in scheduler.log if "the job failed" in line), "")
    assert 8 <= seconds <= 10 if is_one_host else 27 < seconds < 40, "a link may be down till then"
    assert (
        "in a circle, and none of them can go on: worker 0 waits for worker 1: values of gs.send: "
        "worker 1 -> worker 0, at train.py:1, in f; worker 1 waits for worker 0"
    ) in told


@pytest.mark.parametrize("why", ["a value under way", "a frozen worker", "two ends of a channel"])
def test_what_looks_like_a_circle_and_may_be_none_is_waited_for(drive, why: str):
    """One that has no credit yet to send, and the other that waits for what it will send, too."""
    scheduler = drive(num_workers=2, node_timeout_s=1000).form()
    beats = circle(edge=3 if why == "a value under way" else None)
    if why == "two ends of a channel":
        what = beats[0].location.waits_what
        beats[1] = replace(beats[1], location=replace(beats[1].location, waits_what=what))
    for _ in range(60):
        for rank, beat in enumerate(beats):
            if rank == 0 or why != "a frozen worker" or scheduler.now < 5:
                scheduler.say(rank, beat)
        scheduler.pass_time(1)
    assert not any("none of them can go on:" in line for line in scheduler.log)


def test_a_wait_that_has_just_begun_closes_no_circle(drive):
    """One captures for long; when it waits for the answer, the other's wait is old news."""
    scheduler = drive(num_workers=2).form(host="alpha")
    waits, stale = circle()
    for second in range(40):
        scheduler.say(1, stale)
        captures = replace(waits, location=Location(source="train.py:1, in f"))
        scheduler.say(0, waits if second % 20 == 19 else captures)
        scheduler.pass_time(1)
    assert not any("in a circle" in line for line in scheduler.log)


def test_whoever_has_just_come_to_a_meeting_closes_no_circle(drive):
    """It sent what the other one waits for first; the other one has yet to say that it came."""
    scheduler = drive(num_workers=2).form(host="alpha")
    _, waits = circle()
    for _ in range(12):
        scheduler.say(0, Heartbeat(5, "between steps", location=Location(source="train.py:1")))
        scheduler.say(1, waits)
        scheduler.pass_time(1)
    scheduler.arrive(0, MeetingKind.BARRIER, "barrier 1")
    scheduler.pass_time(1)
    assert not any("in a circle" in line for line in scheduler.log)
    for _ in range(9):
        scheduler.say(0, Heartbeat(5, "between steps"))
        scheduler.say(1, waits)
        scheduler.pass_time(1)
    assert any("in a circle" in line for line in scheduler.log), "now it has lasted"


def test_a_wait_for_the_same_worker_but_for_something_else_has_just_begun(drive):
    scheduler = drive(num_workers=2).form(host="alpha")
    waits, stale = circle()
    for second in range(40):
        scheduler.say(1, stale)
        at = replace(waits.location, waits_what=f"part {second // 6}")
        scheduler.say(0, replace(waits, location=at))
        scheduler.pass_time(1)
    assert not any("in a circle" in line for line in scheduler.log)


@pytest.mark.parametrize("step", [None, 4])
def test_what_a_job_is_doing_is_told(drive, step):
    scheduler = drive(num_workers=3).form()
    scheduler.now = 12.0
    scheduler.arrive(2, MeetingKind.BARRIER, "barrier 1")
    at = Location(step=step)
    scheduler.say(1, Heartbeat(41, "train step 4", location=at, training="epoch 1 of 2"))
    scheduler.now = 15.0
    status = view.status(scheduler.state.job, scheduler.now)
    assert (status.phase, status.generation, status.num_workers) == ("running", 1, 3)
    assert status.missing == []
    first, second, third = status.workers
    assert (second.progress, second.position, second.location.step) == (41, "train step 4", step)
    assert (second.training, first.training) == ("epoch 1 of 2", "")
    assert (second.heard_s, second.still_s, first.heard_s) == (3.0, 3.0, 15.0)
    assert third.meets_at == "the barrier 'barrier 1'"
    assert status.waits_for(third) == (0, 1)
    assert [worker.state for worker in status.workers] == ["running"] * 3
