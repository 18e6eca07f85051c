"""The scheduler's rules where a job goes on without the lost ones, under a fake clock."""

from __future__ import annotations

import pytest

from graphsplit.cluster.scheduler.job.events import Disconnected
from graphsplit.cluster.scheduler.job.state import JobPhase
from graphsplit.cluster.wire.messages import (
    Departed,
    Formed,
    Heartbeat,
    MeetingKind,
    Progress,
    Recovering,
    Rejoin,
    Resume,
    Started,
)

OFFER = {"grpc": "10.0.0.9:1"}


def lose(scheduler, node):
    scheduler.feed(Disconnected(node))
    scheduler.pass_time(0.4)


def offer(scheduler, *nodes):
    for node in nodes:
        scheduler.say(node, Rejoin(scheduler.state.job.generation.number, OFFER))


@pytest.fixture
def without_one(drive):
    """Three workers, of which worker 1 was lost; the others go on."""
    scheduler = drive(num_workers=3, recovery="go_on").form()
    lose(scheduler, 1)
    offer(scheduler, 0, 2)
    return scheduler


def test_those_who_are_left_are_numbered_without_gaps_and_told_the_ranks(without_one):
    for number, node in enumerate((0, 2)):
        formed = without_one.last(node)
        assert isinstance(formed, Formed)
        assert (formed.rank, [peer.rank for peer in formed.peers]) == (number, [0, 2])
    assert "going on with 2 of 3 workers, without workers 1" in "\n".join(without_one.log)
    without_one.answer_plan()
    assert without_one.state.job.phase is JobPhase.RUNNING


def test_they_meet_and_finish_alone(without_one):
    without_one.answer_plan()
    without_one.num_departed = 0
    for node in (0, 2):
        without_one.arrive(node, MeetingKind.BARRIER, "here")
    assert [type(without_one.last(node)) for node in (0, 2)] == [Departed, Departed]
    for node in (0, 2):
        without_one.arrive(node, MeetingKind.FINISH)
    assert without_one.state.job.phase is JobPhase.DRAINING


def test_progress_is_asked_for_and_told_by_the_numbers_of_the_generation(without_one):
    without_one.answer_plan()
    without_one.say(2, Heartbeat(7, ""))
    without_one.say(0, Heartbeat(1, "", watched=(1,)))
    assert without_one.last(0) == Progress({1: 7})


def test_who_comes_ends_the_generation_and_is_part_of_the_next(without_one, registration):
    without_one.answer_plan()
    without_one.register(11, registration("1", incarnation="second life"))
    told = without_one.last(0)
    assert isinstance(told, Recovering) and told.cause.kind == "joined"
    assert "has come, and is to take part" in told.cause.message
    offer(without_one, 0, 2)
    assert [peer.incarnation for peer in without_one.last(11).peers][1] == "second life"
    without_one.answer_plan()
    assert without_one.last(2) == Started(3)


def test_who_comes_before_the_others_run_is_taken_in_when_they_do(without_one, registration):
    without_one.register(11, registration("1", incarnation="second life"))
    assert without_one.state.job.phase is JobPhase.PLANNED
    without_one.answer_plan()
    assert without_one.state.job.phase is JobPhase.RECOVERING
    offer(without_one, 0, 2)
    assert len(without_one.last(0).peers) == 3


def test_who_is_back_too_late_is_refused(without_one, registration):
    late = Resume(job="ab" * 16, generation=1, rank=1, num_departed=0)
    without_one.register(21, registration("1", resume=late))
    assert "the job went on without it" in without_one.refused[21]


def test_who_is_back_in_time_has_its_rank_again(drive, registration):
    scheduler = drive(num_workers=3, recovery="go_on").form()
    lose(scheduler, 1)
    back = Resume(job="ab" * 16, generation=1, rank=1, num_departed=0)
    scheduler.register(21, registration("1", resume=back))
    offer(scheduler, 0, 2, 21)
    assert len(scheduler.last(21).peers) == 3


def test_one_after_the_other_may_be_lost_and_the_last_one_ends_the_job(without_one):
    without_one.answer_plan()
    lose(without_one, 0)
    offer(without_one, 2)
    assert (without_one.last(2).rank, len(without_one.last(2).peers)) == (0, 1)
    without_one.answer_plan()
    lose(without_one, 2)
    assert without_one.state.job.phase in (JobPhase.FAILED, JobPhase.FINISHED)


def test_those_who_come_again_and_again_are_no_reason_to_give_up(without_one, registration):
    without_one.answer_plan()
    for life in range(5):
        without_one.register(30 + life, registration("1", incarnation=f"life {life}"))
        offer(without_one, 0, 2)
        without_one.answer_plan()
        lose(without_one, 30 + life)
        offer(without_one, 0, 2)
        without_one.answer_plan()
    assert without_one.state.job.phase is JobPhase.RUNNING
