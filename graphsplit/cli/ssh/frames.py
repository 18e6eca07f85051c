"""Messages between the launcher and the agent of a host: one line of JSON each.

The launcher's go to the agent's standard input, the token of the job among them; the agent's come
from its standard output. Bytes of programs are text in Latin-1, which maps each to one character.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from graphsplit.cli.launch.environment import ChildSpec
from graphsplit.cli.launch.request import JobOptions
from graphsplit.encoding import records
from graphsplit.encoding.fields import MessageError
from graphsplit.launcher_line import Note

MOST_BYTES = 1 << 21


@dataclass(frozen=True)
class Setup:
    """All that the processes of this host have in common; answered by ``HostReady`` or ``Problem``.

    Attributes:
        job: Their job; its host is this host's own address if it has the scheduler, and a port
            that it does not name this host finds.
        workdir: The folder in which they run.
        holders: The processes of this host, as files of the folder with certificates are called.
        silence_s: Without a word from the launcher in this time, all is ended.
        has_scheduler: Whether this host starts it.
        worker_ports: The first and the last port that workers may take; 0: any.
    """

    job: JobOptions
    workdir: str
    holders: tuple[str, ...]
    silence_s: float
    has_scheduler: bool
    worker_ports: tuple[int, int]


@dataclass(frozen=True)
class Signal:
    """Send a signal to a process and its children."""

    name: str
    signum: int


@dataclass(frozen=True)
class DialedPort:
    """A port of another host that processes of this one will dial; ``what`` says what it is."""

    name: str
    what: str
    host: str
    port: int


@dataclass(frozen=True)
class Reach:
    """Dial these ports, to see that they can be reached; answered by ``Dialed``."""

    peers: tuple[DialedPort, ...]


@dataclass(frozen=True)
class Listen:
    """Wait for measurements at this address of the host's own; answered by ``Listening``."""

    host: str
    secret: str


@dataclass(frozen=True)
class Measure:
    """Measure the way to an address; answered by ``Measured`` or ``Problem``."""

    host: str
    port: int
    secret: str


@dataclass(frozen=True)
class Alive:
    """The other side is there."""


@dataclass(frozen=True)
class Facts:
    """A host, as it says of itself when its agent has started.

    Attributes:
        graphsplit: The version of graphsplit there.
        torch: That of torch; empty where there is none.
        python: That of Python, with its patch.
        address: The address at which the launcher has reached it; empty if SSH did not say.
        cpu: The instruction set that torch's kernels can use there.
        num_cores: The cores that a process may use.
        shared_bytes: The room that is left in ``/dev/shm``.
        clock_s: Its clock, seconds since 1970.
        remarks: What a job stands, each with its fix on a line of its own.
        problems: The same, for what it does not stand.
    """

    graphsplit: str
    torch: str
    python: str
    address: str
    cpu: str
    num_cores: int
    shared_bytes: int
    clock_s: float
    remarks: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostReady:
    """All is there.

    Attributes:
        port: Where the scheduler will listen, if it is to run here.
        worker_host: Where workers of this host will listen.
        worker_port: A port there at which somebody listens until they are started.
        digest: SHA-256 of the script in hexadecimal; empty for a module.
    """

    port: int
    worker_host: str
    worker_port: int
    digest: str


@dataclass(frozen=True)
class Problem:
    """Why nothing can be started here."""

    text: str


@dataclass(frozen=True)
class Dialed:
    """Why each of the peers cannot be reached, and the fix; empty for those that can."""

    problems: tuple[str, ...]


@dataclass(frozen=True)
class Listening:
    """The port at which measurements are waited for."""

    port: int


@dataclass(frozen=True)
class Measured:
    """The way to another host.

    Attributes:
        latency_s: How long a byte takes there and back; the median.
        bytes_per_s: How much gets there.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class ProcessStarted:
    """A process has been started."""

    name: str
    pid: int


@dataclass(frozen=True)
class Begun:
    """A process has called ``gs.init()``."""

    name: str


@dataclass(frozen=True)
class Wrote:
    """A process has written something."""

    name: str
    channel: str
    text: str


@dataclass(frozen=True)
class Exited:
    """A process has ended; its report of that is empty if it left none."""

    name: str
    returncode: int
    report: str


# A ``Note`` is handed on: between the launcher and the scheduler that it has started there.
Order = Setup | Reach | ChildSpec | Signal | Note | Listen | Measure | Alive
Answer = (
    Facts
    | HostReady
    | Dialed
    | Problem
    | Listening
    | Measured
    | ProcessStarted
    | Begun
    | Wrote
    | Exited
    | Note
)
Frame = Order | Answer
_KINDS: dict[str, type[Any]] = {one.__name__: one for one in get_args(Frame)}


def written(frame: Frame) -> bytes:
    """A frame as one line."""
    return records.to_tagged(frame).encode() + b"\n"


def read(line: bytes) -> Frame | None:
    """The frame of one line; None where it is none: what a login shell has printed, say."""
    return records.from_tagged(_KINDS, line)


class Cutter:
    """Cuts one direction of a connection into lines."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes; the lines that they complete.

        Raises:
            MessageError: A line does not end.
        """
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        if len(self._pending) > MOST_BYTES:
            raise MessageError(f"a line is longer than {MOST_BYTES} bytes")
        return lines
