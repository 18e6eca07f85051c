"""A clock that stands still while anything on this machine waits for a core.

A promise in seconds holds on a machine that has cores to spare, and is measured by this clock: a
busy machine breaks no test, and a quiet one excuses nothing. Its time is the same in all processes.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

_PRESSURE = Path("/proc/pressure/cpu")


def quiet_time() -> float:
    """Seconds, from a point that stays the same until the machine is started again.

    Where the kernel does not count who waits, all seconds count.
    """
    try:
        found = re.search(r"some .*total=(\d+)", _PRESSURE.read_text())
    except OSError:
        found = None
    return time.monotonic() - (int(found[1]) / 1e6 if found else 0.0)
