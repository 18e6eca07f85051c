"""Starts processes of a job by fork, from one that has imported everything already.

Importing torch costs a process seconds. A child that is forked here becomes what a fresh
``python script.py`` would be: environment, arguments, streams, signals, session, and the same end
(the hook for errors, threads, exit handlers). The parent must have no threads of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import signal
import sys
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from graphsplit.cli.launch import script_process
from graphsplit.cli.launch.environment import ChildSpec
from graphsplit.cli.launch.warm import ForkedChild

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


def start_forked(spec: ChildSpec, command: Sequence[str], kept: Sequence[int]) -> ForkedChild:
    """Do what ``start_child`` does, for a command that is Python and a script."""
    out, err = os.pipe(), os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
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
        # It may start itself anew.
        sys.orig_argv = [sys.executable, script_process.__file__, *command[1:]]
        status = script_process.run(list(command[1:]))
    finally:
        script_process.leave(status)


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
