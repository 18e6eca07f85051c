"""What a worker prints when an error leaves its script, and another worker had the same one."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from graphsplit.cluster.member.identity import failure_of
from graphsplit.errors import JobFailedError
from graphsplit.failure import AbortSignal
from graphsplit.job import endings
from graphsplit.job.endings import LastWords
from graphsplit.root_cause import FailureCause


def cause_of(error: BaseException, rank: int) -> FailureCause:
    cause = failure_of(error, rank=rank, host="h", pid=10 + rank, position="before the first step")
    assert cause is not None
    return cause


def told(
    error: Exception, first: FailureCause | None, capsys: pytest.CaptureFixture[str]
) -> tuple[str, list[FailureCause]]:
    """What worker 1 prints and reports, where the job has ended because of ``first``."""
    reported: list[FailureCause] = []
    member = SimpleNamespace(
        failure_of=lambda e: None if isinstance(e, JobFailedError) else cause_of(e, 1),
        report_failure=reported.append,
        await_verdict=lambda timeout_s: None,
    )
    job: Any = SimpleNamespace(
        rank=1,
        member=member,
        abort=SimpleNamespace(cause=first),
        is_closed=False,
        close=lambda: None,
    )
    words = LastWords(sys.__excepthook__)
    words.job = job
    try:
        raise error
    except Exception as raised:
        words(type(raised), raised, raised.__traceback__)
    return capsys.readouterr().err, reported


def test_the_same_error_of_two_workers_is_told_whole_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("ERROR", logger="graphsplit"):
        text, reported = told(ValueError("bad"), cause_of(ValueError("bad"), 0), capsys)
    assert "Traceback" not in text
    said = text + caplog.text  # pytest may catch it before it is printed
    assert "worker 1 ended because worker 0" in said
    assert "ValueError: bad" in said
    assert [cause.rank for cause in reported] == [1]


@pytest.mark.parametrize("first", [None, ValueError("worse"), KeyError("bad")])
def test_an_error_of_its_own_is_told_whole(
    first: Exception | None, capsys: pytest.CaptureFixture[str]
) -> None:
    cause = None if first is None else cause_of(first, 0)
    text, _ = told(ValueError("bad"), cause, capsys)
    assert text.count("Traceback (most recent call last)") == 1
    assert "ValueError: bad" in text


def test_its_own_error_that_ended_the_job_is_told_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, _ = told(ValueError("bad"), cause_of(ValueError("bad"), 1), capsys)
    assert "Traceback (most recent call last)" in text


def test_who_stood_still_shows_where(
    capsys: pytest.CaptureFixture[str],
) -> None:
    still = FailureCause("timeout", "it made no progress for 300 s", rank=1)
    text, reported = told(JobFailedError("the job has ended", cause=still), still, capsys)
    assert "test_last_words.py" in text and text.count("Traceback (most recent call last)") == 1
    assert reported == []
    other = FailureCause("timeout", "it made no progress for 300 s", rank=0)
    text, _ = told(JobFailedError("the job has ended", cause=other), other, capsys)
    assert "Traceback" not in text


def test_an_error_in_a_process_of_a_loader_is_told_in_its_own_words() -> None:
    raised = ValueError(
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
        'last):\n  File "x.py", line 6, in __getitem__\n    raise ValueError("sample 4 is broken")'
        "\nValueError: sample 4 is broken\n"
    )
    message = cause_of(raised, 0).message
    assert message == "ValueError: sample 4 is broken (in a process of the DataLoader)"


def test_the_end_of_the_job_that_comes_while_a_finalizer_runs_is_raised_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = endings.WAKE_SIGNAL
    assert number is not None
    main = threading.get_ident()
    abort, printed = AbortSignal(), []
    job: Any = SimpleNamespace(
        abort=abort,
        is_ending=False,
        interrupt_main_thread=lambda: signal.pthread_kill(main, number),
    )
    abort.set(cause_of(ValueError("bad"), 0))

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(number)
            printed.append("unreachable: the signal was raised right here")

    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        endings._raise_on(job, number)
        endings._raise_again_where_lost(job)
        with pytest.raises(JobFailedError, match="bad"):
            Dying()
            time.sleep(30)
    finally:
        signal.signal(number, before)
    assert not printed
