"""Workers by fork, from one process that has imported torch; each by itself where need be."""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from graphsplit.cli.launch import script_process
from graphsplit.cli.launch.children import (
    Child,
    StartedChild,
    StartInterruptedError,
    make_setup,
    start_child,
)
from graphsplit.cli.launch.ending import SCHEDULER
from graphsplit.cli.launch.environment import ChildSpec

_PR_SET_CHILD_SUBREAPER = 36
_IMPORT_WITHIN_S = 120.0
_TURN_S = 0.1
_USES_GRAPHSPLIT = re.compile(r"^\s*(import|from)\s.*\bgraphsplit\b", re.MULTILINE)
_SPEAKS_OF_ENVIRONMENT = re.compile(r"environ|putenv|setenv|getenv|dotenv")


@dataclass
class ForkedChild(Child):
    """A worker that was forked: what is used of ``subprocess.Popen``."""

    pid: int
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    returncode: int | None = None

    def wait(self) -> int:
        """Wait for its end and return its return code; ``-N`` if signal N ended it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def may_fork(script: Path) -> bool:
    """Whether a script's processes may be forked, and its scheduler do without the script.

    They may where it imports graphsplit, and its text does not speak of environment variables:
    those must be set before torch is imported, or are the scheduler's settings.
    """
    text = _text_of(script)
    uses, speaks = _USES_GRAPHSPLIT.search(text), _SPEAKS_OF_ENVIRONMENT.search(text)
    return can_fork() and uses is not None and speaks is None


def can_fork() -> bool:
    """Whether workers can be forked on this system."""
    return sys.platform == "linux"


def _text_of(script: Path) -> str:
    try:
        return script.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def start_worker(
    files: Sequence[int], spec: ChildSpec, command: Sequence[str], kept: Sequence[int]
) -> StartedChild:
    """Start a process that runs the script itself; a worker keeps some more open files."""
    itself = [command[0], script_process.__file__, *command[1:]]
    return start_child(spec, itself, kept if spec.name == SCHEDULER else (*kept, *files))


class WarmStart:
    """Starts the processes of one script: see ``start``. Close it when nothing is to start.

    Args:
        script: The script.
        say: Takes a line for the person who watches: that nothing can be forked, and why.
        turn: Takes what is waited for, again and again while it lasts; nothing when it is over.
        interrupts: The signals that asked for the job's end, as they come.
        kept: Open files that every worker keeps.
    """

    def __init__(
        self,
        script: Path,
        say: Callable[[str], None],
        turn: Callable[[str], None] = lambda _: None,
        *,
        interrupts: Sequence[signal.Signals] = (),
        kept: Sequence[int] = (),
    ) -> None:
        self._script = script
        self._kept = kept
        self._say = say
        self._turn = turn
        self._interrupts = interrupts
        self._server: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    def start(self, spec: ChildSpec, command: Sequence[str], kept: Sequence[int]) -> Child:
        """Start a process as ``start_child`` does: quicker, where it can be.

        Raises:
            StartInterruptedError: The job was asked to end before torch was imported.
        """
        if spec.name == SCHEDULER:
            own = [sys.executable, "-m", "graphsplit.cluster.scheduler"]
            return start_child(spec, own, kept)
        if self._server is None:
            self._serve(spec)
        forked = self._fork(spec, command[1:]) if self._line is not None else None
        return forked or start_worker(self._kept, spec, command, kept)

    def _serve(self, spec: ChildSpec) -> None:
        # Whose parent in between has ended is the launcher's child then.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = self._new_server(spec, theirs)
        self._line = ours
        self._wait_for(ours)
        ours.settimeout(_IMPORT_WITHIN_S)
        self._expect(b"ready")

    def _new_server(self, spec: ChildSpec, line: socket.socket) -> subprocess.Popen[bytes]:
        number = line.fileno()
        module = "graphsplit.cli.launch.fork_server"
        return subprocess.Popen(
            [sys.executable, "-m", module, str(number), str(os.getpid()), str(self._script)],
            env=dict(spec.variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(number, *self._kept),
            preexec_fn=make_setup(),
        )

    def _wait_for(self, line: socket.socket) -> None:
        end_s = time.monotonic() + _IMPORT_WITHIN_S
        while not select.select([line], [], [], _TURN_S)[0] and time.monotonic() < end_s:
            if self._interrupts:
                raise StartInterruptedError
            self._turn(f"importing torch, and what {self._script.name} imports")

    def _expect(self, answer: bytes) -> None:
        told = self._receive()
        self._turn("")
        if told != answer:
            self._abandon(told.decode(errors="replace") or "torch could not be imported")

    def _abandon(self, why: str) -> None:
        self._say(f"graphsplit: each worker imports torch for itself: {why}")
        if self._line is not None:
            self._line.close()
        self._line = None

    def _receive(self) -> bytes:
        assert self._line is not None
        try:
            return self._line.recv(256)
        except OSError:
            return b""

    def _fork(self, spec: ChildSpec, arguments: Sequence[str]) -> ForkedChild | None:
        assert self._line is not None
        out, err = os.pipe(), os.pipe()
        wanted = {"environ": dict(spec.variables), "arguments": list(arguments)}
        try:
            socket.send_fds(self._line, [json.dumps(wanted).encode()], [out[1], err[1]])
            told = self._receive()
        except OSError:
            told = b""
        finally:
            os.close(out[1])
            os.close(err[1])
        if not told.isdigit():
            os.close(out[0])
            os.close(err[0])
            self._abandon(told.decode(errors="replace") or "the process that imported it has ended")
            return None
        return ForkedChild(int(told), os.fdopen(out[0], "rb", 0), os.fdopen(err[0], "rb", 0))

    def close(self) -> None:
        """End the process that forks."""
        if self._line is not None:
            self._line.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
