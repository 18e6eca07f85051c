"""A worker's position and failures, in forms that fit the protocol's bounds."""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace

from graphsplit.cluster.member.calls import CallHistory
from graphsplit.cluster.wire import limits
from graphsplit.errors import (
    FrameError,
    GraphsplitError,
    JobFailedError,
    MembershipChangedError,
    ReceiveTimeoutError,
    StepFailedError,
    StoppedInOrder,
    TransportError,
)
from graphsplit.frames import line_now, line_of, script_frame, whole_traceback
from graphsplit.root_cause import NOWHERE, FailureCause, Location
from graphsplit.text import cut_end, cut_middle, encodable

_LONG_STILL = 10  # samples without progress
_MOST_LINES = 8


class ReportedPosition:
    """Where this worker is. Written by the computing thread, read once a second by another.

    All attributes are plain writes without a lock: ``progress += 1`` has one writer, and the
    sources are called only when a heartbeat is due, so they may be slow.

    Attributes:
        progress: Grows while the worker does its job.
        text_source: Gives the position in words.
        location_source: Gives it in parts.
        waiting_source: Gives whom this worker waits for at this moment, and for what.
        awaits_all: What it waits for that all workers have to do, in words.
        aside: Grows while threads beside the computing one do their job.
        training_source: Gives in words how training goes.
        calls: The calls that this worker has made, which all make alike.
    """

    __slots__ = (
        "_last_progress",
        "_num_still",
        "aside",
        "awaits_all",
        "calls",
        "location_source",
        "progress",
        "text_source",
        "training_source",
        "waiting_source",
    )

    def __init__(self) -> None:
        self.progress: int = 0
        self.aside: int = 0
        self.awaits_all: str = ""
        self.text_source: Callable[[], str] = lambda: "before its first step"
        self.location_source: Callable[[], Location] = lambda: NOWHERE
        self.waiting_source: Callable[[], tuple[int, str] | None] = lambda: None
        self.training_source: Callable[[], str] = str
        self.calls = CallHistory()
        self._last_progress = 0  # a worker that has yet to begin is where the script is
        self._num_still = 0

    def text(self) -> str:
        """The position in words; empty if the source has none, or fails."""
        try:
            return cut_end(encodable(str(self.text_source())), limits.MAX_POSITION_CHARS)
        except Exception:  # a position that cannot be told must not end the job
            return ""

    def training(self) -> str:
        """How training goes, in words; empty if the source has none, or fails."""
        try:
            return self.training_source()
        except Exception:
            return ""

    def location(self) -> Location:
        """The position in parts; empty if the source has none, or fails."""
        try:
            return bounded_location(self.location_source())
        except Exception:
            return NOWHERE

    def hold(self) -> None:
        """Go on telling what is told now, without whoever gives it: nothing is kept of them."""
        text, location = self.text(), self.location()
        self.text_source, self.location_source = lambda: text, lambda: location

    def sample(self) -> Location:
        """The position, and what keeps the worker there: a peer, or a line of the user's.

        The line is looked up only if there was no progress since the sample before; one that
        stands still for long, and waits for nobody, tells the lines that led there, too.
        """
        found = self.location()
        last, self._last_progress = self._last_progress, self.progress
        if last != self.progress:
            self._num_still = 0
            return found
        self._num_still += 1
        waiting = self.waiting_source()
        main = threading.main_thread().ident
        frame = sys._current_frames().get(main) if main is not None else None
        if waiting is None or not found.source:
            is_alone = waiting is None and not self.awaits_all
            most = _MOST_LINES if is_alone and self._num_still >= _LONG_STILL else 1
            found = replace(found, source=line_now(frame, most=most))
        if waiting is not None:
            peer, what = waiting
            found = replace(found, waits_for=peer, waits_what=what)
        elif self.awaits_all:
            found = replace(found, waits_what=self.awaits_all)
        return bounded_location(found)


def failure_kind(error: BaseException) -> str:
    """The kind of ``FailureCause`` of an error that ended this worker's part.

    An error about a peer (a link that broke, a value that never came) is second-hand: the
    scheduler prefers what the peer itself has to say, or that it is gone.
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, ReceiveTimeoutError):
        return "timeout"
    if isinstance(error, TransportError) and not isinstance(error, FrameError):
        return "lost"
    return "exception"


def failure_of(
    error: BaseException,
    *,
    rank: int,
    host: str,
    pid: int,
    position: str,
    location: Location = NOWHERE,
) -> FailureCause | None:
    """The failure that an error means, or None if it only follows from the job's end."""
    if isinstance(error, (JobFailedError, MembershipChangedError, StoppedInOrder)):
        return None
    found = error.location if isinstance(error, StepFailedError) else location
    line = _users_line(error)
    return FailureCause(
        kind=failure_kind(error),
        message=failure_message(error),
        rank=rank,
        host=host,
        pid=pid,
        position=position,
        traceback=whole_traceback(error),
        location=found if found.source else replace(found, source=line),
    )


def _users_line(error: BaseException) -> str:
    """Where the error passed through the user's code, or will when it leaves graphsplit.

    What one of ours is about was called by the script, or by a library for it.
    """
    trace = error.__traceback__
    if trace is None:
        return ""
    of_script, outer = isinstance(error, GraphsplitError), trace.tb_frame.f_back
    return line_of(trace, of_script=of_script) or line_now(
        script_frame(outer) if of_script else outer
    )


def failure_message(error: BaseException) -> str:
    """The message of an error: ``ValueError: the disk is full``.

    Of the user's errors the first line. Those of graphsplit say in further lines which line of the
    user's they are about, and what to do; they are kept.
    """
    if isinstance(error, StepFailedError) and error.__cause__ is not None:
        return _first_line(str(error))  # it begins with the error of the operation
    if isinstance(error, SystemExit):
        code = "" if error.code is None else f" {error.code}:"
        return f"SystemExit:{code} its script left before the job was finished"
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    if isinstance(error, GraphsplitError):
        return summary.removeprefix(f"{GraphsplitError.__module__}.")
    return _inner_message(summary) or _first_line(summary) or "an error"


def _inner_message(summary: str) -> str:
    """Of an error that a loader's process has raised its own message; torch puts it last."""
    if not re.match(r"\S+: Caught \S+ in DataLoader worker process \d+", summary):
        return ""
    lines = summary.splitlines()
    last_frame = max((at for at, line in enumerate(lines) if line.startswith("  ")), default=0)
    inner = _first_line("\n".join(lines[last_frame + 1 :]))
    return inner and f"{inner} (in a process of the DataLoader)"


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0]


def bounded(cause: FailureCause) -> FailureCause:
    """The cause cut to what one message may hold; both ends of a long traceback are kept."""
    return replace(
        cause,
        message=cut_middle(encodable(cause.message), limits.MAX_MESSAGE_CHARS),
        host=cut_end(encodable(cause.host), limits.MAX_HOST_CHARS),
        position=cut_end(encodable(cause.position), limits.MAX_POSITION_CHARS),
        traceback=cut_middle(encodable(cause.traceback), limits.MAX_TRACEBACK_CHARS),
        location=bounded_location(cause.location),
    )


def bounded_location(location: Location) -> Location:
    """The location cut to what one message may hold."""
    parts = {
        name: _printable(getattr(location, name))
        for name in ("instruction", "operation", "module", "source", "waits_what")
    }
    return replace(location, **parts)  # type: ignore[arg-type]


def _printable(text: str) -> str:
    text = "".join(char if char.isprintable() else "?" for char in encodable(text))
    return cut_end(text, limits.MAX_PLACE_CHARS)
