"""Keeps what is late, repeated or somebody else's out of a stream. Pure.

[Note: fences] Every message says which job, generation and life it belongs to, and which number
it has on its stream. The stream is checked here; whether the generation is the present one, the
state machines check, for each message by its meaning: an arrival of the past does not count, but
a worker's own failure does.
"""

from __future__ import annotations

from enum import Enum

from graphsplit.cluster.wire.messages import Fence


class FencingVerdict(Enum):
    """The fate of a message."""

    TAKE = "take"
    DROP = "drop"
    BREAK = "break"


class StreamGuard:
    """Checks the fences of one stream in one direction. The first message binds it to a life.

    Args:
        first: The fence of the first message, where somebody else has taken it already.

    Attributes:
        why_broken: Why the stream must be broken off; empty while all is well.
    """

    def __init__(self, first: Fence | None = None) -> None:
        self._job = ""
        self._incarnation = ""
        self._number = 0
        self.why_broken = ""
        if first is not None:
            self.check(first)

    def check(self, fence: Fence) -> FencingVerdict:
        """Whether to take this message, drop it as a repetition, or break off the stream."""
        if fence.number <= self._number and self._number:
            return FencingVerdict.DROP
        if fence.number != self._number + 1:
            return self._break(f"message {fence.number} came after message {self._number}")
        if self._number and fence.incarnation != self._incarnation:
            return self._break("a message of another process came on its stream")
        if self._job and fence.job != self._job:
            return self._break(f"a message of job {fence.job!r} came in job {self._job!r}")
        self._number, self._incarnation, self._job = fence.number, fence.incarnation, fence.job
        return FencingVerdict.TAKE

    def _break(self, why: str) -> FencingVerdict:
        self.why_broken = why
        return FencingVerdict.BREAK
