"""The launcher's end of a connection to one host: the way to its agent, and the processes there.

A thread for each host reads what comes. What it learns it puts where the supervisor looks in any
case: output into pipes, reports into files, the scheduler's notes into its line.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TypeVar

import click

from graphsplit.cli.launch.children import Child
from graphsplit.cli.launch.environment import ChildSpec
from graphsplit.cli.ssh import frames
from graphsplit.cli.ssh.agent import BEATS
from graphsplit.cli.ssh.client import AgentClient, HostError
from graphsplit.encoding.fields import MessageError
from graphsplit.launcher_line import VARIABLE as LINE
from graphsplit.launcher_line import Beat, Ended, GivenUp, Line, Over
from graphsplit.reports import VARIABLE as REPORT_FILE
from graphsplit.reports import note_init

ANSWER_S = 60.0
LATE_S = 9.0  # more than SSH has to connect
_READ_BYTES = 1 << 16
_CLOSE_S = 5.0
_LAST_WORDS_S = 1.0
_LINES_KEPT = 50
_F = TypeVar("_F", bound=frames.Frame)


@dataclass
class RemoteChild(Child):
    """A process on another host: see ``Child``."""

    name: str
    connection: HostConnection
    report: str
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    inputs: dict[str, int]
    pid: int = 0
    returncode: int | None = None
    lost: str = ""
    may_move: Callable[[], bool] = lambda: False
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def has_place(self) -> bool:
        """See ``Child``."""
        return not self.lost or self.may_move()

    @property
    def where(self) -> str:
        """See ``Child``."""
        return f" on host {self.connection.host}"

    def wait(self) -> int:
        """See ``Child``. Where its end is not heard of, it is ended with the connection."""
        self.ended.wait(_CLOSE_S)
        return -signal.SIGKILL if self.returncode is None else self.returncode

    def signal_group(self, signum: signal.Signals) -> None:
        """See ``Child``."""
        self.connection.signal(self, signum)

    def collect_if_ended(self) -> int | None:
        """See ``Child``."""
        return self.returncode

    def end(self, returncode: int) -> None:
        """It has ended; who waits for its output wakes up."""
        self.returncode = returncode
        for number in self.inputs.values():
            os.close(number)
        self.inputs.clear()
        self.ended.set()


class HostConnection:
    """One host, with an agent. Close it when nothing runs there any more.

    Args:
        host: The host's name.
        client: The way to its agent.
        silence_s: Without a word from the host in this time, it is lost.

    Attributes:
        late_s: How far its clock is behind this machine's, and the time that its word took.
    """

    def __init__(self, host: str, client: AgentClient, silence_s: float) -> None:
        self.host = host
        self._client, self._silence_s = client, silence_s
        self._writing = threading.Lock()
        self._said: deque[str] = deque(maxlen=_LINES_KEPT)
        self._answers: queue.SimpleQueue[frames.Frame | None] = queue.SimpleQueue()
        self._heard: list[frames.Frame | None] = []
        self._children: dict[str, RemoteChild] = {}
        self._cutter = frames.Cutter()
        self._line: Line | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = self._is_watched = self._is_anew = False
        self._lost = ""
        self.late_s = 0.0
        self._heard_s = self._told_s = self._asked_s = time.monotonic()
        assert client.stdin and client.stdout and client.stderr
        self._stdin, self._stdout, self._stderr = client.stdin, client.stdout, client.stderr
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ, self._hear)
        self._selector.register(self._stderr, selectors.EVENT_READ, self._hear_ssh)

    def tell(self, frame: frames.Frame) -> None:
        """Tell the agent, if it is still there."""
        with self._writing, contextlib.suppress(OSError, ValueError):
            self._told_s = time.monotonic()
            if not isinstance(frame, frames.Alive):
                self._asked_s = self._told_s
            data = frames.written(frame)
            while data:
                data = data[os.write(self._stdin.fileno(), data) :]

    def answer(self, kind: type[_F]) -> _F:
        """Wait for the agent's next answer, which is of this kind.

        Raises:
            HostError: It has another one, or none.
        """
        try:
            found = self._heard.pop() if self._heard else self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise HostError(self._late(ANSWER_S)) from None
        if isinstance(found, kind):
            return found
        if isinstance(found, frames.Problem):
            raise HostError(f"host {self.host}: {found.text}")
        raise HostError(self._client.why_not(self._client.wait(), self._said))

    def await_answer(self) -> None:
        """Wait for the agent's next answer; where it is late, name the host to who waits."""
        if self._heard:
            return
        left_s = self._asked_s + LATE_S - time.monotonic()
        try:
            self._heard.append(self._answers.get(timeout=max(0.0, left_s)))
        except queue.Empty:
            click.echo(f"graphsplit: {self._late(LATE_S)}", err=True)

    def _late(self, limit_s: float) -> str:
        return (
            f"host {self.host}: its agent has not answered within {limit_s:g} s\n"
            f"  Fix: look whether the host is overloaded, or its disks: ssh {self.host} uptime"
        )

    def serve(self) -> None:
        """From now on a thread hears what comes. No process can be started by fork after that."""
        self._thread = threading.Thread(target=self._serve, name=f"ssh {self.host}", daemon=True)
        self._thread.start()

    def watch(self) -> None:
        """From now on the host is lost when it falls silent."""
        self._heard_s, self._is_watched = time.monotonic(), True

    def begin_anew(self, setup: frames.Setup) -> None:
        """Serve an agent that is only being started, in the place of one that was lost.

        It gets its orders when it is there; what keeps it from them loses it.
        """
        self._is_anew = True
        self.serve()
        self.tell(setup)

    def signal(self, child: RemoteChild, signum: signal.Signals) -> None:
        """Send a signal to a process; one that cannot have been started has ended by it."""
        self.tell(frames.Signal(child.name, signum))
        if self._is_anew:
            self._end(child, -signum)

    @property
    def is_lost(self) -> bool:
        """Whether nothing more can be started there."""
        return bool(self._lost)

    def start(
        self,
        spec: ChildSpec,
        kept: Sequence[int],
        may_move: Callable[[], bool] = lambda: False,
    ) -> RemoteChild:
        """Have a process started.

        Args:
            spec: The process.
            kept: Open files, of which the first is the scheduler's line.
            may_move: Whether it could be started on another host when this one is lost.
        """
        out, err = os.pipe(), os.pipe()
        variables = dict(spec.variables)
        child = RemoteChild(
            spec.name,
            self,
            variables.pop(REPORT_FILE),
            os.fdopen(out[0], "rb", 0),
            os.fdopen(err[0], "rb", 0),
            {"stdout": out[1], "stderr": err[1]},
            may_move=may_move,
        )
        self._children[spec.name] = child
        if variables.pop(LINE, "") and kept:
            self._close_line()
            self._line = Line(socket.socket(fileno=os.dup(kept[0])))
            self._selector.register(self._line, selectors.EVENT_READ, self._hear_launcher)
        self.tell(replace(spec, variables=variables))
        if self._lost:  # the thread may have gone before it could see this one
            self._give_up(child)
        return child

    def hang_up(self) -> None:
        """Have the agent end whatever is left there, and leave."""
        self._is_closing = True
        with self._writing:
            self._stdin.close()
        if self._lost:
            self._client.kill()

    def close(self) -> None:
        """Wait until it has left."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._client.wait(_CLOSE_S)
        self._client.kill()
        self._client.wait()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        self._close_line()
        self._stdout.close()
        self._stderr.close()
        self._selector.close()

    def _serve(self) -> None:
        try:
            self._serve_until_lost()
        finally:
            if not self._lost:  # an error of this thread: whoever waits must not wait for ever
                self._lose("the launcher's thread for it has failed")

    def _serve_until_lost(self) -> None:
        beat_s = self._silence_s / BEATS
        while not self._lost:
            limit_s = ANSWER_S if self._is_anew else self._silence_s
            is_watched = self._is_anew or self._is_watched
            left_s = max(0.0, self._heard_s + limit_s - time.monotonic())
            self._look(min(beat_s, left_s) if is_watched else beat_s)
            now_s = time.monotonic()
            if now_s - self._told_s >= beat_s:
                self.tell(frames.Alive())
            if is_watched and now_s - self._heard_s >= limit_s:
                self._lose(f"nothing was heard from it for {limit_s:g} s")
                self._client.kill()

    def _look(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _hear(self) -> None:
        chunk = os.read(self._stdout.fileno(), _READ_BYTES)
        self._heard_s = time.monotonic()
        if not chunk:
            self._selector.unregister(self._stdout)
            self._lose(self._last_words())
            return
        try:
            for line in self._cutter.feed(chunk):
                self._take(frames.read(line))
        except MessageError as error:
            self._lose(str(error))

    def _hear_ssh(self) -> None:
        chunk = os.read(self._stderr.fileno(), _READ_BYTES)
        if not chunk:
            with contextlib.suppress(KeyError):  # its last words may have been read meanwhile
                self._selector.unregister(self._stderr)
        self._said.extend(filter(None, chunk.decode(errors="replace").splitlines()))

    def _last_words(self) -> str:
        """The end of the connection, with the client's last line."""
        end_s = time.monotonic() + _LAST_WORDS_S
        # What holds it open longer is a connection that SSH shares with others.
        while self._stderr in self._selector.get_map() and time.monotonic() < end_s:
            self._look(max(0.0, end_s - time.monotonic()))
        last = f" ({self._said[-1].strip()})" if self._said else ""
        return f"its {self._client.what} has ended{last}"

    def _take(self, frame: frames.Frame | None) -> None:
        match frame:
            case None | frames.Alive():
                pass
            case frames.Wrote() | frames.ProcessStarted() | frames.Begun() | frames.Exited():
                if (child := self._children.get(frame.name)) and child.returncode is None:
                    self._take_of(child, frame)
            case Ended() | Beat() | GivenUp() | Over():
                if self._line is not None:
                    self._line.send(frame)
            case frames.HostReady() if self._is_anew:
                self._is_anew, self._is_watched = False, True
            case frames.Problem() if self._is_anew:
                self._lose(frame.text)
            case _:
                if isinstance(frame, frames.Facts):
                    self.late_s = time.time() - frame.clock_s
                self._answers.put(frame)

    def _take_of(self, child: RemoteChild, frame: frames.Frame) -> None:
        match frame:
            case frames.ProcessStarted():
                child.pid = frame.pid
            case frames.Begun():
                note_init({REPORT_FILE: child.report})
            case frames.Wrote():
                data = frame.text.encode("latin-1")
                with contextlib.suppress(OSError):  # nobody reads it any more
                    while data:
                        data = data[os.write(child.inputs[frame.channel], data) :]
            case frames.Exited():
                if frame.report:
                    with contextlib.suppress(OSError):
                        Path(child.report).write_text(frame.report)
                child.end(frame.returncode)

    def _lose(self, why: str) -> None:
        self._lost = why
        self._answers.put(None)
        if not self._is_closing:
            for child in list(self._children.values()):
                self._give_up(child)

    def _give_up(self, child: RemoteChild) -> None:
        self._end(child, -signal.SIGHUP, f"was lost with its host {self.host}: {self._lost}")

    def _end(self, child: RemoteChild, returncode: int, lost: str = "") -> None:
        with self._writing:
            if child.returncode is None:
                child.lost = lost
                child.end(returncode)

    def _hear_launcher(self) -> None:
        for note in () if self._line is None else self._line.read():
            self.tell(note)

    def _close_line(self) -> None:
        if self._line is not None:
            self._selector.unregister(self._line)
            self._line.close()
            self._line = None
