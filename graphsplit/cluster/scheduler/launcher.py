"""The scheduler's end of its line to the launcher that started it, if one did."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator

from graphsplit.cluster.wire.limits import heartbeat_interval_s
from graphsplit.launcher_line import Beat, Ended, Line, Note
from graphsplit.logs import LogLine

# Python itself takes seconds to tear down a large process on a busy machine, and beats no more.
_EXIT_S = 30.0


class Launcher:
    """Tells the launcher what it is to know; does nothing where there is none.

    Args:
        line: This end of the line; None: there is no launcher.
        silence_s: How long the launcher may hear nothing before it ends the scheduler.
    """

    def __init__(self, line: Line | None, silence_s: float) -> None:
        self._line = line
        self._beat = Beat(silence_s)
        self._next_beat_s = 0.0

    @classmethod
    def of_process(cls, log: LogLine, silence_s: float) -> Launcher:
        """The launcher that started this process, as its environment says."""
        try:
            return cls(Line.of(os.environ), silence_s)
        except (OSError, ValueError) as error:
            # Whoever passed our environment on did not pass the line.
            log(f"no line to the launcher: {error}", event="warning", level="warning")
            return cls(None, silence_s)

    def tell(self, note: Note) -> None:
        """Say something."""
        if self._line is not None:
            self._line.send(note)

    def beat(self) -> None:
        """Say that the scheduler is there, when it is time to."""
        if time.monotonic() >= self._next_beat_s:
            self._next_beat_s = time.monotonic() + heartbeat_interval_s(self._beat.within_s)
            self.tell(self._beat)

    @contextlib.contextmanager
    def heard_by(self, hear: Callable[[Ended], None]) -> Iterator[None]:
        """Hand over what the launcher says, on the running event loop."""
        line = self._line
        if line is None:
            yield
            return

        def read() -> None:
            for note in line.read():
                if isinstance(note, Ended):
                    hear(note)

        loop = asyncio.get_running_loop()
        loop.add_reader(line.fileno(), read)
        try:
            yield
        finally:
            loop.remove_reader(line.fileno())

    def take_leave(self) -> None:
        """Beat for the last time, and hang up: from here on, all is up to Python."""
        self.tell(Beat(_EXIT_S))
        if self._line is not None:
            self._line.close()
