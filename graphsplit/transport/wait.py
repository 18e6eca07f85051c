"""The rule for waits of all transports: their deadline, and their early end at an abort."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from graphsplit.errors import PeerFinishedError, ReceiveTimeoutError
from graphsplit.failure import AbortSignal

FINISHED = 1 << 62
"""The progress of a worker whose script has ended: it will send nothing more."""
_LAST_MESSAGES_S = 5.0  # what it sent before may still be under way


class Waiting:
    """The wait of this worker that is under way, for readers on another thread.

    A wait that is over is gone: it is not told to end, so that waits cost no more for being known.
    """

    def __init__(self) -> None:
        self._wait: weakref.ref[Wait] | None = None

    def begin(self, wait: Wait) -> None:
        """This wait is under way."""
        self._wait = weakref.ref(wait)

    def now(self) -> tuple[int, str] | None:
        """The peer that is waited for, and what for; None while nothing is."""
        wait = self._wait() if self._wait is not None else None
        return None if wait is None else (wait.peer, wait.what)


@dataclass(frozen=True)
class WaitPolicy:
    """The rule for every wait of the data plane.

    Attributes:
        abort: Ends every wait at once with the job's root cause.
        deadline_s: Seconds without a message *and* without progress of the peer.
        progress: Maps a rank to a number that grows while that worker is alive and making
            progress, so that a slow peer is never taken for a dead one.
        waiting: Knows which wait is under way.
    """

    abort: AbortSignal = field(default_factory=AbortSignal)
    deadline_s: float = 300.0
    progress: Callable[[int], int] = lambda rank: 0
    waiting: Waiting = field(default_factory=Waiting, compare=False)


class Wait:
    """One wait for one peer. Call ``check`` whenever the waiting thread wakes without a result.

    Let go of it when the wait is over.

    Args:
        policy: The rule.
        peer: The rank that is waited for.
        what: What for, in words.
        is_coming: Whether something of the peer's has begun to arrive and is not there yet: on a
            slow cable a value may still be on its way long after the peer's script has ended.
    """

    def __init__(
        self,
        policy: WaitPolicy,
        *,
        peer: int,
        what: str,
        is_coming: Callable[[], bool] = lambda: False,
    ) -> None:
        self._policy = policy
        self.peer = peer
        self.what = what
        self._is_coming, self._came = is_coming, 0.0
        self._progress = policy.progress(peer)
        self._since = time.monotonic()
        policy.waiting.begin(self)

    def check(self) -> None:
        """Raise if the job was aborted or the deadline passed without progress of the peer."""
        self._policy.abort.raise_if_set()
        now = time.monotonic()
        progress = self._policy.progress(self.peer)
        if progress != self._progress:
            self._progress, self._since = progress, now
        elif progress >= FINISHED and self._is_over(now):
            raise PeerFinishedError(
                f"{self.what}: the script of worker {self.peer} has ended, so this will never "
                f"come\n  Fix: every worker must run the same steps; did worker {self.peer} leave "
                f"early, by sys.exit or a condition on its rank?"
            )
        elif now - self._since > self._policy.deadline_s:
            raise ReceiveTimeoutError(
                f"{self.what}: nothing for {self._policy.deadline_s:g} s, and worker {self.peer} "
                f"made no progress\n  Fix: if steps of this model really take longer, raise "
                f"MS_RECEIVE_MSG_TIMEOUT"
            )

    def _is_over(self, now: float) -> bool:
        if self._is_coming():
            self._came = now
        return now - max(self._since, self._came) > _LAST_MESSAGES_S
