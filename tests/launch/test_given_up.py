"""Processes that the job gave up: which the launcher ends, and what it says of them. Pure."""

from __future__ import annotations

from graphsplit.cli.launch.ending import JobEnding
from graphsplit.cli.launch.scheduler_line import SchedulerLine
from graphsplit.cli.launch.verdict import verdict
from graphsplit.launcher_line import Beat, Over
from graphsplit.reports import EndReport

NAMES = {"scheduler", "worker 0", "worker 1"}
WHY = "nothing was heard from it for 3 s (see MS_NODE_TIMEOUT)"


def test_a_frozen_worker_is_ended_and_started_again_where_it_may_be() -> None:
    ending = JobEnding(set(NAMES), restarts=1)
    assert ending.give_up("worker 1", WHY, is_final=False)
    assert not ending.give_up("worker 1", WHY, is_final=False), "once is enough"
    assert ending.exited("worker 1", returncode=-9, now_s=1.0)
    assert (ending.status, ending.given_up) == (0, {})


def test_a_frozen_worker_that_nobody_can_replace_may_still_come_back() -> None:
    ending = JobEnding(set(NAMES))
    assert not ending.give_up("worker 1", WHY, is_final=False)
    assert ending.give_up("worker 1", WHY, is_final=True)


def test_that_the_launcher_killed_it_is_not_the_root_cause() -> None:
    ending = JobEnding(set(NAMES))
    ending.give_up("worker 1", WHY, is_final=True)
    for name, code in (("worker 1", -9), ("worker 0", 1), ("scheduler", 1)):
        ending.exited(name, returncode=code, now_s=0.0)
    assert verdict(ending, {}).line == (f"graphsplit: worker 1 was given up: {WHY}; exit status 1")
    report = EndReport(f"worker 1 (host a, pid 3) was lost: {WHY}, so it is frozen", rank=1)
    assert verdict(ending, {"worker 1": report}).line.endswith("frozen; exit status 1")


def test_nothing_is_started_again_when_the_job_or_its_scheduler_is_over() -> None:
    ending = JobEnding(set(NAMES), restarts=5)
    ending.is_over = True
    assert not ending.exited("worker 1", returncode=-9, now_s=0.0)
    assert ending.status == 137
    ending = JobEnding(set(NAMES), restarts=5)
    ending.exited("scheduler", returncode=0, now_s=0.0)
    assert not ending.exited("worker 1", returncode=-9, now_s=0.0)


def test_a_scheduler_that_has_spoken_must_go_on_speaking() -> None:
    now = [0.0]
    line = SchedulerLine(lambda: now[0])
    with line.opened() as (_, theirs):
        assert line.silent_for() is None
        now[0] = 100.0
        assert (line.hear(), line.silent_for()) == ([], None), "it is still starting"
        theirs.send(Beat(3.0))
        theirs.send(Over())
        assert line.hear() == [Over()]
        now[0] = 102.9
        assert line.silent_for() is None
        now[0] = 103.0
        assert (line.deadline_s, line.silent_for()) == (103.0, 3.0)
        now[0] = 120.0
        assert line.silent_for() is None, "this process was frozen itself"
        assert (line.hear(), line.deadline_s) == ([], 123.0)
    with line.opened():
        assert line.deadline_s is None, "another life"
    line.close()
