"""What the scheduler learns from the launcher, and what it tells it."""

from __future__ import annotations

import asyncio
import os

import pytest
from cluster_helpers import DEADLINE_S, wait_until

from graphsplit.cluster.member.member import Member
from graphsplit.cluster.scheduler.job.events import Disconnected, TellLauncher, Tick, ToldByLauncher
from graphsplit.cluster.scheduler.job.state import JobPhase
from graphsplit.cluster.scheduler.launcher import Launcher
from graphsplit.cluster.scheduler.sessions import Sessions
from graphsplit.cluster.wire.messages import (
    Abort,
    Heartbeat,
    Leave,
    MeetingKind,
    Recovering,
    Rejoin,
)
from graphsplit.errors import JobFailedError
from graphsplit.launcher_line import VARIABLE, Beat, Ended, GivenUp, Line, Over
from graphsplit.reports import VARIABLE as REPORT_FILE
from graphsplit.reports import read_report
from graphsplit.security.protection import Protection
from graphsplit.settings import ClusterSettings


@pytest.fixture
def given_up(drive):
    """A scheduler whose wishes to end a process are collected."""

    def make(**rules):
        scheduler = drive(**rules)
        scheduler.given_up = []
        feed = scheduler.feed

        def note(event):
            effects = feed(event)
            scheduler.given_up += [e.note for e in effects if isinstance(e, TellLauncher)]
            return effects

        scheduler.feed = note
        return scheduler

    return make


def ended(rank, *, how="was killed by SIGKILL", error="", pid=None):
    return ToldByLauncher(
        f"host-{rank}", Ended(rank, 100 + rank if pid is None else pid, how, error)
    )


def test_a_process_that_ends_before_it_registers_ends_the_job_and_is_named(drive, registration):
    scheduler = drive(num_workers=2)
    scheduler.register(0, registration("0"))
    scheduler.feed(ended(1))
    cause = scheduler.last(0).cause
    who = "worker 1 (host host-1, pid 101)"
    assert cause.summary() == f"{who} was lost: its process was killed by SIGKILL"


def test_those_who_come_later_are_told_too(drive, registration):
    scheduler = drive(num_workers=4)
    scheduler.register(0, registration("0"))
    scheduler.feed(ended(1))
    scheduler.feed(Disconnected(0))
    for node in (2, 3):
        assert scheduler.exit is None
        scheduler.register(node, registration(str(node)))
        assert scheduler.last(node).cause.rank == 1
    assert scheduler.exit.cause.rank == 1


def test_those_who_never_come_are_not_waited_for_long(drive):
    scheduler = drive(num_workers=3)
    scheduler.feed(ended(1))
    scheduler.pass_time(4.8)
    assert scheduler.exit is None
    scheduler.pass_time(0.4)
    assert scheduler.exit.status == 1


def test_those_who_end_on_their_way_are_not_waited_for(drive, registration):
    scheduler = drive(num_workers=4)
    scheduler.register(0, registration("0"))
    scheduler.feed(ended(1))
    scheduler.register(2, registration("2"))
    scheduler.feed(Disconnected(0))
    for rank in (0, 2):  # they were told
        scheduler.feed(ended(rank, how="ended with status 1"))
    assert scheduler.exit is None
    scheduler.feed(ended(3, how="was killed by SIGTERM"))
    assert scheduler.exit.cause.rank == 1


def test_what_it_left_as_its_reason_is_the_cause(drive, registration):
    scheduler = drive(num_workers=2)
    scheduler.register(0, registration("0"))
    scheduler.feed(ended(1, how="ended with status 1", error="ImportError: no module"))
    cause = scheduler.last(0).cause
    assert (cause.kind, cause.rank) == ("exception", 1)
    assert "worker 1 (host host-1, pid 101) failed: ImportError: no module" in cause.summary()


def test_nobody_waits_for_a_registered_worker_that_will_not_be_started_again(drive, registration):
    """Where lost workers may come back, its broken stream alone does not end the formation."""
    scheduler = drive(num_workers=3, recovery="wait_rejoin")
    for node in (0, 1):
        scheduler.register(node, registration(str(node)))
    scheduler.feed(Disconnected(1))
    assert scheduler.state.job.phase is JobPhase.FORMING
    scheduler.feed(ended(1))
    assert isinstance(scheduler.last(0), Abort)


def test_an_end_that_the_launcher_saw_is_a_loss_even_if_the_stream_says_nothing(drive):
    scheduler = drive(num_workers=2).form()
    scheduler.feed(ended(1))
    scheduler.pass_time(0.4)
    assert scheduler.last(0).cause.headline.endswith("was lost: its process was killed by SIGKILL")


