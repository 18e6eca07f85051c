"""A futex word per worker, on which its threads sleep until somebody rings.

    waiter                              ringer
    1. seen = bell.read()               a. writes what the waiter waits for
    2. is it there? then done           b. rings: stores a number never used before, wakes
    3. sleep while the word is `seen`

If b happens between 1 and 3 the word has changed and the kernel refuses to sleep; if it happens
before 1, then a is visible in 2. Ringers store numbers that are unique to them rather than
increment the word: an increment is two steps, and two ringers could cancel each other out.
"""

from __future__ import annotations

import ctypes
import itertools
import platform
from typing import Any

from graphsplit.transport.shm.region import SharedRegion, adopt_region, create_region, is_supported

BELL_BYTES = 4096
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYBODY = 0, 1, 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def is_available() -> bool:
    """True where processes can share memory and wake each other."""
    return is_supported() and _SYS_FUTEX is not None and ctypes.sizeof(ctypes.c_long) == 8


_ARGUMENTS: list[Any] = [
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int),
    *(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
]
if is_available():
    # Sleeping must let other threads run; waking returns at once and is cheaper without that.
    _sleep = ctypes.CDLL(None).syscall
    _wake = ctypes.PyDLL(None).syscall
    _sleep.argtypes = _wake.argtypes = _ARGUMENTS


class Doorbell:
    """One worker's bell, as seen by one process. Thread-safe.

    Args:
        region: The page that holds the word.
        ringer: Rank of the worker that rings through this object.
        tickets: Numbers for the ringer's rings, shared by all bells that it rings.
    """

    def __init__(self, region: SharedRegion, *, ringer: int, tickets: itertools.count[int]) -> None:
        self._word = memoryview(region.buffer).cast("B")[:4].cast("I")
        self._address = region.address
        self._ringer = (ringer & 0xFFF) << 20
        self._tickets = tickets

    def read(self) -> int:
        """The word, to be passed to ``sleep``."""
        return self._word[0]

    def ring(self) -> None:
        """Wake every thread that sleeps on the bell."""
        self._word[0] = self._ringer | next(self._tickets) & 0xFFFFF
        _wake(_SYS_FUTEX, self._address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def sleep(self, seen: int, *, timeout_s: float) -> None:
        """Sleep until the bell rings, unless it has rung since ``seen`` was read."""
        whole = int(timeout_s)
        timeout = _Timespec(whole, int((timeout_s - whole) * 1e9))
        _sleep(_SYS_FUTEX, self._address, _FUTEX_WAIT, seen, ctypes.byref(timeout), None, 0)


def create_bell(rank: int, tickets: itertools.count[int]) -> tuple[Doorbell, int]:
    """This worker's own bell, and the descriptor to pass to those who shall ring it."""
    region, fd = create_region(f"graphsplit-bell-{rank}", BELL_BYTES)
    region.reserve(0, BELL_BYTES)
    return Doorbell(region, ringer=rank, tickets=tickets), fd


def adopt_bell(fd: int, *, ringer: int, tickets: itertools.count[int], what: str) -> Doorbell:
    """A peer's bell, to ring it. Closes ``fd``."""
    region = adopt_region(fd, BELL_BYTES, what=what)
    return Doorbell(region, ringer=ringer, tickets=tickets)
