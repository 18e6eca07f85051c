"""One signal per process and generation that ends every wait, and carries the root cause."""

from __future__ import annotations

import threading
from collections.abc import Callable

from graphsplit.errors import JobFailedError, MembershipChangedError
from graphsplit.root_cause import RETRYABLE_KINDS, FailureCause, Location

__all__ = ["RETRYABLE_KINDS", "AbortSignal", "FailureCause", "Location"]


class AbortSignal:
    """One flag per process and generation that ends every wait. Thread-safe.

    It is set when the generation is over: for good, or because the job recovers and a next
    generation will be formed. The first cause set wins, but that the job failed for good
    supersedes that it recovers.

    Whoever waits (for a value, a barrier, the scheduler) either polls ``cause`` or registers a
    waker that is called, from the thread that sets the signal, right after the cause is set.

    Attributes:
        cause: The root cause, or None while the job is healthy.
        recovers: Whether the generation is over, and the job goes on with a next one.
        generation: The generation whose waits this ends.
        was_raised: Whether some wait has ended with it already.
    """

    def __init__(self, generation: int = 1) -> None:
        self.cause: FailureCause | None = None
        self.recovers = False
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []
        self.generation = generation
        self.was_raised = False

    def add_waker(self, waker: Callable[[], None]) -> None:
        """Call ``waker`` once the signal is set; at once if it is set already."""
        with self._lock:
            self._wakers.append(waker)
            is_set = self.cause is not None
        if is_set:
            waker()

    def set(self, cause: FailureCause, *, recovers: bool = False) -> bool:
        """Set the cause and wake every waiter. Returns False if another cause was first."""
        with self._lock:
            is_superseding = self.recovers and not recovers
            if self.cause is not None and not is_superseding:
                return False
            self.cause, self.recovers = cause, recovers
            wakers = list(self._wakers)
        for waker in wakers:
            waker()
        return True

    def error(self) -> JobFailedError | MembershipChangedError | None:
        """The error that carries the root cause, or None while the job is healthy."""
        with self._lock:
            cause, recovers = self.cause, self.recovers
        if cause is None:
            return None
        if recovers:
            return MembershipChangedError(
                f"generation {self.generation} is over and the job is recovering from "
                + cause.describe(),
                generation=self.generation,
                cause=cause,
            )
        return JobFailedError(f"the job has ended: {cause.describe()}", cause=cause)

    def raise_if_set(self) -> None:
        """Raise the error that carries the root cause if this generation is over.

        Raises:
            JobFailedError: The job failed for good.
            MembershipChangedError: The job recovers.
        """
        error = self.error()
        if error is not None:
            self.was_raised = True
            raise error
