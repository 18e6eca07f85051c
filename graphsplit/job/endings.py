"""How a process of a job ends: what it prints, what it tells the others, and its exit status.

The root cause is printed whole once, by the process in which it happened: with the user's frames,
and without graphsplit's own unless ``GS_FULL_TRACEBACK`` is set. Every other process prints one
line that says who failed, where, and with what. What only follows from it is not printed.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from graphsplit import logs
from graphsplit.cluster.member.identity import bounded, failure_of
from graphsplit.cluster.scheduler.job.rules import EX_TEMPFAIL
from graphsplit.errors import JobFailedError, PlanMismatchError
from graphsplit.frames import line_now, line_of, shows_all, users_traceback, without_own_frames
from graphsplit.job.interrupts import install_interrupts
from graphsplit.job.job import WAKE_SIGNAL, Job
from graphsplit.reports import write_report
from graphsplit.root_cause import FailureCause
from graphsplit.settings import RESTART

_VERDICT_S = 0.5
_IN_THREAD = ", in _bootstrap_inner\n"
_LOG_OF_FAKES = logging.getLogger("torch._subclasses.fake_tensor")

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


class LastWords:
    """Python's hook for an error that leaves the script.

    Args:
        previous: The hook before. One that is not Python's own goes on printing errors.

    Attributes:
        job: The job that this process has joined; None in the scheduler, and before.
    """

    def __init__(self, previous: _Hook) -> None:
        self._previous = previous
        self.job: Job | None = None

    @staticmethod
    def of_python(hook: _Hook) -> _Hook:
        """The hook that was there before, if this is one of ours."""
        return hook._previous if isinstance(hook, LastWords) else hook

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Say what happened, tell the others, and leave."""
        job = self.job
        if job is not None:
            job.is_ending = True
        cause = self._cause(error)
        is_reported = job is not None and cause is not None and cause.kind == "exception"
        if is_reported and job is not None and cause is not None:
            # Several may find out the same at once; only the scheduler knows who was first.
            job.member.failures.report(cause)
            job.member.failures.await_verdict(_VERDICT_S)
        first = self._told_elsewhere(error, cause)
        if first is not None:
            tell_echo(job, first)
        elif self._previous is not sys.__excepthook__ and not isinstance(error, JobFailedError):
            self._previous(kind, error, trace)
        else:
            self._tell(error, cause)
        sys.stderr.flush()
        if cause is not None and first is None:
            write_report(os.environ, cause)
        if job is not None and not job.is_closed:
            if cause is not None and not is_reported:
                job.member.failures.report(cause)
            job.close()

    def _cause(self, error: BaseException) -> FailureCause | None:
        if self.job is not None:
            return self.job.member.failures.cause_of(error)
        return failure_of(error, rank=-1, host="", pid=0, position="")

    def _told_elsewhere(
        self, error: BaseException, cause: FailureCause | None
    ) -> FailureCause | None:
        """The root cause, if it is the very same error of another worker, which was first.

        What is wrong with a script is wrong on every worker, and several may find it at once. That
        they disagree is found by the scheduler, which tells it; worker 0 shows its line besides.
        """
        first = self.job.abort.cause if self.job is not None else None
        if cause is None or first is None or self.job is None or first.rank == self.job.rank:
            return None
        if first.kind == "disagreement" and cause.is_odd_message:
            return first  # it only looked like that
        if first.kind == "disagreement" and isinstance(error, PlanMismatchError):
            return first if self.job.rank != 0 else None
        mine = bounded(cause)
        return first if (first.kind, first.message) == (mine.kind, mine.message) else None

    def _tell(self, error: BaseException, cause: FailureCause | None) -> None:
        if isinstance(error, JobFailedError):
            tell_echo(self.job, error.cause)
            if self.job is not None and error.cause.stood_still(self.job.rank):
                _tell_whole(error, error.cause)  # it was woken where it stood
        elif isinstance(error, KeyboardInterrupt) and os.environ.get("MS_ROLE"):
            who = f"worker {self.job.rank}" if self.job is not None else "this process"
            where = line_of(error.__traceback__) if self.job is not None else "in gs.init()"
            line = f"{who} was interrupted: {str(error) or 'ended by SIGINT'}"
            line = f"{line}; {where}" if where else line
            logs.say(line, event="interrupted", level="error")
        else:
            _tell_whole(error, cause)


