"""Keeps a worker's child processes from holding its connection to the scheduler open.

A data loader forks. The child inherits the socket, and as long as it lives, the kernel does not
close the connection when the worker itself is killed: nobody would notice the death. So a child
lets go of that socket first thing. gRPC's own fork handlers are for children that use gRPC; these
never do.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat

_addresses: set[tuple[str, int]] = set()
_is_registered = False


def drop_in_children(host: str, port: int) -> None:
    """From now on, forked children close every connection to this address."""
    global _is_registered
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            _addresses.add((str(address[0]), int(address[1])))
    if not _is_registered:
        os.register_at_fork(after_in_child=_drop)
        _is_registered = True


def _drop() -> None:
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                _drop_one(int(entry))


def _drop_one(number: int) -> None:
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        return
    # A duplicate, so that looking at a stranger's socket does not close it.
    with socket.socket(fileno=os.dup(number)) as link:
        if link.family not in (socket.AF_INET, socket.AF_INET6):
            return
        peer = link.getpeername()
    if (peer[0].removeprefix("::ffff:"), peer[1]) in _addresses:
        # The number stays taken: gRPC's idle objects in the child still mention it.
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, number, inheritable=False)
        os.close(null)
