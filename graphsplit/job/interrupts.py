"""Signals that end what the main thread does: that the job is over, SIGTERM, SIGINT.

Where nothing can be raised, it is tried again a little later: in a finalizer, out of which Python
only prints what was raised, and where torch's C++ has called Python. A mode of torch's that is left
half entered there ends the process by ``terminate``, with sixty lines about frames in C++.
"""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

from graphsplit.errors import JobFailedError
from graphsplit.frames import is_users
from graphsplit.job.job import WAKE_SIGNAL, Job

_AGAIN_S = 0.05  # a finalizer, or an operation under a mode, is over by then
_MOST_TIMES = 40
_UNDER_A_MODE = ("__torch_dispatch__", "__torch_function__")
_MODES = ("torch/_subclasses/", "torch/utils/_python_dispatch.py")


def install_interrupts(job: Job) -> None:
    """Let signals end this worker with a reason. Called on the main thread.

    A child of a shell that runs in the background inherits SIGINT as ignored; here it must end the
    worker.
    """
    made = _Interrupts(job)
    if WAKE_SIGNAL is not None and signal.getsignal(WAKE_SIGNAL) in (signal.SIG_DFL, None):
        signal.signal(WAKE_SIGNAL, made.wake)
    made.previous, sys.unraisablehook = sys.unraisablehook, made.lost
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, made.terminate)
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, made.terminate)


class _Interrupts:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._times_left = _MOST_TIMES
        self._last = signal.SIGINT
        self.previous = sys.unraisablehook

    def wake(self, signum: int, frame: FrameType | None) -> None:
        # A job that recovers interrupts nothing: the next wait will find out.
        job = self._job
        if job.is_ending or job.abort.was_raised or job.abort.recovers:
            return
        if not self._is_postponed(signum, frame):
            job.abort.raise_if_set()

    def terminate(self, signum: int, frame: FrameType | None) -> None:
        """SIGTERM ends in order, when the step is done; a second one, or SIGINT, at once."""
        if signum == signal.SIGTERM and self._job.ask_to_stop():
            return
        if not self._is_postponed(signum, frame):
            self._last = signal.Signals(signum)
            raise KeyboardInterrupt(f"ended by {self._last.name}")

    def lost(self, lost: sys.UnraisableHookArgs) -> None:
        """Python would print it, and the script would go on as if nothing had been."""
        is_interrupt = isinstance(lost.exc_value, KeyboardInterrupt)
        if not is_interrupt and not isinstance(lost.exc_value, JobFailedError):
            self.previous(lost)
        elif not self._job.is_ending:
            if is_interrupt:
                _signal_again(self._last)
            elif WAKE_SIGNAL is not None:
                self._job.abort.was_raised = False
                _signal_again(WAKE_SIGNAL)

    def _is_postponed(self, signum: int, frame: FrameType | None) -> bool:
        if self._times_left == 0 or not (_is_under_a_mode(frame) or _is_in_hook(frame)):
            return False
        self._times_left -= 1
        _signal_again(signum)
        return True


def _is_under_a_mode(frame: FrameType | None) -> bool:
    """Whether torch's C++ waits for what Python does here, and no code of the user's runs."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if name in _UNDER_A_MODE or any(mode in file for mode in _MODES):
            return True
        frame = frame.f_back
    return False


def _is_in_hook(frame: FrameType | None) -> bool:
    """Whether Python is told of what could not be raised; it only prints what is raised there."""
    while frame is not None and frame.f_code is not _Interrupts.lost.__code__:
        frame = frame.f_back
    return frame is not None


def _signal_again(signum: int) -> None:
    again = threading.Timer(_AGAIN_S, _signal_main_thread, [signum])
    again.daemon = True
    again.start()


def _signal_main_thread(signum: int) -> None:
    with suppress(ProcessLookupError, ValueError):
        signal.pthread_kill(threading.main_thread().ident or 0, signum)
