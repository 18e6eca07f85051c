"""What a worker prints when an error leaves its script, and another worker had the same one."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphsplit.cluster.member.identity import failure_of
from graphsplit.errors import (
    FrameError,
    JobFailedError,
    LoaderMismatchError,
    PlanMismatchError,
)
from graphsplit.failure import AbortSignal
from graphsplit.job import endings, interrupts
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
    failures = SimpleNamespace(
        cause_of=lambda e: None if isinstance(e, JobFailedError) else cause_of(e, 1),
        report=reported.append,
        await_verdict=lambda timeout_s: None,
    )
    job: Any = SimpleNamespace(
        rank=1,
        member=SimpleNamespace(failures=failures),
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


def test_that_workers_disagree_is_told_whole_by_the_scheduler_and_worker_0(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    text = "workers 0 and 1 disagree\n  worker 0: a\n  worker 1: b"
    with caplog.at_level("ERROR", logger="graphsplit"):
        said, _ = told(PlanMismatchError(text), FailureCause("disagreement", text), capsys)
    assert "Traceback" not in said
    line = "worker 1 ended because workers 0 and 1 disagree; the scheduler's log has the whole"
    assert line in said + caplog.text


@pytest.mark.parametrize("kind", [FrameError, LoaderMismatchError])
def test_what_only_looked_like_another_error_is_not_told_beside_the_disagreement(
    kind: type[Exception], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    text = "the workers have made different calls"
    with caplog.at_level("ERROR", logger="graphsplit"):
        said, _ = told(kind("other batches"), FailureCause("disagreement", text), capsys)
    assert "Traceback" not in said and "other batches" not in said + caplog.text
    assert f"worker 1 ended because {text}" in said + caplog.text


def test_what_leaves_a_thread_is_printed_unless_the_main_thread_tells_it() -> None:
    printed: list[Any] = []
    known = ValueError("all know")
    job: Any = SimpleNamespace(has_reported=lambda error: error is known)
    hook = endings._hook_of_threads(job, printed.append)
    echo = JobFailedError("over", cause=FailureCause("lost", "lost: gone", rank=0))
    left = [SimpleNamespace(exc_value=error) for error in (known, echo, ValueError("a bug"))]
    for one in left:
        hook(one)
    assert printed == left[2:]


def test_a_cause_has_the_lines_that_led_to_an_error_which_the_script_goes_on_to_catch() -> None:
    def reports() -> FailureCause:
        try:
            raise ValueError("bad")
        except ValueError as error:
            return cause_of(error, 0)

    trace = reports().traceback
    assert trace.index("an_error_which_the_script_goes_on") < trace.index("in reports")
    assert trace.endswith("ValueError: bad\n")


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


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A job that has ended, and whose signals end what the main thread does."""
    abort = AbortSignal()
    abort.set(cause_of(ValueError("bad"), 0))
    found = SimpleNamespace(abort=abort, is_ending=False, ask_to_stop=lambda: False, printed=[])
    monkeypatch.setattr(sys, "unraisablehook", found.printed.append)
    numbers = (signal.SIGINT, signal.SIGTERM, interrupts.WAKE_SIGNAL)
    before = {number: signal.getsignal(number) for number in numbers if number is not None}
    try:
        interrupts.install_interrupts(found)
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


RAISED = [
    (interrupts.WAKE_SIGNAL, JobFailedError, "bad"),
    (signal.SIGINT, KeyboardInterrupt, "ended by SIGINT"),
    (signal.SIGTERM, KeyboardInterrupt, "ended by SIGTERM"),
]


@pytest.mark.parametrize(("number", "kind", "text"), RAISED)
def test_what_a_signal_raises_while_a_finalizer_runs_is_raised_after_it(
    job: Any, number: signal.Signals, kind: type[BaseException], text: str
) -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(number)
            job.printed.append("unreachable: the signal was raised right here")

    with pytest.raises(kind, match=text):
        Dying()
        time.sleep(30)
    assert not job.printed


@pytest.mark.parametrize(("number", "kind", "text"), RAISED)
def test_what_a_signal_raises_while_something_unraisable_is_told_is_raised_after_it(
    job: Any, number: signal.Signals, kind: type[BaseException], text: str
) -> None:
    def tell(lost: Any) -> None:
        signal.raise_signal(number)
        job.printed.append(lost)

    class Dying:
        def __del__(self) -> None:
            raise ValueError("a bug of the user's")

    sys.unraisablehook.__self__.previous = tell  # type: ignore[attr-defined]
    with pytest.raises(kind, match=text):
        Dying()
        time.sleep(30)
    assert len(job.printed) == 1


@pytest.mark.parametrize(("number", "kind", "text"), RAISED)
def test_nothing_is_raised_where_torch_has_called_python(
    job: Any,
    number: signal.Signals,
    kind: type[BaseException],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            signal.raise_signal(number)
            reached.append(func)
            return func(*args, **kwargs or {})

    monkeypatch.setattr(interrupts, "is_users", lambda file: False)  # as if it were torch's own
    reached: list[Any] = []
    with pytest.raises(kind, match=text):
        with Mode():
            torch.zeros(2)
        assert reached
        time.sleep(30)
    assert reached
