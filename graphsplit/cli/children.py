"""Starts processes that cannot outlive the launcher, and ends them with all their children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from graphsplit.cli.environment import ChildSpec

_PR_SET_PDEATHSIG = 1


def start_child(spec: ChildSpec, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start one process in a session of its own, with pipes for its output.

    A session of its own means that the terminal's Ctrl-C reaches the launcher alone, which
    then decides who gets what, and that one signal reaches the process with all its children.
    """
    return subprocess.Popen(
        command,
        env=dict(spec.variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # Safe here: the launcher has one thread only.
        preexec_fn=_make_setup(),
    )


def signal_group(child: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    """Send a signal to a process that was not yet waited for, and to its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signum)


def collect_if_ended(child: subprocess.Popen[bytes]) -> int | None:
    """Return the return code of a process that has ended, after ending its children."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    if os.waitid(os.P_PID, child.pid, options) is None:
        return None
    # While it is not yet waited for, its group's number cannot belong to anybody else.
    signal_group(child, signal.SIGKILL)
    return child.wait()


def _make_setup() -> Callable[[], None]:
    """Return what the new process does before it becomes the user's script."""
    # Loaded here: between fork and exec as little as possible may happen.
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def setup() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the launcher died before the line above could take effect

    return setup
