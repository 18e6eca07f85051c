"""The launcher's end of its line to the scheduler: what it hears, and until when it waits for more.

A scheduler that has spoken once and then falls silent is frozen, and nobody else could end it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from graphsplit.launcher_line import Beat, Line, Note

_FROZEN_S = 1.0


class SchedulerLine:
    """One line at a time: each life of the scheduler gets its own.

    Args:
        clock: Seconds that do not run backwards.

    Attributes:
        line: Our end, while there is a scheduler.
        deadline_s: When the scheduler counts as frozen; None while it has not spoken.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.line: Line | None = None
        self._within_s = 0.0
        self.deadline_s: float | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[Line, Line]]:
        """A new line: our end, and the scheduler's, which is closed here once it has been given."""
        self.close()
        self.line, theirs = Line.pair()
        try:
            yield self.line, theirs
        finally:
            theirs.close()

    def hear(self) -> list[Note]:
        """Read the scheduler's notes, its beats aside."""
        notes = [] if self.line is None else list(self.line.read())
        beats = [note for note in notes if isinstance(note, Beat)]
        if beats:
            self._within_s = beats[-1].within_s
            self.deadline_s = self._clock() + self._within_s
        return [note for note in notes if not isinstance(note, Beat)]

    def silent_for(self) -> float | None:
        """For how many seconds the scheduler has been silent, once that is too long.

        Whoever asks long after the deadline was frozen: what came meanwhile may be on its way.
        """
        now_s = self._clock()
        if self.deadline_s is None or now_s < self.deadline_s:
            return None
        if now_s > self.deadline_s + _FROZEN_S:
            self.deadline_s = now_s + self._within_s
            return None
        return self._within_s

    def say(self, note: Note) -> None:
        """Tell the scheduler, if there is one."""
        if self.line is not None:
            self.line.send(note)

    def close(self) -> None:
        """The scheduler is gone."""
        if self.line is not None:
            self.line.close()
        self.line = self.deadline_s = None
