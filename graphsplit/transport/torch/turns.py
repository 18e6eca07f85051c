"""Who reads a link: one thread at a time, and a program that waits rather than another for it.

Gloo's thread wakes whoever waits for a receive. If that is a thread which files what comes, it has
to wake the program in turn; so a program that waits takes the turn, and reads itself::

    a program waits, nobody reads          it reads until it has what it waits for
    a program waits, the thread reads      the thread files it, and steps back
    no program has read for a while        the thread reads: credit, large values, goodbyes
    large payloads are under way           the thread reads on, for programs wait for these
    a program has read for a while         the thread keeps its deadline, and pings the peer

[Note: pings] Gloo cannot be told to stop waiting; only a message ends a wait, or the end of the
link. Python handles a signal, and a reader finds its channel closed, between two messages. So a
peer that sends nothing is made to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from graphsplit.errors import GraphsplitError

STAND_BY_S = 5e-3
"""The time after which the thread reads if no program does."""

LOOK_S = 50e-3
PING_S = 0.5


class Turns:
    """Hands the turn to read from one thread to the next. Thread-safe.

    Args:
        read: Reads one message; must not raise for what is wrong with the link.
        interrupt: Ends the link, and with it a wait for a message.
        ping: Has the peer send something.
        is_left: Whether programs leave reading to the thread.
    """

    def __init__(
        self,
        read: Callable[[], None],
        interrupt: Callable[[], None],
        ping: Callable[[], None],
        is_left: Callable[[], bool],
    ) -> None:
        self._read, self._interrupt, self._ping, self._is_left = read, interrupt, ping, is_left
        self._turn = threading.Lock()
        self._turn.acquire()  # the thread's, until there is a link
        self._num_taken = 0  # turns of programs so far
        self._look: Callable[[], None] | None = None  # of the program that reads
        self._asked: Callable[[], bool] | None = None  # of one that waits while the thread reads
        self._is_over = threading.Event()
        self._is_called = threading.Event()  # the thread is to read, or to end

    def read_until(self, is_over: Callable[[], bool], look: Callable[[], None]) -> bool:
        """See ``credit.leave_reading``."""
        if not self._turn.acquire(blocking=False):
            self._asked = is_over
            return False
        try:  # an interrupt may come at any time
            self._num_taken += 1
            self._look = look
            while not (is_over() or self._is_over.is_set() or self._is_left()):
                self._read()
        finally:
            self._look = None
            self._turn.release()
        if self._is_left():
            self._is_called.set()
        return is_over() or self._is_over.is_set()

    def nudge(self) -> None:
        """Have a program that reads look around."""
        if self._look is not None:
            self._ping()

    def end(self) -> None:
        """Nobody reads any more."""
        self._is_over.set()
        self._is_called.set()

    def stand_by(self) -> None:
        """Read whenever no program does, until the end; the link's own thread, which begins."""
        while not self._is_over.is_set():
            self._read()
            asked = self._asked
            if asked is not None and asked() and not self._is_left():
                self._asked = None
                self._turn.release()
                self._look_on()

    def _look_on(self) -> None:
        """Leave reading to the programs, for as long as they do."""
        pause, waited, pinged = STAND_BY_S, 0.0, 0.0
        seen = self._num_taken
        self._is_called.clear()
        while not self._is_over.is_set():
            if self._is_called.wait(pause):
                self._is_called.clear()
                if self._is_left() and self._turn.acquire(blocking=False):
                    return
            elif seen != self._num_taken:
                pause, waited, pinged = STAND_BY_S, 0.0, 0.0
                seen = self._num_taken
            elif self._turn.acquire(blocking=False):
                return
            else:
                waited += pause
                pause = min(2 * pause, LOOK_S)
                if waited >= LOOK_S:
                    self._look_after_reader()
                if waited - pinged >= PING_S:
                    pinged = waited
                    self._ping()

    def _look_after_reader(self) -> None:
        look = self._look
        try:
            if look is not None:
                look()
        except GraphsplitError:
            self._interrupt()
