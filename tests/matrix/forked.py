"""Starts processes of a job by fork, from one that has imported everything already.

Importing torch costs a process seconds. A child that is forked here becomes what a fresh
``python script.py`` would be: environment, arguments, streams, signals, session, and the same end
(the hook for errors, threads, exit handlers). The parent must have no threads of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import io
import os
import signal
import sys
import threading
import types
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import nn

from graphsplit.cli.launch.environment import ChildSpec

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def warm_up() -> None:
    """Import what a worker imports sooner or later, and let torch set itself up for captures.

    No thread is started, and nothing of graphsplit is run.
    """
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    for name in ("grpc.aio", "graphsplit.cluster.scheduler.server", "graphsplit.train.model"):
        importlib.import_module(name)
    torch.export.export(nn.Linear(2, 2), (torch.zeros(2, 2),), strict=False)
    assert threading.enumerate() == [threading.main_thread()], threading.enumerate()


@dataclass
class ForkedChild:
    """What the supervisor needs of a process."""

    pid: int
    stdout: IO[bytes] | None = None
    stderr: IO[bytes] | None = None
    returncode: int | None = None

    def wait(self) -> int:
        """Wait for its end and return its return code."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def start_forked(spec: ChildSpec, command: Sequence[str], kept: Sequence[int]) -> ForkedChild:
    """Do what ``start_child`` does, for a command that is Python and a script."""
    out, err = os.pipe(), os.pipe()
    parent = os.getpid()
    _flush()
    pid = os.fork()
    if pid == 0:
        _become(spec, command, parent, (out[1], err[1]), kept)
    os.close(out[1])
    os.close(err[1])
    return ForkedChild(pid, os.fdopen(out[0], "rb", 0), os.fdopen(err[0], "rb", 0))


def _become(
    spec: ChildSpec,
    command: Sequence[str],
    parent: int,
    streams: tuple[int, int],
    kept: Sequence[int],
) -> None:
    """Never returns: the frames of the launcher below must not be left."""
    status = 70
    try:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        _take_streams(*streams, kept)
        _reset_signals()
        # The launcher's own, such as its folder; they are run at exit, and are not ours to run.
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(spec.variables)
        status = _run(command[1:])
    finally:
        os._exit(status)


def _take_streams(out: int, err: int, kept: Sequence[int]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(number, target)
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > 2 and int(entry) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(entry))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(number, "wb", closefd=False)
        stream = io.TextIOWrapper(raw, "utf-8", write_through=True)  # type: ignore[type-var]
        setattr(sys, name, stream)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(arguments: Sequence[str]) -> int:
    """The script, and what Python does when it is over."""
    path = arguments[0]
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(path).parent))
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    status = 0
    try:
        exec(compile(Path(path).read_text(), path, "exec"), module.__dict__)
    except SystemExit as error:
        status = _status_of(error)
    except BaseException as error:
        trace = error.__traceback__
        assert trace is not None
        sys.excepthook(type(error), error, trace.tb_next)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    return status


def _status_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
