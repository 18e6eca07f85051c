"""Ports of hosts: one that listens, whether others reach it, and how fast."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import click

from graphsplit.cli.ssh.frames import DialedPort
from graphsplit.launchers.ports import address_of, find_free_port, holder_of
from graphsplit.security.grpc_ports import free_ports

_DIAL_S = 5.0
_MOST_WAITING = 4096  # who dials is not answered, so as many wait as there are hosts
_MOST_THREADS = 64
_NUM_PINGS, _WARM_UP_PINGS = 25, 5
_SIZE_BYTES, _CHUNK_BYTES = 16 << 20, 1 << 20


def reserve(host: str, port: int) -> socket.socket:
    """Listen where the scheduler will, at an address of this host; port 0: a free one.

    Raises:
        click.ClickException: It cannot be; says why, and the fix.
    """
    try:
        return _listening(host, port or find_free_port(host))
    except OSError as error:
        by = f": {holder_of(port)} has it" if error.errno == errno.EADDRINUSE else ""
        raise click.ClickException(
            f"the scheduler cannot listen on {host}:{port or '(any port)'} ({_why(error)}){by}\n"
            f"  Fix: name another port (--port), or an address of that host that the others reach "
            f"(--host)"
        ) from None


def reserve_for_workers(
    named: str, scheduler: tuple[str, int], ports: tuple[int, int]
) -> socket.socket:
    """Listen where workers of this host will, on one of the ports that they may take.

    Args:
        named: What ``MS_WORKER_IP`` says.
        scheduler: Where the scheduler listens.
        ports: The first and the last port; 0 for one that the kernel gives.

    Raises:
        click.ClickException: It cannot be; says why, and the fix.
    """
    try:
        host = address_of(named, *scheduler)
        port = next(free_ports(host, ports), None)
        if port is None:
            _listening(host, 0).close()  # or the address is none of this host
            raise click.ClickException(
                f"no port from {ports[0]} to {ports[1]} is free on {host} (GS_WORKER_PORTS)\n"
                f"  Fix: name a longer range, with two ports for each worker of a host"
            )
        return _listening(host, port)
    except OSError as error:
        raise click.ClickException(
            f"its workers cannot listen on {named}, their MS_WORKER_IP ({_why(error)})\n"
            f"  Fix: set MS_WORKER_IP on that host to one of its own addresses, or unset it there"
        ) from None


def _listening(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=_MOST_WAITING)


def _why(error: OSError) -> str:
    """The system's words alone: Python adds an address to some of them."""
    if error.errno is None or error.errno < 0:
        return error.strerror or str(error)
    return os.strerror(error.errno)


def dial(host: str, port: int, what: str = "") -> socket.socket:
    """Reach a port of another host.

    Raises:
        click.ClickException: It cannot be reached from here.
    """
    try:
        return socket.create_connection((host, port), timeout=_DIAL_S)
    except OSError as error:
        fix = (
            f"open the ports between the two in firewalls, {port} among them, or name an address "
            f"that it reaches: --host ADDRESS for the scheduler, MS_WORKER_IP for workers"
        )
        if isinstance(error, socket.gaierror):
            fix = f"make {host} known there (DNS, /etc/hosts), or give an IP address: --host"
        raise click.ClickException(
            f"it cannot reach {what}{host}:{port} ({_why(error)})\n  Fix: {fix}"
        ) from None


def why_not_reached(peers: Sequence[DialedPort]) -> tuple[str, ...]:
    """Why each of them cannot be reached, and the fix; empty for those that can.

    All are dialed at the same time.
    """
    with ThreadPoolExecutor(_MOST_THREADS) as threads:
        return tuple(threads.map(_why_not, peers))


def _why_not(peer: DialedPort) -> str:
    try:
        dial(peer.host, peer.port, f"{peer.what}, ").close()
    except click.ClickException as error:
        return error.message
    return ""


def answer_one(listener: socket.socket, secret: str) -> None:
    """Answer one who measures the way to here; who does not know the secret learns nothing."""
    with contextlib.suppress(OSError), listener.accept()[0] as peer:
        peer.settimeout(_DIAL_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not hmac.compare_digest(_receive(peer, len(secret)), secret.encode()):
            return
        for _ in range(_NUM_PINGS):
            peer.sendall(_receive(peer, 1))
        left = _SIZE_BYTES
        while left:
            left -= len(_receive(peer, min(left, _CHUNK_BYTES)))
        peer.sendall(b".")


def measure(host: str, port: int, secret: str) -> tuple[float, float]:
    """Seconds that a byte takes there and back, and bytes that get there in a second.

    Raises:
        click.ClickException: It cannot be reached, or the connection breaks.
    """
    with dial(host, port) as peer:
        try:
            return _measure(peer, secret)
        except OSError as error:
            raise click.ClickException(
                f"it reaches {host}:{port}, but the connection breaks ({error.strerror or error})\n"
                f"  Fix: look at the network between them: cables, MTU (ping -M do -s 1472)"
            ) from None


def _measure(peer: socket.socket, secret: str) -> tuple[float, float]:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(secret.encode())
    took = []
    for _ in range(_NUM_PINGS):
        begun_s = time.perf_counter()
        peer.sendall(b".")
        _receive(peer, 1)
        took.append(time.perf_counter() - begun_s)
    chunk = bytes(_CHUNK_BYTES)
    begun_s = time.perf_counter()
    for _ in range(_SIZE_BYTES // _CHUNK_BYTES):
        peer.sendall(chunk)
    _receive(peer, 1)
    speed = _SIZE_BYTES / (time.perf_counter() - begun_s)
    return statistics.median(took[_WARM_UP_PINGS:]), speed


def _receive(peer: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = peer.recv(count - len(data))
        if not chunk:
            raise ConnectionResetError(errno.ECONNRESET, "the other side has hung up")
        data += chunk
    return bytes(data)
