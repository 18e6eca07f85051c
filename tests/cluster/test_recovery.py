"""The scheduler's rules about generations, through every transition, under a fake clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphsplit.cluster.member.state_machine import (
    EndGeneration,
    EndJob,
    MemberPhase,
    MemberState,
    Reconnect,
    Tell,
)
from graphsplit.cluster.scheduler.job import state as job_state
from graphsplit.cluster.scheduler.job.events import Connected, Disconnected, Received, Tick
from graphsplit.cluster.scheduler.job.image import JobImage
from graphsplit.cluster.scheduler.job.rules import JobIdentity
from graphsplit.cluster.scheduler.job.state import JobPhase
from graphsplit.cluster.scheduler.state_machine import SchedulerState
from graphsplit.cluster.wire.messages import (
    Abort,
    Accepted,
    Arrive,
    Departed,
    Failed,
    Formed,
    Heartbeat,
    MeetingKind,
    Peer,
    Ready,
    Recovering,
    Refused,
    Rejoin,
    Resume,
    Started,
)
from graphsplit.failure import FailureCause

OFFER = {"grpc": "10.0.0.9:1"}


@pytest.fixture
def recovering(drive):
    """Three workers, of which worker 2 was just lost."""
    scheduler = drive(num_workers=3, recovery="wait_rejoin", topo_timeout_s=60).form()
    scheduler.feed(Disconnected(2))
    scheduler.pass_time(0.4)
    return scheduler


def offer(scheduler, *nodes):
    for node in nodes:
        scheduler.say(node, Rejoin(scheduler.state.job.generation.number, OFFER))


def test_a_loss_ends_the_generation_for_the_survivors_and_names_the_cause(recovering):
    assert (recovering.state.job.phase, recovering.state.job.generation.number) == (
        JobPhase.RECOVERING,
        2,
    )
    for node in (0, 1):
        told = recovering.last(node)
        assert isinstance(told, Recovering)
        assert (told.generation, told.cause.rank, told.cause.kind) == (2, 2, "lost")
    assert 2 not in recovering.sent


def test_the_next_generation_runs_when_all_are_done_with_the_past(recovering, registration):
    recovering.register(12, registration("2", incarnation="second life"))
    assert recovering.last(12) == Accepted("ab" * 16, "wait_rejoin")
    offer(recovering, 0)
    assert recovering.state.job.phase is JobPhase.RECOVERING
    offer(recovering, 1)
    assert recovering.state.job.phase is JobPhase.PLANNED
    for node in (0, 1, 12):
        formed = recovering.last(node)
        assert (formed.generation, formed.seed) == (2, 4711)
        assert [peer.endpoints for peer in formed.peers[:2]] == [OFFER, OFFER]
        assert formed.peers[2].incarnation == "second life"
    recovering.answer_plan()
    assert recovering.state.job.phase is JobPhase.RUNNING
    assert recovering.last(12) == Started(2)


def test_any_free_rank_will_do_for_a_worker_without_a_number(recovering, registration):
    recovering.register(12, registration("helper"))
    offer(recovering, 0, 1)
    assert recovering.last(12).rank == 2


def test_a_rank_that_is_held_is_waited_for(drive, registration):
    scheduler = drive(num_workers=2, recovery="wait_rejoin").form()
    scheduler.register(11, registration("1", incarnation="second life"))
    assert 11 not in scheduler.refused
    scheduler.feed(Disconnected(1))
    scheduler.pass_time(0.4)
    offer(scheduler, 0)
    assert scheduler.last(11).peers[1].incarnation == "second life"


def test_of_two_that_wait_under_one_name_the_second_is_refused(drive, registration):
    scheduler = drive(num_workers=2, recovery="wait_rejoin").form()
    scheduler.register(11, registration("1", incarnation="second life"))
    scheduler.register(21, registration("1", incarnation="third life"))
    assert "another process with the name '1' waits already" in scheduler.refused[21]


def test_a_second_loss_is_waited_for_too(recovering, registration):
    offer(recovering, 0)
    recovering.feed(Disconnected(1))
    recovering.pass_time(0.4)
    assert (recovering.state.job.phase, recovering.state.job.generation.number) == (
        JobPhase.RECOVERING,
        2,
    )
    recovering.register(12, registration("2", incarnation="a"))
    assert recovering.state.job.phase is JobPhase.RECOVERING
    recovering.register(11, registration("1", incarnation="b"))
    assert recovering.state.job.phase is JobPhase.PLANNED


def test_a_loss_before_all_are_ready_tries_the_next_number(recovering, registration):
    recovering.register(12, registration("2", incarnation="a"))
    offer(recovering, 0, 1)
    recovering.say(0, Ready(2))
    recovering.feed(Disconnected(12))
    recovering.pass_time(0.4)
    assert (recovering.state.job.phase, recovering.state.job.generation.number) == (
        JobPhase.RECOVERING,
        3,
    )
    recovering.say(1, Ready(2), generation=2)
    assert recovering.state.job.phase is JobPhase.RECOVERING


def test_nobody_who_comes_back_in_time_ends_the_job_with_the_first_cause(recovering):
    offer(recovering, 0)
    for _ in range(3):
        recovering.pass_time(20.2)
        for node in (0, 1):
            recovering.say(node, Heartbeat(0))
    cause = recovering.last(0).cause
    assert isinstance(recovering.last(0), Abort)
    assert (cause.kind, cause.rank) == ("lost", 2)
    assert "could not recover within 60 s (MS_TOPO_TIMEOUT): nobody came for ranks 2" in (
        cause.message
    )
    assert "workers 1 did not leave the former generation" in cause.message


def test_messages_of_the_past_do_not_count(recovering, registration):
    past = Arrive(MeetingKind.BARRIER, "x")
    recovering.say(0, past, generation=1)
    recovering.say(0, Heartbeat(99, "step 99"), generation=1)
    recovering.say(0, Failed(FailureCause("lost", "TransportError: link", rank=0)), generation=1)
    recovering.pass_time(1)
    recovering.register(12, registration("2", incarnation="a"))
    offer(recovering, 0, 1)
    recovering.answer_plan()
    recovering.say(1, past, generation=1)
    assert (recovering.state.job.phase, recovering.state.job.generation.number) == (
        JobPhase.RUNNING,
        2,
    )
    for node in (0, 1, 12):
        recovering.say(node, Arrive(MeetingKind.BARRIER, "now"))
        assert recovering.exit is None
    assert recovering.last(0) == Departed(MeetingKind.BARRIER, "now")


def test_what_a_script_did_itself_ends_even_a_job_that_recovers(recovering):
    raised = FailureCause("exception", "ValueError: no", rank=1)
    recovering.say(1, Failed(raised), generation=1)
    assert recovering.last(0).cause.message == "ValueError: no"
    assert recovering.state.job.phase is JobPhase.FAILED


def test_a_frozen_worker_that_is_back_in_time_takes_its_rank_again(drive, registration):
    scheduler = drive(num_workers=2, recovery="wait_rejoin", node_timeout_s=10).form()
    scheduler.pass_time(7)
    scheduler.say(0, Heartbeat(1))
    scheduler.pass_time(1.6)
    assert scheduler.state.job.phase is JobPhase.RECOVERING
    assert scheduler.dropped == [1]
    resume = Resume("ab" * 16, generation=1, rank=1)
    scheduler.register(11, registration("1", resume=resume))
    assert scheduler.last(11).generation == 2
    offer(scheduler, 0, 11)
    assert scheduler.state.job.phase is JobPhase.PLANNED


def test_a_frozen_worker_that_is_back_too_late_is_refused(drive, registration):
    scheduler = drive(num_workers=2, recovery="wait_rejoin").form()
    scheduler.feed(Disconnected(1))
    scheduler.pass_time(0.4)
    scheduler.register(12, registration("1", incarnation="second life"))
    resume = Resume("ab" * 16, generation=1, rank=1)
    scheduler.register(11, registration("1", resume=resume))
    assert "was worker 1" in scheduler.refused[11]
    assert "is not expected any more" in scheduler.refused[11]


def test_a_worker_of_another_job_is_refused(drive, registration):
    scheduler = drive(num_workers=2, recovery="wait_rejoin").form()
    scheduler.feed(Disconnected(1))
    scheduler.register(11, registration("1", resume=Resume("cd" * 16, 1, 1)))
    assert "this scheduler serves another one" in scheduler.refused[11]


def test_a_stream_that_is_back_within_the_grace_disturbs_nobody(drive, registration):
    scheduler = drive(num_workers=2, recovery="wait_rejoin").form()
    scheduler.arrive(0, MeetingKind.BARRIER, "x")
    scheduler.feed(Disconnected(1))
    scheduler.register(11, registration("1", resume=Resume("ab" * 16, 1, 1)))
    scheduler.pass_time(1)
    assert (scheduler.state.job.phase, scheduler.state.job.generation.number) == (
        JobPhase.RUNNING,
        1,
    )
    scheduler.arrive(11, MeetingKind.BARRIER, "x")
    assert scheduler.last(11) == Departed(MeetingKind.BARRIER, "x")


def test_a_worker_that_missed_a_departure_is_let_go_when_it_arrives_again(drive, registration):
    scheduler = drive(num_workers=2, recovery="wait_rejoin").form()
    scheduler.arrive(1, MeetingKind.BARRIER, "x")
    scheduler.feed(Disconnected(1))
    scheduler.arrive(0, MeetingKind.BARRIER, "x")
    scheduler.register(11, registration("1", resume=Resume("ab" * 16, 1, 1)))
    scheduler.say(11, Arrive(MeetingKind.BARRIER, "x", number=1))
    assert scheduler.last(11) == Departed(MeetingKind.BARRIER, "x", 1)


def test_links_that_stay_broken_are_not_recovered_from_for_ever(drive):
    scheduler = drive(num_workers=2, recovery="wait_rejoin").form()
    broken = Failed(FailureCause("lost", "TransportError: worker 1 is not reached", rank=0))
    for generation in (2, 3, 4):
        scheduler.say(0, broken)
        scheduler.pass_time(1.2)
        assert (scheduler.state.job.phase, scheduler.state.job.generation.number) == (
            JobPhase.RECOVERING,
            generation,
        )
        offer(scheduler, 0, 1)
        scheduler.answer_plan()
    scheduler.say(0, broken)
    scheduler.pass_time(1.2)
    assert scheduler.state.job.phase is JobPhase.FAILED


def test_a_worker_that_is_lost_while_the_job_forms_may_come_again(drive, registration):
    scheduler = drive(num_workers=2, recovery="wait_rejoin")
    scheduler.register(0, registration("0"))
    scheduler.feed(Disconnected(0))
    scheduler.register(10, registration("0", incarnation="second life"))
    scheduler.register(1, registration("1"))
    assert scheduler.state.job.phase is JobPhase.PLANNED


def test_under_restart_only_what_may_go_well_asks_for_another_try(drive):
    scheduler = drive(num_workers=2, recovery="restart").form()
    scheduler.feed(Disconnected(1))
    scheduler.pass_time(0.4)
    scheduler.feed(Disconnected(0))
    assert scheduler.exit.status == 75

    scheduler = drive(num_workers=2, recovery="restart").form()
    scheduler.say(1, Failed(FailureCause("exception", "ValueError", rank=1)))
    scheduler.feed(Disconnected(0))
    scheduler.feed(Disconnected(1))
    assert scheduler.exit.status == 1


# The journal.


def test_every_change_of_state_is_written_before_it_is_told(drive, registration):
    scheduler = drive(num_workers=2, recovery="wait_rejoin", keeps_journal=True).form()
    assert [image.phase for image in scheduler.images] == ["planned", "running"]
    effects = scheduler.feed(Disconnected(1)) or scheduler.feed(Tick())
    scheduler.now += 0.4
    effects = scheduler.feed(Tick())
    names = [type(effect).__name__ for effect in effects]
    assert names.index("Persist") < names.index("Send")
    assert scheduler.images[-1].phase == "recovering"
    assert list(scheduler.images[-1].members) == [0]


def restored(scheduler, phase, **changes):
    image = replace(scheduler.images[-1], phase=phase, **changes)
    assert isinstance(image, JobImage)
    scheduler.state = SchedulerState.restored(scheduler.rules, image, scheduler.now)
    scheduler.state.open()
    scheduler.sent.clear()
    return scheduler


@pytest.mark.parametrize("phase", ["planned", "running", "failed"])
def test_a_job_started_again_that_lost_all_at_once_is_a_new_one(drive, registration, phase):
    """Its launcher was killed with all processes: the journal has a job that nobody ended."""
    cause = FailureCause("interrupted", "the job was interrupted by SIGTERM")
    scheduler = drive(num_workers=2, recovery="restart", keeps_journal=True).form()
    image = replace(scheduler.images[-1], phase=phase, cause=cause if phase == "failed" else None)
    following = JobIdentity("cd" * 16, 7)
    scheduler.state = SchedulerState.restored(scheduler.rules, image, scheduler.now, following)
    scheduler.state.open()
    scheduler.register(20, registration("0", incarnation="again-0", num_workers=2))
    assert (scheduler.state.job.phase, scheduler.state.job.identity.job) == (
        JobPhase.FORMING,
        "cd" * 16,
    )
    scheduler.register(21, registration("1", incarnation="again-1", num_workers=2))
    assert (scheduler.state.job.phase, scheduler.state.job.generation.number) == (
        JobPhase.PLANNED,
        1,
    )
    assert scheduler.images[-1].job == "cd" * 16
    come_back(scheduler, registration, 22, 0)
    assert "serves another one" in scheduler.refused[22]


def test_a_process_beside_a_job_whose_workers_came_back_is_refused(drive, registration):
    scheduler = drive(num_workers=2, recovery="restart", keeps_journal=True).form()
    following = JobIdentity("cd" * 16, 7)
    scheduler.state = SchedulerState.restored(
        scheduler.rules, scheduler.images[-1], scheduler.now, following
    )
    scheduler.state.open()
    come_back(scheduler, registration, 20, 0)
    scheduler.register(21, registration("0", incarnation="again-0", num_workers=2))
    assert "rank 0 is already held" in scheduler.refused[21]
    come_back(scheduler, registration, 22, 1)
    assert scheduler.state.job.phase is JobPhase.RUNNING


def come_back(scheduler, registration, node, rank, num_departed=0, generation=1):
    resume = Resume("ab" * 16, generation, rank, num_departed)
    scheduler.register(node, registration(str(rank), resume=resume))


def test_a_restored_scheduler_learns_from_its_workers_which_meetings_are_over(drive, registration):
    scheduler = restored(drive(num_workers=2, keeps_journal=True).form(), "running")
    come_back(scheduler, registration, 21, 1)
    scheduler.say(21, Arrive(MeetingKind.BARRIER, "x", number=1))
    assert scheduler.last(21) == Started(1)
    come_back(scheduler, registration, 20, 0, num_departed=1)
    assert scheduler.last(21) == Departed(MeetingKind.BARRIER, "x", 1)


def test_a_plan_that_never_ran_is_given_up_by_a_restored_scheduler(drive, registration):
    scheduler = restored(drive(num_workers=2, keeps_journal=True).form(), "planned")
    assert (scheduler.state.job.phase, scheduler.state.job.generation.number) == (
        JobPhase.RECOVERING,
        2,
    )
    come_back(scheduler, registration, 20, 0)
    assert scheduler.last(20).generation == 2
    come_back(scheduler, registration, 21, 1)
    offer(scheduler, 20, 21)
    assert scheduler.state.job.phase is JobPhase.PLANNED


@pytest.mark.parametrize("policy", ["fail_fast", "wait_rejoin"])
def test_who_does_not_come_back_to_a_restored_scheduler_is_lost(drive, registration, policy):
    job = drive(num_workers=2, keeps_journal=True, recovery=policy, node_timeout_s=10).form()
    scheduler = restored(job, "running")
    come_back(scheduler, registration, 20, 0)
    scheduler.pass_time(6)
    scheduler.say(20, Heartbeat(1))
    scheduler.pass_time(1.6)
    cause = scheduler.last(20).cause
    assert (cause.rank, cause.kind) == (1, "lost")
    assert "did not come back within 7 s" in cause.message
    is_over = scheduler.state.job.phase is JobPhase.FAILED
    assert is_over == (policy == "fail_fast")


def test_how_a_job_ended_is_told_by_a_restored_scheduler_too(drive, registration):
    cause = FailureCause("exception", "ValueError: no", rank=1)
    job = drive(num_workers=2, keeps_journal=True).form()
    scheduler = restored(job, "failed", cause=cause)
    come_back(scheduler, registration, 20, 0)
    assert scheduler.last(20) == Abort(cause)

    scheduler = restored(drive(num_workers=2, keeps_journal=True).form(), "draining")
    come_back(scheduler, registration, 20, 0, num_departed=3)
    scheduler.say(20, Arrive(MeetingKind.FINISH, number=4))
    assert scheduler.last(20) == Departed(MeetingKind.FINISH, number=4)


# A worker.

PEERS = (Peer(0, "0", "life", "host", 1),)
LOST = FailureCause("lost", "gone", rank=1)


@pytest.fixture
def member():
    state = MemberState("10.0.0.1:8118", {"grpc": "h:1"})
    state.handle(Accepted("job", "wait_rejoin"))
    state.handle(Formed(0, "job", 1, 7, PEERS))
    state.handle(Started(1))
    return state


def test_a_worker_leaves_its_generation_and_enters_the_next(member):
    member.arrive(MeetingKind.BARRIER, "x")
    assert member.handle(Recovering(2, LOST), 2) == [EndGeneration(LOST)]
    assert (member.phase, member.waits_at) == (MemberPhase.RECOVERING, None)
    assert member.offer(OFFER) == [Tell(Rejoin(2, OFFER))]
    assert member.handle(Formed(0, "job", 2, 7, PEERS), 2) == [Tell(Ready(2))]
    member.handle(Started(2), 2)
    assert (member.phase, member.generation, member.num_departed) == (MemberPhase.RUNNING, 2, 0)


def test_a_worker_that_had_not_begun_offers_itself_again_at_once(member):
    member.handle(Recovering(2, LOST), 2)
    member.offer(OFFER)
    assert member.handle(Recovering(3, LOST), 3) == [Tell(Rejoin(3, OFFER))]
    member.handle(Formed(0, "job", 3, 7, PEERS), 3)
    assert member.handle(Recovering(4, LOST), 4) == [Tell(Rejoin(4, OFFER))]
    assert member.phase is MemberPhase.REJOINING


def test_departures_and_plans_of_the_past_do_not_count(member):
    member.handle(Recovering(2, LOST), 2)
    member.offer(OFFER)
    assert member.handle(Formed(0, "job", 1, 7, PEERS), 1) == []
    member.handle(Formed(0, "job", 2, 7, PEERS), 2)
    assert member.handle(Started(1), 1) == []
    member.handle(Started(2), 2)
    member.arrive(MeetingKind.BARRIER, "x")
    assert member.handle(Departed(MeetingKind.BARRIER, "x", 1), 1) == []
    assert member.waits_at is not None


def test_a_worker_whose_stream_broke_says_where_it_stands(member, registration):
    arrival = member.arrive(MeetingKind.BARRIER, "x")
    assert member.lose_stream("closed") == [Reconnect("closed")]
    said = member.registration(registration("0"))
    assert said.resume == Resume("job", 1, 0, 0)
    assert said.endpoints == {"grpc": "h:1"}
    assert member.handle(Accepted("job", "wait_rejoin")) == [Tell(arrival)]


def test_a_job_that_fails_while_it_recovers_fails_for_good(member):
    member.handle(Recovering(2, LOST), 2)
    assert member.handle(Abort(LOST), 2) == [EndJob(LOST)]
    assert member.offer(OFFER) == []


def test_a_worker_that_is_not_expected_any_more_ends(member):
    member.lose_stream("closed")
    (end,) = member.handle(Refused("the job went on without it"))
    assert end.cause.kind == "refused"


def test_a_scheduler_that_does_not_come_back_is_given_up(member):
    member.lose_stream("closed")
    (end,) = member.lose_scheduler("closed; then: UNAVAILABLE")
    assert end.cause.kind == "scheduler_lost"


def test_connections_without_a_registration_are_forgotten(drive):
    scheduler = drive(num_workers=1)
    scheduler.feed(Connected(5))
    scheduler.feed(Received(5, Ready(1)))
    assert "before it was registered" in scheduler.refused[5]


def test_a_late_registration_does_not_count_after_its_worker_was_given_up(recovering, registration):
    new = registration("2", incarnation="second life", attempt=2)
    recovering.register(12, new)
    recovering.feed(Disconnected(12))
    recovering.pass_time(0.4)
    recovering.register(13, replace(new, attempt=1))
    assert "another stream since" in recovering.refused[13]


def test_a_worker_that_waits_for_a_rank_may_lose_its_stream(drive, registration):
    scheduler = drive(num_workers=3, recovery="wait_rejoin").form()
    new = registration("2", incarnation="second life")
    scheduler.register(12, new)
    scheduler.register(13, replace(new, attempt=2))
    assert (scheduler.refused, scheduler.dropped) == ({}, [12])
    scheduler.feed(Disconnected(12))
    scheduler.feed(Disconnected(2))
    scheduler.pass_time(0.4)
    offer(scheduler, 0, 1)
    assert scheduler.last(13).peers[2].incarnation == "second life"


def test_a_restored_scheduler_gives_a_vacant_rank_back_to_the_worker_that_had_it(
    drive, registration
):
    first = drive(num_workers=3, recovery="wait_rejoin", keeps_journal=True).form()
    first.feed(Disconnected(2))
    first.pass_time(0.4)
    second = drive(num_workers=3, recovery="wait_rejoin", keeps_journal=True)
    second.state = SchedulerState.restored(second.rules, first.images[-1], 0.0)
    second.register(12, registration("2", resume=Resume("ab" * 16, 1, 2)))
    assert isinstance(second.last(12), Recovering)
    second.register(10, registration("0", resume=Resume("ab" * 16, 1, 0)))
    second.register(11, registration("1", resume=Resume("ab" * 16, 1, 1)))
    offer(second, 10, 11, 12)
    assert [second.last(node).rank for node in (10, 11, 12)] == [0, 1, 2]


def test_lives_that_come_and_go_for_ever_take_no_memory(drive, registration, monkeypatch):
    monkeypatch.setattr(job_state, "MAX_LIVES", 10)
    scheduler = drive(num_workers=3, recovery="wait_rejoin").form()
    for life in range(30):
        scheduler.register(100 + life, registration("2", incarnation=f"life {life}"))
        scheduler.feed(Disconnected(100 + life))
    assert list(scheduler.state.job.candidates.attempts) == [
        f"life {life}" for life in range(20, 30)
    ]
