"""A child reports, and leaves no trace; one that does not report is an error, in time."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest
import torch

from graphsplit.optimizers.child_process import ChildError, ForkedTrial, raised_where


def report_of(work: Any, *, deadline_s: float = 30.0) -> Any:
    with ForkedTrial(work, deadline_s=deadline_s) as child:
        return child.report()


def test_a_child_reports_and_leaves_no_trace() -> None:
    kept = {"value": torch.zeros(3), "calls": 0}
    before = torch.get_rng_state(), random.getstate()

    def work() -> Any:
        kept["calls"] += 1  # type: ignore[operator]
        kept["value"].add_(torch.rand(3))  # type: ignore[union-attr]
        print("not to be seen")
        return [random.random(), kept["calls"]]

    first, second = report_of(work), report_of(work)
    assert first == second and first[1] == 1  # children draw alike
    assert kept["calls"] == 0 and torch.equal(kept["value"], torch.zeros(3))  # type: ignore[arg-type]
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


def test_a_long_report_comes_whole() -> None:
    assert report_of(lambda: list(range(300_000)))[-1] == 299_999


@pytest.mark.parametrize(
    "work",
    [
        lambda: os._exit(0),
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        lambda: lambda: None,  # nothing that can be pickled
    ],
)
def test_a_child_that_breaks_down_is_an_error(work: Any) -> None:
    with pytest.raises(ChildError, match="its process broke down"):
        report_of(work)


def test_a_child_that_does_not_end_is_ended() -> None:
    with pytest.raises(ChildError, match="it did not end in time"):
        report_of(signal.pause, deadline_s=0.1)


def test_a_child_nobody_waits_for_is_ended() -> None:
    with ForkedTrial(signal.pause, deadline_s=30.0):
        pass
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_system_without_fork_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(ChildError, match="no fork"):
        ForkedTrial(lambda: None, deadline_s=1.0)


def test_an_error_is_told_with_the_users_line() -> None:
    try:
        torch.stack([])
    except RuntimeError as error:
        text = raised_where(error)
    assert text.startswith("RuntimeError: stack expects a non-empty TensorList (")
    assert "test_child_process.py:" in text
