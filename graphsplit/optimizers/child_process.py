"""Run something in a forked child that only reports: whatever it changes is gone with the child.

A data loader forks in the same way: gRPC and OpenMP have threads that the child does not have, so
it computes with one thread, calls nothing of the cluster, and leaves without cleaning up.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from graphsplit.errors import GraphsplitError
from graphsplit.frames import users_summary

_SEED = 0x5EED
_is_child = False


class ChildError(GraphsplitError, RuntimeError):
    """A child could not be started, or did not report."""


class ForkedTrial:
    """A child process at work, until the end of the ``with`` block.

    Args:
        work: What it does; returns what can be pickled, for a pipe that only these two hold.
        deadline_s: After so many seconds it is killed.

    Raises:
        ChildError: This system starts no child.
    """

    def __init__(self, work: Callable[[], Any], *, deadline_s: float) -> None:
        self._ends_s = time.monotonic() + deadline_s
        if not hasattr(os, "fork"):
            raise ChildError("this system has no fork")
        fork = multiprocessing.get_context("fork")
        self._reader, writer = fork.Pipe(duplex=False)
        self._process = fork.Process(target=_be_child, args=(work, writer, deadline_s))
        with writer:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that a process with threads forks
                    self._process.start()
            except (OSError, AssertionError) as error:  # some daemon's may have none
                self._reader.close()
                raise ChildError(f"no process could be forked: {error}") from error

    def __enter__(self) -> ForkedTrial:
        return self

    def __exit__(self, *exception: object) -> None:
        """End it."""
        self._reader.close()
        self._process.kill()
        self._process.join()
        self._process.close()

    def report(self) -> Any:
        """Wait for what it reports.

        Raises:
            ChildError: It did not report, or not in time.
        """
        if not self._reader.poll(max(0.0, self._ends_s - time.monotonic())):
            raise ChildError("it did not end in time")
        try:
            return self._reader.recv()
        except EOFError:
            raise ChildError("its process broke down") from None


def is_child() -> bool:
    """Whether this process is a child at work."""
    return _is_child


def _be_child(work: Callable[[], Any], writer: Connection, deadline_s: float) -> NoReturn:
    """Never returns: what runs at the exit of a process is the parent's business."""
    global _is_child
    status = 1
    try:
        _is_child = True
        gc.disable()  # what is collected may be a connection of the parent's
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(deadline_s) + 1)
        _be_quiet()
        _seed()
        writer.send(work())
        status = 0
    finally:
        os._exit(status)


def _be_quiet() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def _seed() -> None:
    """Let all children draw the same: Python seeds its generator anew in each."""
    random.seed(_SEED)
    torch.default_generator.manual_seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)


def raised_where(error: BaseException) -> str:
    """An error in one line, with the innermost line of the user's code."""
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(
        ": "
    )
    frame = users_summary(traceback.extract_tb(error.__traceback__))
    return text if frame is None else f"{text} ({frame.filename}:{frame.lineno})"