@pytest.mark.parametrize("is_stream_first", [True, False])
def test_a_member_that_ended_for_what_it_alone_saw_is_lost_for_that(drive, is_stream_first):
    scheduler = drive(num_workers=2).form()
    told = [Disconnected(1), ended(1, how="ended with status 1", error="its link ended (why)")]
    for event in told if is_stream_first else reversed(told):
        scheduler.feed(event)
    scheduler.pass_time(0.4)
    lost = "was lost: its process ended with status 1: its link ended (why)"
    assert scheduler.last(0).cause.headline.endswith(lost)


def test_the_end_of_a_former_process_of_a_rank_means_nothing(drive):
    scheduler = drive(num_workers=2).form()
    scheduler.feed(ended(1, pid=99))
    scheduler.pass_time(1)
    assert scheduler.state.job.phase is JobPhase.RUNNING


def test_a_job_that_waits_for_a_process_that_will_not_come_ends(drive):
    scheduler = drive(num_workers=2, recovery="wait_rejoin").form()
    scheduler.feed(Disconnected(1))
    scheduler.pass_time(0.4)
    assert scheduler.state.job.phase is JobPhase.RECOVERING
    scheduler.feed(ended(1, pid=7))
    assert isinstance(scheduler.last(0), Abort)


@pytest.mark.parametrize("told", [[ended(1), Disconnected(1)], [Disconnected(1), ended(1)]])
def test_a_loss_that_nobody_makes_good_ends_a_job_that_would_recover(drive, told):
    scheduler = drive(num_workers=2, recovery="wait_rejoin").form()
    for event in told:
        scheduler.feed(event)
    scheduler.pass_time(0.4)
    assert isinstance(scheduler.last(0), Abort)
    told = scheduler.last(0).cause.headline
    assert told == "worker 1 (host host-1, pid 101) was lost: its process was killed by SIGKILL"


def test_a_frozen_worker_is_given_up_so_that_another_one_can_be_started(given_up):
    scheduler = given_up(num_workers=2, recovery="wait_rejoin", node_timeout_s=3).form()
    for _ in range(4):
        scheduler.say(0, Heartbeat(0))
        scheduler.pass_time(1)
    assert isinstance(scheduler.last(0), Recovering)
    why = "nothing was heard from it for 2 s (see MS_NODE_TIMEOUT)"
    assert scheduler.given_up == [GivenUp(1, 101, why)]
    scheduler.pass_time(1)
    assert len(scheduler.given_up) == 1


def test_a_worker_whose_stream_broke_may_come_back_for_as_long_as_one_that_is_silent(given_up):
    scheduler = given_up(num_workers=2, recovery="wait_rejoin", node_timeout_s=3).form()
    scheduler.feed(Disconnected(1))
    for _ in range(2):
        scheduler.say(0, Heartbeat(0))
        scheduler.pass_time(1)
    assert scheduler.given_up == []
    for _ in range(2):
        scheduler.say(0, Heartbeat(0))
        scheduler.pass_time(1)
    assert [one.pid for one in scheduler.given_up] == [101]


def test_a_process_that_begins_its_script_anew_is_not_given_up(given_up, registration):
    scheduler = given_up(num_workers=3, recovery="wait_rejoin", node_timeout_s=3).form()
    scheduler.feed(Disconnected(1))
    scheduler.pass_time(0.4)
    scheduler.say(0, Leave())
    scheduler.feed(Disconnected(0))
    for _ in range(4):
        scheduler.say(2, Heartbeat(0))
        scheduler.pass_time(1)
    scheduler.register(3, registration("0", incarnation="second life", pid=100))
    for _ in range(4):
        scheduler.say(2, Heartbeat(0))
        scheduler.say(3, Heartbeat(0))
        scheduler.pass_time(1)
    assert [one.pid for one in scheduler.given_up] == [101]


def test_a_worker_that_froze_before_there_was_a_plan_is_given_up(given_up, registration):
    scheduler = given_up(num_workers=2, recovery="wait_rejoin", node_timeout_s=3)
    scheduler.register(0, registration("0"))
    scheduler.pass_time(3.4)
    assert [one.pid for one in scheduler.given_up] == [100]
    scheduler.register(1, registration("0", incarnation="second life"))
    assert "is already held" not in str(scheduler.refused)


def test_nobody_waits_for_a_frozen_worker_when_the_job_has_failed(given_up):
    scheduler = given_up(num_workers=2, node_timeout_s=3).form()
    for _ in range(4):
        scheduler.say(0, Heartbeat(0))
        scheduler.pass_time(1)
    assert [(one.pid, one.is_final) for one in scheduler.given_up] == [(101, True)]
    scheduler.feed(Disconnected(0))
    assert scheduler.exit.cause.rank == 1


