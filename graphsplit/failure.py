"""What is known about a failure, as one frozen value that can travel to every process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from graphsplit.errors import JobFailedError


@dataclass(frozen=True)
class FailureCause:
    """The root cause of a job's end.

    Attributes:
        kind: ``"exception"`` (a worker raised), ``"lost"`` (a process vanished or froze),
            ``"refused"``, ``"disagreement"`` (workers made different plans), ``"interrupted"``,
            ``"scheduler_lost"`` or ``"timeout"``.
        message: One line that says what happened.
        rank: The worker it happened on; -1 for the scheduler or when no worker is to blame.
        host: Host name or address of that process; empty when unknown.
        pid: Process id there; 0 when unknown.
        position: The last position that process reported, in words: step, microbatch,
            instruction, module path.
        traceback: The original traceback, whole; empty when there is none.
    """

    kind: str
    message: str
    rank: int = -1
    host: str = ""
    pid: int = 0
    position: str = ""
    traceback: str = ""

    def describe(self) -> str:
        """The cause as a person should read it: one summary line, then position and traceback."""
        who = f"worker {self.rank}" if self.rank >= 0 else "the scheduler"
        where = f" (host {self.host}, pid {self.pid})" if self.pid else ""
        lines = [f"{who}{where}: {self.message}"]
        if self.position:
            lines.append(f"  last reported position: {self.position}")
        if self.traceback:
            lines.append(f"  traceback on {who}:")
            lines.extend("    " + line for line in self.traceback.rstrip().splitlines())
        return "\n".join(lines)


class AbortSignal:
    """One flag per process that ends every wait. Thread-safe; the first cause set wins.

    Whoever waits (for a value, a barrier, the scheduler) either polls ``cause`` or registers a
    waker that is called, from the thread that sets the signal, right after the cause is set.
    """

    def __init__(self) -> None:
        self._cause: FailureCause | None = None
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []
        self.was_raised = False

    @property
    def cause(self) -> FailureCause | None:
        """The root cause, or None while the job is healthy."""
        return self._cause

    def add_waker(self, waker: Callable[[], None]) -> None:
        """Call ``waker`` once the signal is set; at once if it is set already."""
        with self._lock:
            self._wakers.append(waker)
            is_set = self._cause is not None
        if is_set:
            waker()

    def set(self, cause: FailureCause) -> bool:
        """Set the cause and wake every waiter. Returns False if another cause was first."""
        with self._lock:
            if self._cause is not None:
                return False
            self._cause = cause
            wakers = list(self._wakers)
        for waker in wakers:
            waker()
        return True

    def error(self) -> JobFailedError | None:
        """The error that carries the root cause, or None while the job is healthy."""
        if self._cause is None:
            return None
        return JobFailedError("the job was ended by " + self._cause.describe())

    def raise_if_set(self) -> None:
        """Raise ``JobFailedError`` with the root cause if the job was aborted."""
        error = self.error()
        if error is not None:
            self.was_raised = True
            raise error
