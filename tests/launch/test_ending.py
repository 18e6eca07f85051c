from __future__ import annotations

import signal

import pytest

from graphsplit.cli.launch.ending import (
    EX_TIMEOUT,
    GRACE_S,
    SCHEDULER_LINGER_S,
    STOP_S,
    TERMINATE_S,
    JobEnding,
    describe,
    exit_status,
)


def make_ending() -> JobEnding:
    return JobEnding({"scheduler", "worker 0", "worker 1"})


def test_a_job_whose_processes_all_end_well_has_status_0_and_sends_no_signal() -> None:
    ending = make_ending()
    for name in ("worker 0", "worker 1", "scheduler"):
        ending.exited(name, returncode=0, now_s=1.0)
    assert (ending.status, ending.reason, ending.running) == (0, "", set())
    assert ending.due(2.0) is None


def test_the_first_failure_decides_the_status_and_the_others_get_a_grace() -> None:
    ending = make_ending()
    ending.exited("worker 1", returncode=7, now_s=10.0)
    ending.exited("worker 0", returncode=3, now_s=11.0)
    assert ending.status == 7
    assert ending.reason == "worker 1 ended with status 7"
    assert ending.due(10.0 + GRACE_S - 0.1) is None
    assert ending.due(10.0 + GRACE_S) is signal.SIGTERM
    assert ending.due(10.0 + GRACE_S) is None
    assert ending.due(10.0 + GRACE_S + TERMINATE_S) is signal.SIGKILL
    assert ending.next_s is None


def test_an_interrupt_is_forwarded_at_once_and_patience_ends() -> None:
    ending = make_ending()
    ending.interrupted(signal.SIGINT, now_s=0.0)
    assert ending.due(0.0) is signal.SIGINT
    assert ending.next_s == GRACE_S
    ending.exited("worker 0", returncode=-2, now_s=0.1)
    assert ending.due(GRACE_S) is signal.SIGTERM
    assert ending.due(GRACE_S + TERMINATE_S) is signal.SIGKILL
    assert ending.status == 130


def test_a_second_interrupt_does_not_wait() -> None:
    ending = make_ending()
    ending.interrupted(signal.SIGTERM, now_s=0.0)
    assert ending.due(0.0) is signal.SIGTERM
    assert ending.next_s == STOP_S
    ending.interrupted(signal.SIGTERM, now_s=1.0)
    assert ending.due(1.0) is signal.SIGTERM
    assert ending.next_s == 1.0 + TERMINATE_S
    assert ending.status == 143


def test_a_scheduler_that_outlives_its_workers_is_ended_and_is_a_failure() -> None:
    ending = make_ending()
    ending.exited("worker 0", returncode=0, now_s=0.0)
    ending.exited("worker 1", returncode=0, now_s=0.0)
    assert ending.due(SCHEDULER_LINGER_S) is signal.SIGTERM
    assert ending.status == 1
    assert "scheduler" in ending.reason


def test_a_scheduler_whose_last_worker_failed_has_the_short_grace() -> None:
    ending = make_ending()
    ending.exited("worker 0", returncode=0, now_s=0.0)
    ending.exited("worker 1", returncode=5, now_s=0.0)
    assert ending.due(GRACE_S) is signal.SIGTERM
    assert ending.status == 5


@pytest.mark.parametrize(
    ("returncode", "status", "words"),
    [(0, 0, "status 0"), (7, 7, "status 7"), (-9, 137, "SIGKILL"), (-63, 191, "signal 63")],
)
def test_a_death_by_signal_has_the_status_of_the_shell(
    returncode: int, status: int, words: str
) -> None:
    assert exit_status(returncode) == status
    assert words in describe(returncode)


def test_a_killed_worker_is_started_again_as_often_as_allowed() -> None:
    ending = JobEnding({"scheduler", "worker 0", "worker 1"}, restarts=2)
    assert ending.exited("worker 1", returncode=-9, now_s=1.0)
    assert ending.exited("worker 1", returncode=75, now_s=2.0)
    assert (ending.status, ending.running) == (0, {"scheduler", "worker 0", "worker 1"})
    assert ending.next_s is None
    assert not ending.exited("worker 1", returncode=-9, now_s=3.0)
    assert (ending.status, ending.reason) == (137, "worker 1 was killed by SIGKILL")


def test_a_worker_that_raised_or_was_ended_by_the_user_is_not_started_again() -> None:
    ending = JobEnding({"scheduler", "worker 0"}, restarts=5)
    assert not ending.exited("worker 0", returncode=1, now_s=1.0)
    assert ending.status == 1

    ending = JobEnding({"scheduler", "worker 0"}, restarts=5)
    ending.interrupted(signal.SIGINT, now_s=0.0)
    assert not ending.exited("worker 0", returncode=-2, now_s=1.0)


def test_a_scheduler_is_started_again_only_if_it_keeps_a_journal() -> None:
    ending = JobEnding({"scheduler", "worker 0"}, restarts=1)
    assert not ending.exited("scheduler", returncode=-9, now_s=1.0)
    ending = JobEnding({"scheduler", "worker 0"}, restarts=1, restarts_scheduler=True)
    assert ending.exited("scheduler", returncode=-9, now_s=1.0)


