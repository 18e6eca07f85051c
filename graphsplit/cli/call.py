"""The launcher of ``gs.launch``: ``graphsplit run`` for a function instead of a script.

A process of its own, whatever threads, devices and signal handlers the caller has: this one
imports no torch and has one thread, and what it starts is forked from such processes alone.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys

import click

from graphsplit.cli.job import supervise_job
from graphsplit.cli.launch.ending import EX_TIMEOUT
from graphsplit.cli.launch.request import CallAnswer, CallRequest
from graphsplit.cli.launch.verdict import JobVerdict
from graphsplit.encoding import records
from graphsplit.root_cause import FailureCause

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve one request, which is the first argument."""
    request = records.from_text(CallRequest, sys.argv[1], what="the request")
    _end_with(request.caller)
    try:
        limit_s = math.inf if request.limit_s is None else request.limit_s
        answer = CallAnswer(cause_of(supervise_job(request.job, os.environ, limit_s=limit_s)))
    except click.ClickException as error:
        answer = CallAnswer(mistake=error.message)
    with os.fdopen(request.answer, "w") as file:
        file.write(records.to_text(answer))


def _end_with(caller: int) -> None:
    """Get the signal that ends the job when the caller has gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != caller:
        raise SystemExit(1)


def cause_of(ended: JobVerdict) -> FailureCause | None:
    """The cause of a job's end, for its caller; None if all is well."""
    if ended.status == 0:
        return None
    kind = "exception"
    if ended.status == EX_TIMEOUT:
        kind = "timeout"
    elif ended.status > 128:
        kind = "lost" if ended.rank >= 0 else "interrupted"
    return FailureCause(kind, ended.reason, ended.rank)


if __name__ == "__main__":
    main()