def test_a_worker_that_freezes_after_the_finish_is_given_up(given_up):
    scheduler = given_up(num_workers=2).form()
    for node in (0, 1):
        scheduler.arrive(node, MeetingKind.FINISH)
    assert scheduler.given_up == [Over()]
    scheduler.feed(Disconnected(0))
    scheduler.pass_time(5.2)
    assert [(one.pid, one.is_final) for one in scheduler.given_up[1:]] == [(101, True)]
    assert scheduler.exit.status == 0


def test_a_scheduler_that_raises_tells_everybody_and_the_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    monkeypatch.setenv(REPORT_FILE, str(tmp_path / "report"))
    settings = ClusterSettings("MS_SCHED", 1, "127.0.0.1", 0)

    async def break_down():
        sessions = Sessions(settings, Protection(), lambda *_, **__: None, Launcher(None, 1.0))
        outbox = sessions._outboxes.add(1, "life")

        def handle(*_):
            raise RuntimeError("a bug")

        sessions._state.handle = handle
        sessions.apply(Tick())
        with pytest.raises(RuntimeError, match="a bug"):
            await sessions.done
        return [await outbox.get() for _ in range(2)]

    told, end = asyncio.run(break_down())
    assert b"the scheduler failed: RuntimeError: a bug" in b"".join(told)
    assert end is None
    assert read_report(tmp_path / "report").headline == "the scheduler failed: RuntimeError: a bug"


def test_what_is_said_on_the_line_arrives_whole_and_the_rest_is_left_out():
    ours, theirs = Line.pair()
    notes = [Ended(1, 17, "was killed by SIGKILL"), GivenUp(2, 18, "frozen", is_final=True)]
    ours.send(notes[0])
    ours._link.send(b'{"kind": "Line"}')
    ours._link.send(b"\xff[")
    ours.send(notes[1])
    assert list(theirs.read()) == notes
    ours.close()
    theirs.send(notes[0])
    theirs.close()


def test_nobody_waits_for_one_who_does_not_read():
    ours, theirs = Line.pair()
    for _ in range(10_000):
        ours.send(Ended(1, 17, "x" * 1000))
    assert next(theirs.read()).pid == 17
    ours.close()
    theirs.close()


def test_the_line_is_found_by_its_number():
    ours, theirs = Line.pair()
    found = Line.of({VARIABLE: str(os.dup(theirs.fileno()))})
    ours.send(GivenUp(0, 1, "why"))
    assert list(found.read()) == [GivenUp(0, 1, "why")]
    assert Line.of({}) is None
    with pytest.raises(ValueError):
        Line.of({VARIABLE: "x"})
    for one in (ours, theirs, found):
        one.close()


def test_a_worker_that_raises_while_it_waits_for_others_is_named_with_its_error(
    start_cluster, monkeypatch
):
    cluster = start_cluster(3)
    waits = Member._wait_running

    def wait(member, former):
        if member.settings.node_id == "1":
            raise RuntimeError("a bug")
        waits(member, former)

    monkeypatch.setattr(Member, "_wait_running", wait)
    first = cluster.submit(cluster.join, "0")
    wait_until(lambda: any("registered" in line for line in cluster.log), "worker 0 registers")
    with pytest.raises(RuntimeError, match="a bug"):
        cluster.join("1")
    with pytest.raises(JobFailedError) as told:
        first.result(DEADLINE_S)
    assert (told.value.cause.kind, told.value.cause.rank) == ("exception", 1)
    assert told.value.cause.message == "RuntimeError: a bug"
    assert cluster.wait_status() == 1


def test_a_scheduler_that_has_ended_may_take_long_to_go(start_cluster, monkeypatch):
    """Python takes seconds to tear down a large process on a busy machine, and beats no more."""
    ours, theirs = Line.pair()
    monkeypatch.setenv(VARIABLE, str(os.dup(theirs.fileno())))
    cluster = start_cluster(1, node_timeout_s=3)
    [one] = cluster.join_all("0")
    one.member.finish()
    one.member.close()
    assert cluster.wait_status() == 0
    *notes, last = ours.read()
    assert Over() in notes
    assert last == Beat(30)
    for end in (ours, theirs):
        end.close()


def test_the_launcher_is_told_which_ranks_nobody_held_at_the_finish(given_up):
    scheduler = given_up(num_workers=3, recovery="go_on").form()
    scheduler.feed(Disconnected(1))
    scheduler.pass_time(0.4)
    for node in (0, 2):
        scheduler.say(node, Rejoin(scheduler.state.job.generation.number, {"grpc": "10.0.0.9:1"}))
    scheduler.answer_plan()
    for node in (0, 2):
        scheduler.arrive(node, MeetingKind.FINISH)
    assert scheduler.given_up == [Over((1,))]
