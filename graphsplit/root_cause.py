"""Failures, and where a worker is, as frozen values that can travel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

RETRYABLE_KINDS = frozenset({"lost", "scheduler_lost", "timeout"})
"""Kinds of failure that say nothing against the script: another attempt may well succeed."""

JOINED = "joined"
"""The kind that says that nothing failed: a generation is left, for a worker has come."""

_LOST = "lost: "
# Of a worker that is in another call than the one who sent it this; or of one whose data differ.
_ODD_MESSAGES = ("FrameError:", "LoaderMismatchError:", "CollectiveMismatchError:")
_SHORT_LINES = 8


@dataclass(frozen=True)
class Location:
    """Where a worker is, in parts that a program can read. What is not known is None or empty.

    Attributes:
        step: Number of the training, evaluation or prediction step in the job, from 1.
        microbatch: The microbatch within it.
        instruction: The instruction of the worker's program: ``"FORWARD mb0 seg2"``.
        operation: The operation of the graph, by name.
        module: The path of the module that it belongs to: ``"encoder.layers.0"``.
        source: The user's line: ``"train.py:31, in forward"``.
        edge: The edge whose value is sent or received.
        waits_for: The worker that it waits for.
        waits_what: What it waits for, in words; for all workers, if ``waits_for`` is None.
    """

    step: int | None = None
    microbatch: int | None = None
    instruction: str = ""
    operation: str = ""
    module: str = ""
    source: str = ""
    edge: int | None = None
    waits_for: int | None = None
    waits_what: str = ""

    @property
    def awaits_all(self) -> bool:
        """Whether it waits for what all workers have to do."""
        return self.waits_for is None and self.waits_what != ""


NOWHERE = Location()
"""Nothing is known."""


@dataclass(frozen=True)
class FailureCause:
    """The root cause of a job's end.

    Attributes:
        kind: ``"exception"`` (a worker raised), ``"lost"`` (a process vanished or froze),
            ``"refused"``, ``"disagreement"`` (workers made different plans), ``"interrupted"``,
            ``"scheduler_lost"`` or ``"timeout"``; ``"joined"`` where a worker has come.
        message: What happened. The first line says it; further lines are for whom it concerns.
        rank: The worker it happened on; -1 for the scheduler or when no worker is to blame.
        host: Host name or address of that process; empty when unknown.
        pid: Process id there; 0 when unknown.
        position: The last position that process reported, in words: step, microbatch,
            instruction, module path.
        location: The same, and the user's line, in parts.
        traceback: The original traceback, whole; empty when there is none.
    """

    kind: str
    message: str
    rank: int = -1
    host: str = ""
    pid: int = 0
    position: str = ""
    traceback: str = ""
    location: Location = NOWHERE

    @property
    def is_retryable(self) -> bool:
        """Whether another attempt may succeed: a process or a link was lost, nothing raised."""
        return self.kind in RETRYABLE_KINDS

    @property
    def is_odd_message(self) -> bool:
        """Whether a worker was sent what it did not expect: the sender may be in another call."""
        return self.kind == "exception" and self.message.startswith(_ODD_MESSAGES)

    @property
    def who(self) -> str:
        """Whom it happened to: ``worker 1 (host alpha, pid 1852)``."""
        who = f"worker {self.rank}" if self.rank >= 0 else "the scheduler"
        return f"{who} (host {self.host}, pid {self.pid})" if self.pid else who

    @property
    def headline(self) -> str:
        """The headline: ``worker 1 (host alpha, pid 1852) failed: ValueError: no``."""
        first = self._lines()[0]
        if self.rank < 0:
            return first.removeprefix(_LOST)
        if self.kind == "exception":
            return f"{self.who} failed: {first}"
        if first.startswith(_LOST):
            return f"{self.who} was lost: {first.removeprefix(_LOST)}"
        return f"{self.who}: {first}"

    def summary(self) -> str:
        """The cause in one line: what happened, to whom, and where."""
        return "; ".join([self.headline, *self.where()])

    def describe(self) -> str:
        """The text of the error that a script may catch: one line, the way out, where to read more.

        A message of more than a few lines is left to the place where it was found out.
        """
        told, *further = self.story().splitlines()
        shown = further if len(further) <= _SHORT_LINES else []
        if self.is_told_by_worker:
            told = f"{told}; its log has the whole story"
        elif further and not shown:
            told = f"{told}; the scheduler's log has the whole story"
        return "\n".join([told, *shown])

    def heard(self) -> str:
        """The text for a process that only heard of it: one line, and whose log has the rest."""
        told, *further = self.story().splitlines()
        if self.is_told_by_worker:
            return f"{told}; its log has the whole story"
        return f"{told}; the scheduler's log has the whole story" if further else told

    def story(self) -> str:
        """All that is known apart from the traceback, for the place where it was found out."""
        return "\n".join([self.summary(), *self._lines()[1:]])

    @property
    def is_told_by_worker(self) -> bool:
        """Whether the log of the worker that it happened on has the whole story."""
        return self.rank >= 0 and bool(self.traceback)

    def stood_still(self, rank: int) -> bool:
        """Whether this is that a worker did not go on, and others waited for it in vain."""
        return self.kind == "timeout" and self.rank == rank and not self.traceback

    def where(self) -> Iterator[str]:
        """The places that are known: the user's line, the position, the operation."""
        at = self.location
        places = [place for place in (at.source, self.position) if place]
        if not self.traceback and self.kind != "exception":
            # What it last said of itself: up to a second older than what happened to it, or more.
            yield from ["last reported: " + ", ".join(places)] if places else []
            return
        yield from places
        if at.operation:
            yield f"operation {at.operation}" + (f", module {at.module}" if at.module else "")

    def _lines(self) -> list[str]:
        """The message; a first line that only announces the second is joined with it."""
        first, *further = self.message.strip().splitlines() or [self.kind]
        if first.endswith(":") and further:
            return [f"{first} {further[0].strip()}", *further[1:]]
        return [first, *further]