def test_a_status_that_asks_for_another_try_is_remembered() -> None:
    ending = make_ending()
    ending.exited("worker 1", returncode=-9, now_s=1.0)
    assert not ending.asks_for_another_try
    ending.exited("scheduler", returncode=75, now_s=1.2)
    assert ending.asks_for_another_try
    assert ending.status == 137


@pytest.mark.parametrize("lost_too", [None, "killed", "frozen"])
def test_a_scheduler_that_is_lost_cannot_ask_for_another_try(lost_too: str | None) -> None:
    ending = make_ending()
    if lost_too == "killed":
        ending.exited("worker 1", returncode=-9, now_s=1.0)
    if lost_too == "frozen":
        assert ending.give_up("scheduler", "nothing was heard from it", is_final=True)
    ending.exited("scheduler", returncode=-9, now_s=1.0)
    assert ending.asks_for_another_try and ending.status


@pytest.mark.parametrize("before", ["an error", "the end of the job", "Ctrl-C"])
def test_a_scheduler_that_is_killed_later_is_no_reason_for_another_try(before: str) -> None:
    ending = make_ending()
    if before == "an error":
        ending.exited("worker 1", returncode=1, now_s=1.0)
    elif before == "the end of the job":
        ending.over(())
    else:
        ending.interrupted(signal.SIGINT, now_s=1.0)
        assert ending.due(1.0) is signal.SIGINT
    ending.exited("scheduler", returncode=-9, now_s=9.0)
    assert not ending.asks_for_another_try


def test_what_takes_longer_than_it_may_is_ended_and_has_a_status_of_its_own() -> None:
    ending = make_ending()
    ending.expired(60.0, now_s=60.0)
    assert (ending.status, ending.reason) == (EX_TIMEOUT, "not over after 60 s")
    assert ending.due(60.0) is signal.SIGTERM
    assert ending.due(60.0 + TERMINATE_S) is signal.SIGKILL


def test_the_time_limit_does_not_change_what_an_interrupt_has_begun() -> None:
    ending = make_ending()
    ending.interrupted(signal.SIGINT, now_s=59.0)
    ending.expired(60.0, now_s=60.0)
    assert ending.status == 128 + signal.SIGINT


def test_a_job_goes_on_without_a_killed_worker_but_not_without_the_last_one() -> None:
    ending = JobEnding({"scheduler", "worker 0", "worker 1"}, goes_on=True)
    assert not ending.exited("worker 1", returncode=-9, now_s=1.0)
    assert (ending.status, ending.next_s, ending.running) == (0, None, {"scheduler", "worker 0"})
    ending.exited("worker 0", returncode=-9, now_s=2.0)
    assert (ending.status, ending.reason) == (137, "worker 0 was killed by SIGKILL")


def test_a_job_that_goes_on_ends_with_a_worker_that_raised() -> None:
    ending = JobEnding({"scheduler", "worker 0", "worker 1"}, goes_on=True)
    ending.exited("worker 1", returncode=1, now_s=1.0)
    assert ending.status == 1


def test_a_frozen_worker_that_the_job_went_on_without_is_ended() -> None:
    ending = JobEnding({"scheduler", "worker 0", "worker 1"}, goes_on=True)
    assert ending.give_up("worker 1", "nothing was heard from it", is_final=False)
    assert not ending.exited("worker 1", returncode=-9, now_s=1.0)
    assert ending.status == 0


def test_one_that_has_not_come_when_the_others_have_finished_is_ended() -> None:
    names = {"scheduler", "worker 0", "worker 1", "worker 2"}
    ending = JobEnding(names, goes_on=True, restarts=1)
    assert ending.exited("worker 1", returncode=-9, now_s=1.0)
    assert ending.over(["worker 1"]) == {"worker 1"}
    for name in ("worker 0", "worker 2"):
        ending.exited(name, returncode=0, now_s=2.0)
    assert not ending.exited("worker 1", returncode=-9, now_s=2.0)
    ending.exited("scheduler", returncode=0, now_s=2.0)
    assert ending.status == 0 and not ending.running


def test_one_that_was_out_of_reach_when_the_others_finished_is_no_failure() -> None:
    ending = JobEnding({"scheduler", "worker 0", "worker 1", "worker 2"}, goes_on=True)
    assert ending.give_up("worker 1", "nothing was heard from it", is_final=False)
    assert ending.over(["worker 1"]) == {"worker 1"}
    for name in ("worker 0", "worker 2", "scheduler"):
        ending.exited(name, returncode=0, now_s=2.0)
    ending.exited("worker 1", returncode=-1, now_s=9.0, how="was lost with its host b")
    assert ending.status == 0


def test_one_that_fails_when_the_job_is_over_has_failed() -> None:
    ending = JobEnding({"scheduler", "worker 0", "worker 1"}, goes_on=True)
    assert ending.over([]) == set()
    ending.exited("worker 1", returncode=3, now_s=1.0)
    assert ending.status == 3


def test_one_that_comes_when_the_others_have_finished_is_no_failure() -> None:
    ending = JobEnding({"scheduler", "worker 0", "worker 1"}, goes_on=True, restarts=1)
    assert ending.exited("worker 1", returncode=-9, now_s=1.0)
    ending.over(["worker 1"])
    ending.exited("worker 0", returncode=0, now_s=2.0)
    ending.exited("worker 1", returncode=1, now_s=2.0, how="was refused: the job is ending")
    assert ending.status == 0
