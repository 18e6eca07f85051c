"""A free port, and who holds one that is not."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _LAST_PORT = 10_000, 65_535  # well-known services have lower ones
_PORT_TRIES = 50
_SIOCGIFADDR = 0x8915
_LISTENS = "0A"  # TCP_LISTEN, as /proc/net/tcp has it


def find_free_port(host: str) -> int:
    """Return a TCP port that is free on ``host`` right now.

    The scheduler imports for seconds before it listens. So this is none of the ports that the
    kernel gives to whoever wants any, where one can be had: else another program may be given it
    meanwhile, and the scheduler can only say so.

    Raises:
        OSError: Nothing can listen on ``host``.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    low, high = _given_ports()
    others = [*range(_FIRST_PORT, low), *range(high + 1, _LAST_PORT + 1)]
    for _ in range(_PORT_TRIES if others else 0):
        with suppress(_TakenError):
            return _bind(family, (address[0], secrets.choice(others), *address[2:]))
    return _bind(family, address)


def is_free(host: str, port: int) -> bool:
    """Whether a port is free on ``host`` right now.

    Raises:
        OSError: Nothing can listen on ``host``.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        _bind(family, address)
    except _TakenError:
        return False
    return True


def address_towards(host: str, port: int) -> str:
    """The address from which this host reaches another one. Nothing is sent.

    Raises:
        OSError: The other one is not known, or out of reach.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def address_of(named: str, host: str, port: int) -> str:
    """The address of this host that ``MS_WORKER_IP`` names.

    Args:
        named: An address or a name, which it is itself; ``auto`` for the address from which this
            host reaches another one; or one of its network interfaces, for its IPv4 address.
        host: The other one.
        port: A port of the other one.

    Raises:
        OSError: The other one is out of reach, or the interface has no address.
    """
    if named == "auto":
        return address_towards(host, port)
    if named not in (name for _, name in socket.if_nameindex()):
        return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = named.encode()[:15].ljust(256, b"\0")
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])


def holder_of(port: int) -> str:
    """Who listens on a port of this machine, in words, as far as this user may know."""
    sockets = {f"socket:[{inode}]" for inode in _listening_on(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(number) in sockets for number in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                return f"process {process.name} ({command[:120]})"
    return "a process of another user, or one that has just ended"


def _listening_on(port: int) -> list[str]:
    found = []
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.append(fields[9])
    return found


class _TakenError(OSError):
    """Somebody has this port."""


def _bind(family: int, address: tuple[Any, ...]) -> int:
    """Bind a port for a moment; which one it was."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: what an ended one has left in the kernel is in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _TakenError(error.errno, error.strerror) from None
            raise
        return int(probe.getsockname()[1])


def _given_ports() -> tuple[int, int]:
    """The first and the last port that the kernel gives to whoever wants any."""
    try:
        low, high = map(int, _GIVEN_PORTS.read_text().split())
    except (OSError, ValueError):
        return 32_768, 65_535  # all that some system or other gives
    return low, high
