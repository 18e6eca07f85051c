"""The processes of one job, each on a host of its own, forked from a process that has torch."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from graphsplit.cli.launch.environment import ChildSpec
from matrix.forked import ForkedChild, start_forked
from matrix.network.namespaces import visiting

_LOOK_S = 0.05


@dataclass
class Told:
    """What one process has printed, and when; and how it ended.

    Attributes:
        name: ``"scheduler"``, ``"worker 1"``, or ``"worker 1 again"``.
        lines: Each line, and the moment at which it was read.
        status: As a shell counts: 128 and the signal's number where it was killed.
        ended: When; None while it runs.
    """

    name: str
    lines: list[tuple[float, str]] = field(default_factory=list)
    status: int | None = None
    ended: float | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(line for _, line in self.lines)


@dataclass
class _Running:
    child: ForkedChild
    told: Told
    rest: dict[IO[bytes], bytes]


class Processes:
    """Starts processes, and reads what they print. Has no threads, so that it may fork.

    Args:
        on_line: Called with the name of a process and each line of it.
    """

    def __init__(self, on_line: Callable[[str, str], None]) -> None:
        self._on_line = on_line
        self._running: list[_Running] = []
        self.all: list[Told] = []

    def start(
        self, name: str, spec: ChildSpec, namespace: str, script: Path, arguments: Sequence[str]
    ) -> None:
        """Start a process that runs a script in a namespace."""
        with visiting(namespace):
            child = start_forked(spec, [sys.executable, str(script), *arguments], ())
        assert child.stdout is not None and child.stderr is not None
        for pipe in (child.stdout, child.stderr):
            os.set_blocking(pipe.fileno(), False)
        told = Told(name)
        self.all.append(told)
        self._running.append(_Running(child, told, {child.stdout: b"", child.stderr: b""}))

    def run(self, deadline_s: float) -> bool:
        """Until all have ended. False if some had to be killed."""
        deadline = time.monotonic() + deadline_s
        while self._running and time.monotonic() < deadline:
            pipes = [pipe for one in self._running for pipe in one.rest]
            ready, _, _ = select.select(pipes, [], [], _LOOK_S)
            for one in list(self._running):
                for pipe in [pipe for pipe in one.rest if pipe in ready]:
                    self._read(one, pipe)
                self._look_after(one)
        in_time = not self._running
        self.kill()
        return in_time

    def kill(self) -> None:
        """End all that are left."""
        for one in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.child.pid, signal.SIGKILL)
            one.child.wait()
            self._end(one)

    def _read(self, one: _Running, pipe: IO[bytes]) -> bool:
        """Whether there may be more to read."""
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            del one.rest[pipe]
            pipe.close()
            return False
        now = time.monotonic()
        *lines, one.rest[pipe] = (one.rest[pipe] + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            one.told.lines.append((now, text))
            self._on_line(one.told.name, text)
        return True

    def _look_after(self, one: _Running) -> None:
        pid, code = os.waitpid(one.child.pid, os.WNOHANG)
        if pid:
            one.child.returncode = os.waitstatus_to_exitcode(code)
            self._end(one)

    def _end(self, one: _Running) -> None:
        status = one.child.wait()
        one.told.status = status if status >= 0 else 128 - status
        one.told.ended = time.monotonic()
        self._running.remove(one)
        for pipe in list(one.rest):
            while self._read(one, pipe):
                pass
            pipe.close()
