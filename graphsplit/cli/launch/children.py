"""Starts processes that cannot outlive the launcher, and ends them with all their children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import IO

from graphsplit.cli.launch.environment import ChildSpec

_PR_SET_PDEATHSIG = 1


class Child:
    """A process that leads a group of its own: of this machine, where nothing else is said."""

    pid: int
    returncode: int | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    lost: str = ""
    """How it went out of reach, as a part of a sentence; empty for one whose end was seen."""

    @property
    def has_place(self) -> bool:
        """Whether there is a place where it could be started again."""
        return True

    @property
    def where(self) -> str:
        """Its host, as the end of a sentence; empty on this machine."""
        return ""

    def wait(self) -> int:
        """Wait for its end and return its return code; ``-N`` if signal N ended it."""
        raise NotImplementedError

    def signal_group(self, signum: signal.Signals) -> None:
        """Send a signal to it, which was not yet waited for, and to its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def collect_if_ended(self) -> int | None:
        """Its return code, if it has ended; then its children are ended, too."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, self.pid, options) is None:
            return None
        # While it is not yet waited for, its group's number cannot belong to anybody else.
        self.signal_group(signal.SIGKILL)
        return self.wait()


class StartedChild(subprocess.Popen[bytes], Child):
    """A process that this one has started by itself."""


class StartInterruptedError(Exception):
    """The job was asked to end while a process was being started: it was not."""


StartChild = Callable[[ChildSpec, Sequence[str], Sequence[int]], Child]


def start_child(spec: ChildSpec, command: Sequence[str], kept: Sequence[int]) -> StartedChild:
    """Start one process in a process group of its own, with pipes for its output.

    It keeps the open files with the numbers in ``kept``, and no others.

    A group of its own means that the terminal's Ctrl-C reaches the launcher alone, which then
    decides who gets what, and that one signal reaches the process with all its children.

    [Note: one session] All stay in the launcher's session. Linux shares cores out among sessions
    (autogroups), and a worker that waits and yields its core would yield it to its own session
    only: it took half of a core from the very worker that it waited for.
    """
    return StartedChild(
        command,
        env=dict(spec.variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=kept,
        # Safe here: the launcher has one thread only.
        preexec_fn=make_setup(),
    )


def make_setup() -> Callable[[], None]:
    """Return what the new process does before it becomes the user's script."""
    # Loaded here: between fork and exec as little as possible may happen.
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def setup() -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # The terminal is the launcher's: using it is an error, and must not stop the process.
        for signum in (signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(signum, signal.SIG_IGN)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the launcher died before the line above could take effect

    return setup
