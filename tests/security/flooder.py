"""A stranger in a process of its own: twelve threads that make a port busy, and come again.

python tests/security/flooder.py PORT SECONDS
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
PINGS = (b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)) * 200
SETTINGS = (b"\0\0\x06\x04\0\0\0\0\0" + b"\0\x04\0\0\xff\xff") * 200
_NAME = b"\x40\x01a\x7f\x81\x7f"  # a header of 16,384 bytes, of which 16,378 are its value
HEADER = b"\0\x40\x00\x01\x04%b" + _NAME + bytes(16_378)


def pings(_: int) -> bytes:
    return PINGS


def settings(_: int) -> bytes:
    return SETTINGS


def headers(number: int) -> bytes:
    return HEADER % (2 * number + 1).to_bytes(4, "big")


def nothing(_: int) -> bytes:
    return b""


def flood(port: int, said: Callable[[int], bytes]) -> None:
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), 2.0) as link:
                link.sendall(PREFACE)
                for number in itertools.count():
                    words = said(number)
                    if not words:
                        break
                    link.sendall(words)
                    link.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        link.recv(1 << 16)
                    link.settimeout(2.0)
        except OSError:
            pass


if __name__ == "__main__":
    for kind in (pings, settings, headers, nothing) * 3:
        threading.Thread(target=flood, args=(int(sys.argv[1]), kind), daemon=True).start()
    time.sleep(float(sys.argv[2]))
    os._exit(0)
