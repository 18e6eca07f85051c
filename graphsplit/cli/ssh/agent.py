"""The agent of a host: starts the processes that the launcher wants there, and tells it of them.

It decides nothing. What it is told comes over its standard input, which SSH keeps open; when that
closes, or nothing has come for too long, it ends everything that it has started. One thread.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import click

from graphsplit.cli.job import script_command, starting
from graphsplit.cli.launch.children import Child, StartChild, StartInterruptedError
from graphsplit.cli.launch.ending import SCHEDULER
from graphsplit.cli.launch.environment import OF_A_JOB, ChildSpec, defaults
from graphsplit.cli.launch.hosts import worker_address
from graphsplit.cli.launch.supervise import READ_BYTES, catching_signals
from graphsplit.cli.ssh import frames
from graphsplit.cli.ssh.facts import own_facts
from graphsplit.cli.ssh.links import (
    answer_one,
    measure,
    reserve,
    reserve_for_workers,
    why_not_reached,
)
from graphsplit.cli.ssh.readiness import digest_of, enter, require_certificates_of
from graphsplit.launcher_line import VARIABLE as LINE
from graphsplit.launcher_line import Line, Note
from graphsplit.launchers.environment import LOOPBACK
from graphsplit.reports import VARIABLE as REPORT_FILE
from graphsplit.reports import forget, has_begun

LOOK_S = 0.1  # how often it looks who has called gs.init(), until all have
FIRST_KEPT = 200
LABELS = "GS_WORKER_LABELS"
BEATS = 6  # in the time in which silence means that the other side is lost
_MOST_REPORT_BYTES = 64 << 10
_IN_TURN = frames.Setup | frames.Reach | ChildSpec | frames.Listen | frames.Measure
_NOT_MINE = (*OF_A_JOB, "GS_JOB_TOKEN_FILE")


@dataclass
class _Process:
    """One process of this host."""

    child: Child
    report: Path
    has_begun: bool = False


class Agent:
    """The one process of ours on a host, which starts all others.

    Args:
        orders: The file descriptor from which orders come.
        answers: That to which answers go.
        address: This host's address; empty: where SSH has reached it.
        kept: Open files that every worker gets.
    """

    def __init__(self, orders: int, answers: int, address: str, kept: tuple[int, ...]) -> None:
        self._orders, self._answers = orders, answers
        self._own_address, self._kept = address, kept
        self._cutter = frames.Cutter()
        self._waiting: deque[frames.Frame] = deque()
        self._beginning = ""
        self._unwanted: dict[str, int] = {}
        self._interrupts: list[signal.Signals] = []
        self._is_over = False
        self._processes: dict[str, _Process] = {}
        self._stack = contextlib.ExitStack()
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._start: StartChild | None = None
        self._command: list[str] = []
        self._folder = ""
        self._address: dict[str, str] = {}
        self._reserved = self._stack.enter_context(contextlib.ExitStack())
        self._line: Line | None = None
        self._silence_s = self._heard_s = self._told_s = 0.0

    def serve(self) -> None:
        """Do as the launcher says until it has gone, or some signal asks for the end."""
        with self._stack, catching_signals(self._interrupts) as wakeup:
            self._selector.register(wakeup, selectors.EVENT_READ, partial(wakeup.recv, READ_BYTES))
            self._selector.register(self._orders, selectors.EVENT_READ, self._hear)
            try:
                self._tell(own_facts(os.environ, self._own_address))
                while not (self._is_over or self._interrupts):
                    self._turn()
            finally:
                self._kill_all()

    def _turn(self) -> None:
        begins = any(not one.has_begun for one in self._processes.values())
        beat_s = self._silence_s / BEATS if self._silence_s else None
        self._look(0 if self._waiting else LOOK_S if begins else beat_s)
        if self._waiting:
            self._do(self._waiting.popleft())
        self._collect()

    def _look(self, timeout_s: float | None) -> None:
        """Read what has come, and tell that this host is there."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        now_s = time.monotonic()
        if self._silence_s:
            self._is_over |= now_s - self._heard_s > self._silence_s
            if now_s - self._told_s >= self._silence_s / BEATS:
                self._tell(frames.Alive())

    def _tell(self, frame: frames.Frame) -> None:
        data = frames.written(frame)
        self._told_s = time.monotonic()
        while data:
            data = data[os.write(self._answers, data) :]

    def _hear(self) -> None:
        chunk = os.read(self._orders, READ_BYTES)
        self._heard_s = time.monotonic()
        self._is_over |= not chunk
        for line in self._cutter.feed(chunk):
            order = frames.read(line)
            if isinstance(order, frames.Signal):
                self._signal(order)
            elif isinstance(order, Note) and self._line is not None:
                self._line.send(order)
            elif isinstance(order, _IN_TURN):
                self._waiting.append(order)

    def _signal(self, order: frames.Signal) -> None:
        process = self._processes.get(order.name)
        waiting = [one.name for one in self._waiting if isinstance(one, ChildSpec)]
        if process is not None:
            process.child.signal_group(signal.Signals(order.signum))
        elif order.name in (self._beginning, *waiting):
            self._unwanted[order.name] = order.signum

    def _do(self, order: frames.Frame) -> None:
        try:
            match order:
                case frames.Setup():
                    self._tell(self._prepare(order))
                case frames.Reach():
                    self._tell(frames.Dialed(why_not_reached(order.peers)))
                case frames.Listen():
                    self._tell(frames.Listening(self._listen(order)))
                case frames.Measure():
                    self._tell(frames.Measured(*measure(order.host, order.port, order.secret)))
                case ChildSpec():
                    self._beginning = order.name
                    self._begin(order)
                    self._beginning = ""
                    self._unwanted.pop(order.name, None)
        except click.ClickException as error:
            self._tell(frames.Problem(error.message))

    def _listen(self, order: frames.Listen) -> int:
        listener = self._stack.enter_context(reserve(order.host, 0))
        answer = partial(answer_one, listener, order.secret)
        self._selector.register(listener, selectors.EVENT_READ, answer)
        return int(listener.getsockname()[1])

    def _prepare(self, setup: frames.Setup) -> frames.HostReady:
        """See that all is there.

        Raises:
            click.ClickException: Something is not; says what, and the fix.
        """
        enter(Path(setup.workdir))
        job = setup.job
        digest = "" if job.as_module else digest_of(job.script)
        require_certificates_of(setup)
        port = job.port or 0
        if setup.has_scheduler:
            reserved = self._reserved.enter_context(reserve(job.host, port))
            port = int(reserved.getsockname()[1])
        self._address = worker_address(os.environ, job.host, port)
        named = {**os.environ, **self._address}.get("MS_WORKER_IP", "").strip() or LOOPBACK[0]
        scheduler, ports = (job.host, port), setup.worker_ports
        listener = self._reserved.enter_context(reserve_for_workers(named, scheduler, ports))
        own_host, own_port = listener.getsockname()[:2]
        self._heard_s, self._silence_s = time.monotonic(), setup.silence_s
        own_folder = tempfile.TemporaryDirectory(prefix="graphsplit-")
        self._folder = self._stack.enter_context(own_folder)
        job = replace(job, port=port)
        if self._kept:
            job = replace(job, script=Path("-c"), called=str(job.script), kept=self._kept)
        self._command = script_command(job)
        self._start = self._stack.enter_context(starting(job, self._say, self._wait, _Stop(self)))
        return frames.HostReady(port, own_host, own_port, digest)

    def _say(self, text: str) -> None:
        """Under the name of the process that is being started."""
        self._tell(frames.Wrote(self._beginning, "stderr", f"{text}\n"))

    def _wait(self, _: str) -> None:
        """Stay there for the launcher while torch is imported."""
        self._look(0)

    def _begin(self, order: ChildSpec) -> None:
        if self._start is None or order.name in self._unwanted:
            signum = self._unwanted.get(order.name, signal.SIGTERM)
            self._tell(frames.Exited(order.name, -signum, ""))
            return
        self._reserved.close()
        report = Path(self._folder) / f"{order.file_stem}.json"
        forget(report)
        own = {name: value for name, value in os.environ.items() if name not in _NOT_MINE}
        variables = {**defaults(), **own, **self._address, **order.variables}
        variables |= {REPORT_FILE: str(report), **_labels(own, order)}
        spec = replace(order, variables=variables)
        try:
            child = self._start_scheduler(spec) if spec.name == SCHEDULER else self._started(spec)
        except StartInterruptedError:
            self._tell(frames.Exited(order.name, -signal.SIGTERM, ""))
            return
        self._processes[order.name] = _Process(child, report)
        self._tell(frames.ProcessStarted(order.name, child.pid))
        for channel, pipe in (("stdout", child.stdout), ("stderr", child.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            read = partial(self._read, order.name, channel, pipe)
            self._selector.register(pipe, selectors.EVENT_READ, read)
        if order.name in self._unwanted:
            child.signal_group(signal.Signals(self._unwanted[order.name]))

    def _started(self, spec: ChildSpec, *kept: int) -> Child:
        assert self._start is not None
        return self._start(spec, self._command, kept)

    def _start_scheduler(self, spec: ChildSpec) -> Child:
        """With a line to its launcher; what is said on it is handed on."""
        self._hang_up()
        self._line, theirs = Line.pair()
        self._selector.register(self._line, selectors.EVENT_READ, self._hear_scheduler)
        with contextlib.closing(theirs):
            number = theirs.fileno()
            variables = {**spec.variables, LINE: str(number)}
            return self._started(ChildSpec(spec.name, variables), number)

    def _hear_scheduler(self) -> None:
        assert self._line is not None
        for note in self._line.read():
            self._tell(note)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._selector.unregister(self._line)
            self._line.close()
            self._line = None

    def _read(self, name: str, channel: str, pipe: IO[bytes]) -> bool:
        """Whether there may be more to read."""
        try:
            chunk = os.read(pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return False
        if chunk:
            self._tell(frames.Wrote(name, channel, chunk.decode("latin-1")))
        else:
            self._selector.unregister(pipe)
            pipe.close()
        return bool(chunk)

    def _collect(self) -> None:
        for name, process in list(self._processes.items()):
            returncode = process.child.collect_if_ended()
            if not process.has_begun and has_begun(process.report):
                process.has_begun = True
                self._tell(frames.Begun(name))
            if returncode is not None:
                self._end(name, process, returncode)

    def _end(self, name: str, process: _Process, returncode: int) -> None:
        for channel, pipe in (("stdout", process.child.stdout), ("stderr", process.child.stderr)):
            assert pipe is not None
            while not pipe.closed and self._read(name, channel, pipe):
                pass
            if not pipe.closed:  # something outlived the process, and has it
                self._selector.unregister(pipe)
                pipe.close()
        if name == SCHEDULER:
            self._hang_up()
        report = ""
        with contextlib.suppress(OSError), process.report.open("rb") as file:
            report = file.read(_MOST_REPORT_BYTES).decode(errors="replace")
        del self._processes[name]
        self._tell(frames.Exited(name, returncode, report))

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.child.signal_group(signal.SIGKILL)
            process.child.wait()


class _Stop(list[signal.Signals]):
    """True when a process that is being started is wanted no more."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    def __bool__(self) -> bool:
        agent = self._agent
        return bool(agent._is_over or agent._interrupts or agent._unwanted)


def _labels(own: Mapping[str, str], order: ChildSpec) -> dict[str, str]:
    """The labels of a worker: the host's own, those of its job, and those of its place."""
    given = [one.get(LABELS, "") for one in (own, order.variables)]
    found = ",".join(filter(None, (*given, *order.labels)))
    return {LABELS: found} if found else {}


def main() -> None:
    """Serve the launcher at the other end of standard input and output.

    Arguments, where it was not SSH that started this: this host's address, and the numbers of
    open files for workers, which have them as ``FIRST_KEPT`` and on.
    """
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever prints here must not look like an answer
    address, *files = sys.argv[1:] or [""]
    kept = tuple(range(FIRST_KEPT, FIRST_KEPT + len(files)))
    for file, number in zip(files, kept, strict=True):
        os.dup2(int(file), number)
    os.write(answers, b"\n")  # a login shell may have printed there, without an end of line
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        Agent(0, answers, address, kept).serve()


if __name__ == "__main__":
    main()
