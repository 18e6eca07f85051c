"""Runs the processes of one job: shows their output, forwards signals, waits for all.

One thread and one loop; ``ending.py`` decides, this file does.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, BinaryIO

from graphsplit.cli.launch.children import (
    Child,
    StartChild,
    StartInterruptedError,
    start_child,
)
from graphsplit.cli.launch.console import TURN_S, Console
from graphsplit.cli.launch.ending import SCHEDULER, JobEnding, describe
from graphsplit.cli.launch.environment import ChildSpec
from graphsplit.cli.launch.lines import LineCutter
from graphsplit.cli.launch.scheduler_line import SchedulerLine
from graphsplit.cli.launch.verdict import JobVerdict, verdict
from graphsplit.launcher_line import VARIABLE as LINE
from graphsplit.launcher_line import Ended, GivenUp, Line, Over, cut
from graphsplit.reports import VARIABLE as REPORT_FILE
from graphsplit.reports import EndReport, forget, has_begun, read_report
from graphsplit.security.private_files import open_instead

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READ_BYTES = 1 << 16
DRAIN_S = 1.0
NO_INIT = "ended without gs.init(): it took no part in the job; call gs.init() first in the script"


@dataclass
class _Output:
    """One stream of one process."""

    name: str
    channel: str
    pipe: IO[bytes]
    log: BinaryIO | None
    cutter: LineCutter = field(default_factory=LineCutter)


@dataclass(frozen=True)
class Restarts:
    """The processes and jobs that are started again when they were lost.

    Attributes:
        processes: How many processes may be started again while the others wait for them.
        jobs: How often all of them are started again, when the job asks for another try.
        with_scheduler: Whether the scheduler is one of those processes: it keeps a journal.
        goes_on: Whether the job goes on without processes that were lost.
    """

    processes: int = 0
    jobs: int = 0
    with_scheduler: bool = False
    goes_on: bool = False


NO_RESTARTS = Restarts()


def supervise(
    specs: Sequence[ChildSpec],
    command: Sequence[str],
    *,
    console: Console,
    log_dir: Path | None,
    restarts: Restarts = NO_RESTARTS,
    limit_s: float = math.inf,
    start: StartChild = start_child,
    interrupts: list[signal.Signals] | None = None,
) -> JobVerdict:
    """Start ``command`` once for each of ``specs`` and return how the job ended.

    A worker that ends without ``gs.init()`` has failed. ``interrupts`` takes the signals that ask
    for the job's end, for a ``start`` that lasts.
    """
    received = [] if interrupts is None else interrupts
    for tries_left in range(restarts.jobs, -1, -1):
        with contextlib.ExitStack() as stack:
            wakeup = stack.enter_context(catching_signals(received))
            job = _Job(specs, command, console=console, log_dir=log_dir, stack=stack, start=start)
            job.ending.restarts = restarts.processes
            job.ending.restarts_scheduler = restarts.with_scheduler
            job.ending.goes_on = restarts.goes_on
            stack.callback(job.kill_all)
            job.start()
            job.run(wakeup, received, limit_s)
            ended = verdict(job.ending, job.reports())
        if not (job.ending.asks_for_another_try and tries_left):
            break
        say(console, ended)
        console.say(f"graphsplit: starting the job again; {tries_left - 1} more tries after this")
    return ended


def say(console: Console, ended: JobVerdict) -> int:
    """Say how a job ended, unless all is well; its exit status."""
    if ended.line:
        console.say(ended.line)
    return ended.status


class _Job:
    """The processes of one job and what is known about them."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        command: Sequence[str],
        *,
        console: Console,
        log_dir: Path | None,
        stack: contextlib.ExitStack,
        start: StartChild,
    ) -> None:
        self._start_child = start
        self.ending = JobEnding({spec.name for spec in specs})
        self._specs = specs
        self._command = command
        self._console = console
        self._log_dir = log_dir
        self._stack = stack
        self._children: dict[str, Child] = {}
        self._logs: dict[str, BinaryIO] = {}
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="graphsplit-"))
        self._reports = {spec.name: Path(folder) / f"{spec.file_stem}.json" for spec in specs}
        self._selector = stack.enter_context(selectors.DefaultSelector())
        stack.callback(self._close_pipes)
        self._num_open = 0
        self._scheduler = SchedulerLine(time.monotonic)
        stack.callback(self._scheduler.close)

    def start(self) -> None:
        """Start all processes and watch their output."""
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for spec in self._specs:
                self._start(spec, self._open_log(spec))
        except StartInterruptedError:
            self.ending.running &= set(self._children)

    def _start(self, spec: ChildSpec, log: BinaryIO | None) -> None:
        report = self._reports[spec.name]
        forget(report)
        spec = replace(spec, variables={**spec.variables, REPORT_FILE: str(report)})
        child = (
            self._start_scheduler(spec)
            if spec.name == SCHEDULER
            else self._start_child(spec, self._command, ())
        )
        self._children[spec.name] = child
        for channel, pipe in (("stdout", child.stdout), ("stderr", child.stderr)):
            assert pipe is not None
            output = _Output(spec.name, channel, pipe, log)
            self._selector.register(pipe, selectors.EVENT_READ, output)
            self._num_open += 1

    def _start_scheduler(self, spec: ChildSpec) -> Child:
        self._forget_scheduler()
        with self._scheduler.opened() as (ours, theirs):
            self._selector.register(ours, selectors.EVENT_READ, ours)
            kept = theirs.fileno()
            spec = replace(spec, variables={**spec.variables, LINE: str(kept)})
            return self._start_child(spec, self._command, (kept,))

    def run(self, wakeup: socket.socket, received: list[signal.Signals], limit_s: float) -> None:
        """Serve output, exits and signals until nothing is left to wait for."""
        self._selector.register(wakeup, selectors.EVENT_READ)
        end_s = None if math.isinf(limit_s) else time.monotonic() + limit_s
        while self.ending.running:
            turn_s = time.monotonic() + TURN_S if self._console.turns else None
            known_s = (self.ending.next_s, self._scheduler.deadline_s, end_s, turn_s)
            next_s = min((at_s for at_s in known_s if at_s is not None), default=None)
            timeout = None if next_s is None else max(0.0, next_s - time.monotonic())
            self._read_ready(timeout)
            if self._console.turns:
                self._console.turn()
            self._hear_scheduler()
            while received:
                self.ending.interrupted(received.pop(0), now_s=time.monotonic())
            if end_s is not None and time.monotonic() >= end_s:
                self.ending.expired(limit_s, now_s=time.monotonic())
                end_s = None
            self._collect()
            if (signum := self.ending.due(time.monotonic())) is not None:
                self._signal_running(signum)
        self._drain()
        self._console.close()

    def reports(self) -> dict[str, EndReport]:
        """The reports of the processes about their end, by name."""
        found = {name: read_report(path) for name, path in self._reports.items()}
        return {name: report for name, report in found.items() if report is not None}

    def kill_all(self) -> None:
        """End whatever still runs; only after an error in the launcher is there anything."""
        for child in self._children.values():
            if child.returncode is None:
                child.signal_group(signal.SIGKILL)
                child.wait()

    def _collect(self) -> None:
        # Workers before the scheduler: its failure is only ever the echo of theirs.
        for name in reversed(self._children):
            if name not in self.ending.running:
                continue
            child = self._children[name]
            returncode = child.collect_if_ended()
            if returncode is None:
                continue
            why = self.ending.given_up.get(name, "")
            is_stray = returncode == 0 and self._is_stray(name)
            how = NO_INIT if is_stray else child.lost or describe(returncode) + child.where
            how = f"was given up: {why}" if why else how
            returncode = 1 if is_stray else returncode
            now_s = time.monotonic()
            if self.ending.exited(
                name, returncode=returncode, now_s=now_s, how=how, has_place=child.has_place
            ):
                self._start_again(name, how)
            elif name == SCHEDULER:
                self._forget_scheduler()
            elif SCHEDULER in self._children:
                self._tell_end(name, how)
            if self.ending.first_failed:
                self._end_those_outside()

    def _end_those_outside(self) -> None:
        """A process that has yet to call ``gs.init()`` would only join to hear of the failure."""
        for name in self.ending.running - self.ending.told:
            if not has_begun(self._reports[name]):
                self.ending.told.add(name)
                self._children[name].signal_group(signal.SIGTERM)

    def _is_stray(self, name: str) -> bool:
        """Whether a worker took no part in the job: it did all the work, as each of the others."""
        return name.startswith("worker ") and not has_begun(self._reports[name])

    def _tell_end(self, name: str, how: str) -> None:
        """The scheduler may never have heard of that process."""
        report = read_report(self._reports[name])
        error = report.headline if report is not None and report.rank < 0 else ""
        rank, pid = int(name.split()[-1]), self._children[name].pid
        self._scheduler.say(Ended(rank, pid, how, cut(error)))

    def _hear_scheduler(self) -> None:
        for note in self._scheduler.hear():
            match note:
                case GivenUp():
                    name = f"worker {note.rank}"
                    if name in self._children and self._children[name].pid == note.pid:
                        self._give_up(name, note.why, is_final=note.is_final)
                case Over():
                    for name in self.ending.over(f"worker {rank}" for rank in note.vacant):
                        self._children[name].signal_group(signal.SIGKILL)
        silent_s = self._scheduler.silent_for()
        if silent_s is not None:
            why = f"nothing was heard from it for {silent_s:g} s (see MS_NODE_TIMEOUT)"
            self._give_up(SCHEDULER, why, is_final=True)
            self._forget_scheduler()

    def _give_up(self, name: str, why: str, *, is_final: bool) -> None:
        if self.ending.give_up(name, why, is_final=is_final):
            self._children[name].signal_group(signal.SIGKILL)

    def _forget_scheduler(self) -> None:
        if self._scheduler.line is not None:
            self._selector.unregister(self._scheduler.line)
            self._scheduler.close()

    def _start_again(self, name: str, how: str) -> None:
        self._console.say(
            f"graphsplit: {name} {how}; starting it again ({self.ending.restarts} restarts left)"
        )
        self._start(next(spec for spec in self._specs if spec.name == name), self._logs.get(name))

    def _signal_running(self, signum: signal.Signals) -> None:
        for name in self.ending.running:
            # Before it has joined it has nothing to say of an interrupt but where its imports were.
            is_outside = signum == signal.SIGINT and not has_begun(self._reports[name])
            self._children[name].signal_group(signal.SIGTERM if is_outside else signum)

    def _drain(self) -> None:
        """Read what the pipes still hold; something that left the group may keep one open."""
        deadline_s = time.monotonic() + DRAIN_S
        while self._num_open and (left_s := deadline_s - time.monotonic()) > 0:
            self._read_ready(left_s)

    def _read_ready(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, _Output):
                self._read(key.data)
            elif not isinstance(key.data, Line):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.recv(READ_BYTES)

    def _read(self, output: _Output) -> None:
        chunk = os.read(output.pipe.fileno(), READ_BYTES)
        pieces = output.cutter.feed(chunk) if chunk else output.cutter.finish()
        if output.log is not None:
            self._keep(output, output.log, chunk)
        for piece in pieces:
            self._console.show(output.name, output.channel, piece)
        if not chunk:
            self._selector.unregister(output.pipe)
            output.pipe.close()  # a job may outlive many processes
            self._num_open -= 1

    def _keep(self, output: _Output, log: BinaryIO, chunk: bytes) -> None:
        """Write to a log. A disk that is full ends the log, not the job."""
        try:
            while chunk:
                chunk = chunk[log.write(chunk) :]
        except OSError as error:
            output.log = None
            self._logs.pop(output.name, None)
            stem = next(spec.file_stem for spec in self._specs if spec.name == output.name)
            self._console.say(
                f"graphsplit: cannot write {self._log_dir}/{stem}.log: {error.strerror}; the job "
                f"goes on, and this log ends here\n"
                f"  Fix: free space there, or give --log-dir another folder."
            )

    def _close_pipes(self) -> None:
        """Close pipes that something holds open that outlived its process."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Output):
                key.data.pipe.close()

    def _open_log(self, spec: ChildSpec) -> BinaryIO | None:
        if self._log_dir is None:
            return None
        path = self._log_dir / f"{spec.file_stem}.log"
        log = open_instead(path, mode=0o666, buffering=0)  # no link or pipe that was planted there
        self._logs[spec.name] = self._stack.enter_context(log)
        return log


@contextlib.contextmanager
def catching_signals(received: list[signal.Signals]) -> Iterator[socket.socket]:
    """Collect the signals that end a job in a list, and wake a waiting selector for each.

    The end of a child wakes it as well.
    """
    was_interrupted = False

    def note(signum: int, _frame: FrameType | None) -> None:
        nonlocal was_interrupted
        if signum != signal.SIGCHLD:
            was_interrupted = True
            received.append(signal.Signals(signum))

    reading, writing = socket.socketpair()
    with reading, writing:
        reading.setblocking(False)
        writing.setblocking(False)
        previous_fd = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        previous = {
            signum: signal.signal(signum, note) for signum in (*END_SIGNALS, signal.SIGCHLD)
        }
        try:
            yield reading
        finally:
            for signum, handler in previous.items():
                # Who presses Ctrl-C once more must not change the status of what is over.
                is_over = was_interrupted and signum in END_SIGNALS
                signal.signal(signum, signal.SIG_IGN if is_over else handler)
            signal.set_wakeup_fd(previous_fd)
