"""A bound on what gRPC itself writes to this process's standard error: strangers make it write.

Under TLS each connection that shows no certificate costs a line, and gRPC asks nobody whether to
write it. They cannot be turned off either: they are all that says why a certificate was refused.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
import threading
import time
from collections.abc import Iterator

from graphsplit.security.rates import LineLimiter

_STDERR = 2
_CHUNK_BYTES = 64 << 10
_LONGEST_BYTES = 1_000
_DRAIN_S = 5.0
# I0000 00:00:1764060275.123456   20461 ssl_transport_security.cc:1850] Handshake failed ...
_OF_GRPC = re.compile(rb"[IWE]\d{4} [\d:.]+ +\d+ [\w./-]+:\d+\] ")


class GrpcLines:
    """Takes all that is written, and gives what is to be shown: of gRPC's lines, only some. Pure.

    Args:
        now: Seconds of any clock that does not run backwards.
    """

    def __init__(self, now: float) -> None:
        self._limiter = LineLimiter(now)
        self._rest = b""

    def shown(self, written: bytes, now: float) -> bytes:
        """The whole lines that are to be shown; what has no end yet waits for it."""
        *lines, self._rest = (self._rest + written).split(b"\n")
        if len(self._rest) > _CHUNK_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        return b"".join(self._of_line(line, now) for line in lines)

    def rest(self) -> bytes:
        """The words without an end, when nothing more comes."""
        rest, self._rest = self._rest, b""
        return rest

    def _of_line(self, line: bytes, now: float) -> bytes:
        if not _OF_GRPC.match(line):
            return line + b"\n"
        text = line[:_LONGEST_BYTES].decode("utf-8", errors="replace")
        shown = self._limiter.logged(text, now)
        return b"" if shown is None else shown.encode() + b"\n"


@contextlib.contextmanager
def limited_grpc_lines() -> Iterator[None]:
    """Have this process's standard error go through ``GrpcLines``, until all of it is written."""
    try:
        real = os.dup(_STDERR)
    except OSError:  # it has none
        yield
        return
    reading, writing = os.pipe()
    thread = threading.Thread(
        target=_pass_on, args=(reading, real), name="graphsplit-grpc-lines", daemon=True
    )
    sees_crashes = faulthandler.is_enabled()
    sys.stderr.flush()
    os.dup2(writing, _STDERR)
    os.close(writing)
    if sees_crashes:
        faulthandler.enable(real)  # nobody reads the pipe of a process that has crashed
    thread.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(real, _STDERR)  # closes the pipe's only other end
        thread.join(_DRAIN_S)
        if sees_crashes:
            faulthandler.enable()
        os.close(real)


def _pass_on(reading: int, real: int) -> None:
    lines = GrpcLines(time.monotonic())
    with contextlib.suppress(OSError), os.fdopen(real, "wb", 0, closefd=False) as out:
        while written := os.read(reading, _CHUNK_BYTES):
            out.write(lines.shown(written, time.monotonic()))
        out.write(lines.rest())
    os.close(reading)