def _tell_whole(error: BaseException, cause: FailureCause | None) -> None:
    text = users_traceback(error, is_full=shows_all(os.environ))
    if logs.is_json(os.environ):
        kind = cause.kind if cause is not None else "exception"
        logs.say(text.rstrip(), event="failed", level="error", kind=kind)
    else:
        sys.stderr.write(text)


def tell_echo(job: Job | None, cause: FailureCause) -> None:
    """Say that this process ends because of what happened elsewhere."""
    me = f"worker {job.rank}" if job is not None else "this process"
    line = f"{me} ended because {cause.heard()}"
    if job is not None and cause.rank == job.rank and cause.traceback:
        # The script has caught the error itself, and went on: nobody has printed it yet.
        how = "in a thread" if _IN_THREAD in cause.traceback else "that the script caught"
        line = f"{me} ended because of an error {how}: {cause.headline}"
        trace = cause.traceback.rstrip()
        line = f"{line}\n{trace if shows_all(os.environ) else without_own_frames(trace)}"
    logs.say(line, event="ended", level="error", kind=cause.kind, cause_rank=cause.rank)
    write_report(os.environ, cause)


def install_last_words() -> LastWords:
    """Let errors that leave the script be told as this module says."""
    if isinstance(sys.excepthook, LastWords):
        return sys.excepthook
    hook = LastWords(sys.excepthook)
    sys.excepthook = hook
    return hook


def install_endings(job: Job, finalize: Callable[[], None]) -> None:
    """Say why this worker ends, whichever way it ends."""
    install_last_words().job = job
    _LOG_OF_FAKES.addFilter(_is_no_echo)
    # Handlers run in the opposite order: this one when the others are done.
    atexit.register(_exit_for_another_try, job)
    atexit.register(_finalize_at_exit, job, finalize)
    if threading.current_thread() is threading.main_thread():
        _forget_in_children(job)
        _tell_of_hard_exits(job)
        install_interrupts(job)
        threading.excepthook = _hook_of_threads(job, threading.excepthook)
    job.abort.add_waker(job.interrupt_main_thread)


def _forget_in_children(job: Job) -> None:
    """A process that the script forks is no worker: it ends as it would without graphsplit."""
    numbers = [signal.SIGTERM, signal.SIGINT, *([WAKE_SIGNAL] if WAKE_SIGNAL else [])]
    handlers = {number: signal.getsignal(number) for number in numbers}
    hooks = LastWords.of_python(sys.excepthook), sys.unraisablehook, threading.excepthook
    leave = os._exit
    is_worker = True

    def forget() -> None:
        nonlocal is_worker
        if not is_worker:
            return  # the child of a child: its parent may have handlers of its own
        is_worker = False
        job.forget()
        atexit.unregister(_finalize_at_exit)
        atexit.unregister(_exit_for_another_try)
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        sys.excepthook, sys.unraisablehook, threading.excepthook = hooks
        vars(os)["_exit"] = leave

    os.register_at_fork(after_in_child=forget)


def _tell_of_hard_exits(job: Job) -> None:
    """``os._exit`` runs no handler: let it tell first which line of the script has called it."""
    leave = os._exit

    def told(status: int) -> NoReturn:
        line = line_now(sys._getframe(1), most=2)
        if line and not job.is_ending:
            with suppress(Exception):  # it ends the process, whatever cannot be told
                job.member.tell_last(f"os._exit({status}) at {line}")
        leave(status)

    vars(os)["_exit"] = told


def _hook_of_threads(job: Job, previous: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Print what leaves a thread, but not what the main thread is told, and tells as it ends."""

    def hook(left: threading.ExceptHookArgs) -> None:
        error = left.exc_value
        if not isinstance(error, JobFailedError) and not job.has_reported(error):
            previous(left)

    return hook


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Torch logs whatever breaks off an operation of a capture; news of the job's end do, too."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, JobFailedError)


def _finalize_at_exit(job: Job, finalize: Callable[[], None]) -> None:
    """At exit nothing can catch an error any more; what ended the job is still told."""
    try:
        finalize()
    except JobFailedError as error:
        tell_echo(job, error.cause)


def _exit_for_another_try(job: Job) -> None:
    """The job failed, and is to be started again: say so by the status of this process.

    At exit Python's status is 1 already, and cannot be changed in another way.
    """
    cause = job.abort.cause
    if cause is None or not cause.is_retryable or job.recovery_policy != RESTART:
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EX_TEMPFAIL)
