"""Hosts on one machine: network namespaces with an address each, wired to one more for a switch.

Nothing of them is seen by, or reaches, the machine's own network. They need root, and the command
``ip``; ``why_not`` says so where they cannot be had.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

MAC_PREFIX = b"\x02\x67\x73\x00\x00"
"""The last octet of a host's hardware address is its number plus one."""

_FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_SIOCETHTOOL = 0x8946
# Checksums, scatter-gather, and frames larger than the wire takes: a veth pair leaves them to
# hardware that does not exist, and a frame that is read in between would be no frame.
_SET_CHECKSUMS, _SET_GATHER, _SET_TSO, _SET_GSO, _SET_GRO = 0x17, 0x19, 0x1F, 0x24, 0x2C


@cache
def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if sys.platform != "linux":
        return "network namespaces are a thing of Linux"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and the command ip"
    try:
        with Hosts(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"this machine makes no network namespaces: {error}"


def enter(namespace: str) -> None:
    """Let the calling thread, and what it starts from now on, live in a namespace."""
    with (_FOLDER / namespace).open() as file:
        _set(file.fileno())


def _set(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: cannot change the network namespace")


@contextlib.contextmanager
def visiting(namespace: str) -> Iterator[None]:
    """Let the calling thread live in a namespace for a moment: what it forks then stays there."""
    with Path("/proc/thread-self/ns/net").open() as home:
        enter(namespace)
        try:
            yield
        finally:
            _set(home.fileno())


def inside(namespace: str, call: Callable[[], T]) -> T:
    """Call something in a namespace. A socket that it opens stays there."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            enter(namespace)
            found.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


class Hosts:
    """Some hosts. A context manager: at its end nothing of them is left.

    Attributes:
        switch: The namespace in which all cables end; that of host n at the device ``p<n>``.
        names: The namespace of each host.
    """

    def __init__(self, number: int) -> None:
        unique = f"gs-{os.getpid()}-{secrets.token_hex(3)}"
        self.switch = f"{unique}-switch"
        self.names = [f"{unique}-{host}" for host in range(number)]

    @staticmethod
    def address(host: int) -> str:
        """Where a host is reached."""
        return f"10.117.0.{host + 1}"

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as stack:
            stack.callback(self._remove)
            for name in (self.switch, *self.names):
                _ip(f"netns add {name}")
            for host in range(len(self.names)):
                self._wire(host)
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _wire(self, host: int) -> None:
        name = self.names[host]
        _ip(f"link add p{host} type veth peer name eth0 netns {name}", self.switch)
        for namespace in (self.switch, name):
            inside(namespace, _without_ipv6)
        _ip(f"link set p{host} up", self.switch)
        neighbours = (
            # Who has which address is known, as beyond a router: only what is sent can be lost.
            f"neigh add {self.address(other)} lladdr {_mac(other)} dev eth0 nud permanent"
            for other in range(len(self.names))
            if other != host
        )
        lines = (
            "link set lo up",
            f"link set eth0 address {_mac(host)}",
            f"addr add {self.address(host)}/24 dev eth0",
            "link set eth0 up",
            *neighbours,
        )
        _ip("\n".join(lines), name, is_batch=True)
        inside(name, lambda: _without_offloads("eth0"))
        inside(self.switch, lambda: _without_offloads(f"p{host}"))

    def _remove(self) -> None:
        for name in (*self.names, self.switch):
            if (_FOLDER / name).exists():
                _ip(f"netns del {name}")

    def left_behind(self) -> Iterator[str]:
        """What is still there after the end."""
        for name in (*self.names, self.switch):
            if (_FOLDER / name).exists():
                yield f"namespace {name}"


def remove_stale() -> None:
    """Remove the namespaces of processes that were killed before they could do so."""
    for path in _FOLDER.glob("gs-*-*-*") if _FOLDER.exists() else ():
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"netns del {path.name}")


def _mac(host: int) -> str:
    return ":".join(f"{octet:02x}" for octet in (*MAC_PREFIX, host + 1))


def _ip(words: str, namespace: str = "", *, is_batch: bool = False) -> None:
    command = ["ip", *(("-n", namespace) if namespace else ())]
    command += ["-batch", "-"] if is_batch else words.split()
    subprocess.run(
        command,
        input=words if is_batch else None,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )


def _without_ipv6() -> None:
    for which in ("all", "default"):
        with contextlib.suppress(OSError):  # a kernel without it has nothing to say either
            Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6").write_text("1")


def _without_offloads(device: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in (_SET_CHECKSUMS, _SET_GATHER, _SET_TSO, _SET_GSO, _SET_GRO):
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", device.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):  # what a device does not have is off
                fcntl.ioctl(control, _SIOCETHTOOL, request)
