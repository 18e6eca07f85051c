"""The line between the launcher and the scheduler that it started. Datagrams of JSON.

``graphsplit run`` knows when a process ends, even one that no scheduler has heard of yet; only it
can end one that is frozen. The scheduler knows which worker was given up. Each has one end of a
pair of sockets, which no other process can reach; the scheduler's is named by ``GS_LAUNCHER_LINE``.

Who does not take what he is told loses it: neither side may ever wait for the other.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graphsplit.encoding import records

VARIABLE = "GS_LAUNCHER_LINE"
_MAX_BYTES = 16 << 10
_MAX_CHARS = 2_000


@dataclass(frozen=True)
class Ended:
    """A worker's process has ended, and is not started again.

    Attributes:
        rank: Its rank.
        pid: Its process id.
        how: ``was killed by SIGKILL``, or ``ended with status 1``.
        error: What it left as its reason; empty if it left none.
    """

    rank: int
    pid: int
    how: str
    error: str = ""


@dataclass(frozen=True)
class Beat:
    """The scheduler is there. Without another beat in this time, it is lost."""

    within_s: float


@dataclass(frozen=True)
class GivenUp:
    """The job does not count on this process any more, though it may still be there.

    Attributes:
        rank: Its rank.
        pid: Its process id.
        why: What was noticed of it.
        is_final: Whether it would come back too late in any case: the job is over.
    """

    rank: int
    pid: int
    why: str
    is_final: bool = False


@dataclass(frozen=True)
class Over:
    """The job has finished: nobody who comes now will be needed.

    Attributes:
        vacant: The ranks that nobody held at the end.
    """

    vacant: tuple[int, ...] = ()


Note = Ended | Beat | GivenUp | Over
_KINDS: dict[str, type[Note]] = {one.__name__: one for one in (Ended, Beat, GivenUp, Over)}


class Line:
    """One end of the line."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._link = link

    @classmethod
    def pair(cls) -> tuple[Line, Line]:
        """Both ends of a new line."""
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        return cls(first), cls(second)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Line | None:
        """The scheduler's end, where a launcher has named one.

        Raises:
            OSError: What is named is no socket.
            ValueError: It is no number.
        """
        name = environ.get(VARIABLE, "").strip()
        if not name:
            return None
        link = socket.socket(fileno=int(name))
        link.set_inheritable(False)
        return cls(link)

    def fileno(self) -> int:
        """For whoever waits for notes."""
        return self._link.fileno()

    def send(self, note: Note) -> None:
        """Tell the other side, if it still listens."""
        with contextlib.suppress(OSError):
            self._link.send(records.to_tagged(note).encode())

    def read(self) -> Iterator[Note]:
        """The notes that were told and not read yet. Anything that is no note is left out."""
        while True:
            try:
                data = self._link.recv(_MAX_BYTES)
            except OSError:
                return
            note = records.from_tagged(_KINDS, data)
            if note is not None:
                yield note

    def close(self) -> None:
        """Hang up."""
        self._link.close()


def cut(text: str) -> str:
    """A text that fits into a note."""
    return text[:_MAX_CHARS]
