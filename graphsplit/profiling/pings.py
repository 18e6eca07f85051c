"""How fast messages are between two workers, and how far apart their clocks are.

Both are found with messages that go there and back, over the channels that the workers have::

    a   t0 ──────────────► b  t1 (comes), t2 (goes back)
    a   t3 ◄──────────────

The clocks differ by ``((t1 - t0) + (t2 - t3)) / 2``, if both ways take equally long; the round trip
that took least tells best (Mills, RFC 5905).
"""

from __future__ import annotations

import os
import platform
import statistics
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from graphsplit.job.control import ControlChannels
from graphsplit.schedule.costs import LinkCost
from graphsplit.tensor_meta import TensorMeta

_ROUNDS = 20
_LARGE_ROUNDS = 5
_LARGE_BYTES = 1024 * 1024
_MIN_SECONDS = 1e-9
_MOST_BYTES_PER_S = 1e11  # no memory is faster

RoundTrip = tuple[int, int, int, int]  # t0, t1, t2, t3


def clock_offset_ns(trips: Sequence[RoundTrip]) -> int:
    """The nanoseconds to add to b's clock to get a's."""
    t0, t1, t2, t3 = min(trips, key=lambda trip: (trip[3] - trip[0]) - (trip[2] - trip[1]))
    return -((t1 - t0) + (t2 - t3)) // 2


def link_of(small_s: Sequence[float], large_s: Sequence[float], large_bytes: int) -> LinkCost:
    """A link, from the seconds of round trips of small and of large messages.

    The quickest ones show what bytes cost; others were held up by something else.
    """
    growth = (min(large_s) - min(small_s)) / 2
    rate = min(large_bytes / max(growth, _MIN_SECONDS), _MOST_BYTES_PER_S)
    return LinkCost(statistics.median(small_s) / 2, rate)


def measure_offset(control: ControlChannels) -> int:
    """The seconds to add to this worker's clock to get worker 0's. All workers call it together."""
    found = 0
    for peer in range(1, control.num_workers):
        if control.rank == 0:
            trips = [_ask(control, peer) for _ in range(_ROUNDS)]
            offset = torch.tensor([clock_offset_ns(trips)])
            control.send(offset, to=(peer,))
        elif control.rank == peer:
            for _ in range(_ROUNDS):
                _answer(control, 0)
            (found,) = _take_numbers(control, 1, 0)
    return found


def measure_links(
    control: ControlChannels, pairs: Iterable[tuple[int, int]]
) -> dict[int, LinkCost]:
    """Links from this worker to those of higher rank. All workers call it with the same pairs.

    One pair after the other, so that none disturbs another one.
    """
    found: dict[int, LinkCost] = {}
    for low, high in sorted({(min(pair), max(pair)) for pair in pairs}):
        if control.rank == low:
            small = [_round_trip(control, high, 1) for _ in range(_ROUNDS)]
            large = [_round_trip(control, high, _LARGE_BYTES) for _ in range(_LARGE_ROUNDS)]
            found[high] = link_of(small[2:], large[1:], _LARGE_BYTES)
        elif control.rank == high:
            for size in [1] * _ROUNDS + [_LARGE_BYTES] * _LARGE_ROUNDS:
                _take(control, size, low)
                control.send(torch.zeros(size, dtype=torch.uint8), to=(low,))
    return found


def _round_trip(control: ControlChannels, peer: int, size: int) -> float:
    message = torch.zeros(size, dtype=torch.uint8)
    start = time.perf_counter()
    control.send(message, to=(peer,))
    _take(control, size, peer)
    return time.perf_counter() - start


def _ask(control: ControlChannels, peer: int) -> RoundTrip:
    message = torch.zeros(1, dtype=torch.uint8)
    begin = time.perf_counter_ns()
    control.send(message, to=(peer,))
    came, went = _take_numbers(control, 2, peer)
    return begin, came, went, time.perf_counter_ns()


def _answer(control: ControlChannels, peer: int) -> None:
    _take(control, 1, peer)
    came = time.perf_counter_ns()
    control.send(torch.tensor([came, time.perf_counter_ns()]), to=(peer,))


def _take_numbers(control: ControlChannels, count: int, source: int) -> list[int]:
    meta = TensorMeta(torch.int64, (count,), (1,))
    numbers: list[int] = control.receive_tensor(meta, source=source).tolist()
    return numbers


def _take(control: ControlChannels, size: int, source: int) -> None:
    for _ in control.receive(size, source=source):
        pass


def clock_name() -> str:
    """A name that workers have in common whose ``perf_counter`` is one clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{platform.node()}.{os.getpid()}"


def usable_cores() -> tuple[str, int]:
    """Which cores this process may use, as a name, and how many; a container's limit counts."""
    if not hasattr(os, "sched_getaffinity"):
        return "all", os.cpu_count() or 1
    cores = sorted(os.sched_getaffinity(0))
    number = len(cores)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            number = max(1, min(number, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no such limit
    return f"{zlib.crc32(repr(cores).encode()):08x}", number


def most_resident_bytes() -> int:
    """The most memory that this process has held."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
