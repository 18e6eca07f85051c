"""Gives memory that was dropped back to the system, from time to time.

glibc serves tensors of up to 32 MB from its heap once one such was freed. A small block that lands
in the gap of a dropped tensor makes the gap too short for the next one, and a hundred drawn and
dropped tensors of 4 MB then take 400 MB. Returning free pages costs a few milliseconds.
"""

from __future__ import annotations

import ctypes
import sys

RETURN_EVERY_BYTES = 32 << 20

_num_bytes = 0


def note_dropped(size_bytes: int) -> None:
    """Counts a tensor that was just dropped, and returns free memory when many were."""
    global _num_bytes
    _num_bytes += size_bytes
    if _num_bytes >= RETURN_EVERY_BYTES:
        return_now()


def return_now() -> None:
    """Asks the C library to give freed memory back to the system, and starts to count anew."""
    global _num_bytes
    _num_bytes = 0
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
