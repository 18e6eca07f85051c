"""The launcher's last line."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from graphsplit.cli.launch.ending import JobEnding
from graphsplit.cli.launch.verdict import verdict
from graphsplit.reports import VARIABLE, EndReport, read_report, write_report
from graphsplit.root_cause import FailureCause, Location

RAISED = EndReport("worker 1 (host a, pid 3) failed: ValueError: no", "train.py:31", rank=1)
KILLED = EndReport("worker 1 (host a, pid 3) was lost: ...", "last reported: train step 3", rank=1)


def ended(*exits: tuple[str, int]) -> JobEnding:
    ending = JobEnding({name for name, _ in exits})
    for name, returncode in exits:
        ending.exited(name, returncode=returncode, now_s=0.0)
    return ending


def test_nothing_is_said_of_a_job_that_ended_well() -> None:
    assert verdict(ended(("worker 0", 0), ("scheduler", 0)), {}).line == ""


def test_the_root_cause_is_named_whoever_ends_first() -> None:
    ending = ended(("scheduler", 1), ("worker 0", 1), ("worker 1", 1))
    found = verdict(ending, {"scheduler": RAISED})
    assert found.status == 1
    assert found.line == (
        "graphsplit: worker 1 (host a, pid 3) failed: ValueError: no; train.py:31; exit status 1"
    )


def test_the_status_is_that_of_the_process_with_the_root_cause() -> None:
    ending = ended(("worker 0", 1), ("worker 1", -9), ("scheduler", 1))
    found = verdict(ending, {"scheduler": KILLED})
    assert found.status == 137
    assert found.line == (
        "graphsplit: worker 1 was killed by SIGKILL; last reported: train step 3; exit status 137"
    )


def test_a_scheduler_that_was_lost_is_named_though_its_echo_was_heard_first() -> None:
    ending = JobEnding({"scheduler", "worker 0", "worker 1"})
    ending.exited("worker 1", returncode=1, now_s=0.0)
    how = "was lost with its host a: its SSH connection has ended"
    for name in ("worker 0", "scheduler"):
        ending.exited(name, returncode=-1, now_s=0.1, how=how, has_place=False)
    found = verdict(ending, {"worker 1": EndReport("the connection to the scheduler is lost")})
    assert (found.line, found.rank) == (f"graphsplit: scheduler {how}; exit status 129", -1)


def test_a_process_that_fails_before_there_is_a_job_speaks_for_itself() -> None:
    own = EndReport("ConfigurationError: 2 environment variables are missing or malformed")
    found = verdict(ended(("worker 0", 1), ("scheduler", 143)), {"worker 0": own})
    assert found.line.startswith("graphsplit: ConfigurationError: 2 environment variables")
    assert verdict(ended(("worker 0", 7)), {}).line == (
        "graphsplit: worker 0 ended with status 7; exit status 7"
    )


def test_what_follows_an_interrupt_is_not_its_cause() -> None:
    ending = JobEnding({"worker 0", "scheduler"})
    ending.interrupted(signal.SIGINT, now_s=0.0)
    ending.due(0.0)
    ending.exited("worker 0", returncode=-2, now_s=0.1)
    ending.exited("scheduler", returncode=130, now_s=0.1)
    found = verdict(ending, {"scheduler": RAISED})
    assert (found.status, found.line) == (
        130,
        "graphsplit: interrupted by SIGINT; exit status 130",
    )


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "worker_1.json"
    at = Location(source="train.py:31")
    first = FailureCause("exception", "ValueError: no\nmore", 1, "a", 3, location=at)
    write_report({VARIABLE: str(path)}, first)
    write_report({VARIABLE: str(path)}, FailureCause("lost", "an echo"))
    assert read_report(path) == RAISED
    assert path.stat().st_mode & 0o077 == 0


def test_a_report_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    write_report({VARIABLE: str(tmp_path / "gone" / "x")}, FailureCause("lost", "x"))
    write_report({}, FailureCause("lost", "x"))


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"headline": 1}), "\x00\xff"])
def test_a_file_that_is_no_report_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report"
    path.write_text(text)
    assert read_report(path) is None
    assert read_report(tmp_path / "missing") is None
