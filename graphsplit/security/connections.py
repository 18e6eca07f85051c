"""Closes connections that prove nothing, and keeps those away who always come again. Linux only.

gRPC gives its connections to nobody; but they are open files of this process, and the kernel
tells of each where it comes from and how much has come. A thread looks at them, twice a second
while all are members. What it does to strangers is decided in ``strangers.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from graphsplit.security.addresses import Address, machine, read_address, read_peer
from graphsplit.security.rates import LineLimiter
from graphsplit.security.strangers import Instruction, Strangers, UnprovenConnection, syn_filter

_OPEN_FILES = "/proc/self/fd"
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_TCP_INFO_BYTES = 136
_RECEIVED_AT = 128  # tcpi_bytes_received
_CLOSE_S = 5.0
_PROVEN_S = 5.0  # a member whose connection has not been seen by then has gone again

Peer = tuple[Address, int]


@dataclass
class _Open:
    """A connection of this process's port, and its open file."""

    connection: UnprovenConnection
    peer: Peer
    file: int


class ConnectionWatch:
    """Watches the connections of a port on which this process listens.

    Args:
        port: The port.
        num_workers: How many workers the job has.
        log: Takes lines for the person who watches.
    """

    def __init__(self, port: int, num_workers: int, log: Callable[[str], None]) -> None:
        self._port = port
        self._log = log
        self._lines = LineLimiter(time.monotonic())
        self._strangers = Strangers(num_workers)
        self._lock = threading.Lock()
        self._proven: dict[Peer, float] = {}
        self._known: set[int] = set()  # sockets that need no look: members', and of other ports
        self._slowed: tuple[Mapping[str, int], int] = ({}, 0)
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="graphsplit-connections", daemon=True
        )
        if sys.platform == "linux":
            self._thread.start()

    def prove(self, peer: str) -> None:
        """Somebody has proved to be a member, or one who may ask; ``peer`` as gRPC names it."""
        found = read_peer(peer)
        if found is not None:
            with self._lock:
                self._proven[found] = time.monotonic()

    def close(self) -> None:
        """Watch no longer."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        look_s = 0.0
        while not self._is_over.wait(look_s):
            look_s = self._look()

    def _look(self) -> float:
        unproven = self._unproven()
        ruling = self._strangers.look([one.connection for one in unproven], time.monotonic())
        for one in unproven:
            why = ruling.close.get(one.connection.number)
            if why is not None and _close(one, self._port):
                self._say(f"closed a connection from {one.peer[0]} that proved nothing: it {why}")
        slowed = dict(ruling.slowed), ruling.everybody
        if slowed != self._slowed:
            self._slowed = slowed
            self._slow(syn_filter(*slowed) if any(slowed) else [])
            for name, level in slowed[0].items():
                self._say(f"connections of {name} prove nothing: one in {2**level} is let in")
        return ruling.look_s

    def _say(self, line: str) -> None:
        logged = self._lines.logged(line, time.monotonic())
        if logged is not None:
            self._log(logged)

    def _unproven(self) -> list[_Open]:
        found: list[_Open] = []
        known = set()
        for name in os.listdir(_OPEN_FILES):
            with contextlib.suppress(OSError):
                about = os.stat(int(name))
                one = None
                if stat.S_ISSOCK(about.st_mode) and about.st_ino not in self._known:
                    one = self._connection(int(name), about.st_ino)
                if one is None:
                    known.add(about.st_ino)
                else:
                    found.append(one)
        with self._lock:
            proven = {one.connection.number for one in found if self._proven.pop(one.peer, 0.0)}
            oldest_s = time.monotonic() - _PROVEN_S
            self._proven = {peer: at_s for peer, at_s in self._proven.items() if at_s > oldest_s}
        self._known = known | proven
        return [one for one in found if one.connection.number not in proven]

    def _connection(self, file: int, number: int) -> _Open | None:
        """An accepted connection of the port; None for any other socket."""
        with _socket_of(file, self._port) as one:
            if one is None or one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            host, port = one.getpeername()[:2]
            address = read_address(host)
            if address is None:
                return None
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            (received,) = struct.unpack_from("Q", info, _RECEIVED_AT)
            return _Open(
                UnprovenConnection(number, machine(address), received), (address, port), file
            )

    def _slow(self, steps: list[Instruction]) -> None:
        """Have the kernel hear new connections by these rules; all of them if there are none."""
        for name in os.listdir(_OPEN_FILES):
            with contextlib.suppress(OSError), _socket_of(int(name), self._port) as one:
                if one is not None and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    set_filter(one, steps)


@contextlib.contextmanager
def _socket_of(file: int, port: int) -> Iterator[socket.socket | None]:
    """The socket of an open file, if it has this port of ours; shared with whose file it is."""
    if not stat.S_ISSOCK(os.stat(file).st_mode):
        yield None
        return
    with socket.socket(fileno=os.dup(file)) as found:
        is_of_port = (
            found.family in (socket.AF_INET, socket.AF_INET6)
            and found.type == socket.SOCK_STREAM
            and found.getsockname()[1] == port
        )
        yield found if is_of_port else None


def _close(one: _Open, port: int) -> bool:
    """Break a connection, unless its file is another one by now. What it had sent is gone."""
    with contextlib.suppress(OSError), _socket_of(one.file, port) as found:
        if found is None or os.fstat(found.fileno()).st_ino != one.connection.number:
            return False
        # To connect to nowhere: unlike shutdown, it forgets what waits to be read.
        nowhere = struct.pack("H14x", socket.AF_UNSPEC)
        broken: int = ctypes.CDLL(None).connect(found.fileno(), nowhere, len(nowhere))
        return broken == 0
    return False


def set_filter(listener: socket.socket, steps: list[Instruction]) -> None:
    """Have the kernel drop what a filter does not pass, before this socket hears of it.

    Raises:
        OSError: This kernel has no such filters.
    """
    if not steps:
        with contextlib.suppress(OSError):  # it has none
            listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        return
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
