"""The scheduler's process: a thin server that feeds ``SchedulerState`` and does what it says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphsplit.cluster.member.identity import own_host
from graphsplit.cluster.scheduler.admission import Admission
from graphsplit.cluster.scheduler.job.events import (
    Connected,
    Disconnected,
    Drop,
    Effect,
    Event,
    Exit,
    Interrupted,
    Log,
    Malformed,
    Persist,
    Received,
    Refuse,
    Send,
    TellLauncher,
    Tick,
    ToldByLauncher,
)
from graphsplit.cluster.scheduler.job.rules import JobIdentity, JobRules
from graphsplit.cluster.scheduler.journal import Journal
from graphsplit.cluster.scheduler.state_machine import SchedulerState
from graphsplit.cluster.status.codec import JOB_STATUS
from graphsplit.cluster.status.job_status import JobStatus
from graphsplit.cluster.status.metrics import status_metrics
from graphsplit.cluster.wire.codec import encode_fence, encode_plan, encode_scheduler, open_worker
from graphsplit.cluster.wire.fencing import StreamGuard, Verdict
from graphsplit.cluster.wire.fields import MessageError
from graphsplit.cluster.wire.limits import TICK_INTERVAL_S, heartbeat_interval_s
from graphsplit.cluster.wire.messages import (
    Abort,
    Fence,
    Formed,
    Peer,
    Refused,
    Register,
    SchedulerMessage,
)
from graphsplit.cluster.wire.rpc import (
    METHOD,
    SERVICE,
    STATUS_METHOD,
    format_address,
    max_connections,
    server_options,
)
from graphsplit.errors import ConfigurationError
from graphsplit.failure import FailureCause
from graphsplit.launcher_line import Beat, Ended, Line, Note
from graphsplit.logs import CONTEXT, Say, configure, teller
from graphsplit.metrics_port import Metric, serve_metrics
from graphsplit.reports import write_report
from graphsplit.security.grpc_ports import add_port
from graphsplit.security.names import SCHEDULER
from graphsplit.security.protection import Protection, load_protection, require_protection
from graphsplit.settings import ClusterSettings

# A worker that does not read for so long that this many messages wait for it is cut off.
_MAX_OUTBOX = 4_096
_STOP_GRACE_S = 0.5
# Python itself takes seconds to tear down a large process on a busy machine, and beats no more.
_EXIT_S = 30.0
_LOOK_S = 5.0
# A plan for many workers is large, and goes to all: gRPC must not hold a copy for each at once.
_LARGE_BYTES = 64 << 10
_MAX_LARGE_WRITES = 16
_NO_LIMIT = contextlib.nullcontext()
JOURNAL_NAME = "scheduler.journal"


class _Outbox(asyncio.Queue["tuple[bytes, ...] | None"]):
    """What waits to be written to one stream; None ends it.

    Attributes:
        incarnation: The life of the worker at the other end.
        num_sent: How many messages were put in.
    """

    def __init__(self, incarnation: str) -> None:
        super().__init__(_MAX_OUTBOX)
        self.incarnation = incarnation
        self.num_sent = 0


def serve(
    settings: ClusterSettings,
    *,
    on_listening: Callable[[str, int], None] | None = None,
    log: Callable[[str], None] | None = None,
) -> int:
    """Run the scheduler until the job ends.

    In the main thread, SIGINT and SIGTERM end the job in order; a second one ends it at once.

    Args:
        settings: The cluster. Port 0 takes any free port.
        on_listening: Called with host and real port once workers can connect.
        log: Takes the lines for the person who watches; None: the logger ``graphsplit``.

    Returns:
        The exit status: 0 when all workers finished, 130 or 143 when the job was interrupted by
        SIGINT or SIGTERM, 75 when it is to be started again (``GS_RECOVERY=restart``), else 1.

    Raises:
        JournalError: The journal at ``MS_RECOVERY_PATH`` cannot be read, or is not to be trusted.
        ConfigurationError: The address cannot be bound, or nothing protects it; or a file of the
            protection is not what it should be.
    """
    if log is None:
        configure(os.environ, prefix="scheduler", stream=lambda: sys.stdout)
    return asyncio.run(_serve(settings, on_listening, teller(log)))


async def _serve(
    settings: ClusterSettings,
    on_listening: Callable[[str, int], None] | None,
    log: Say,
) -> int:
    import grpc

    protection = load_protection(settings.security, role=SCHEDULER)
    require_protection(settings.scheduler_host, protection, what="the scheduler")
    line = _line_to_launcher(log)
    sessions = _Sessions(settings, protection, log, line)
    server = grpc.aio.server(
        options=server_options(num_workers=settings.num_workers, silence_s=settings.silence_s),
        maximum_concurrent_rpcs=max_connections(settings.num_workers),
    )
    # Without serializers gRPC hands over bytes, and the codec decides what is a message.
    handlers = {
        METHOD: grpc.stream_stream_rpc_method_handler(sessions.session),
        STATUS_METHOD: grpc.stream_stream_rpc_method_handler(sessions.tell_status),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = _bind(server, settings, protection)
    await server.start()
    address = format_address(settings.scheduler_host, port)
    log(
        f"listening on {address} for {settings.num_workers} workers, pid {os.getpid()}",
        event="listening",
    )
    if on_listening is not None:
        on_listening(settings.scheduler_host, port)
    ticker = asyncio.create_task(sessions.tick())
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(_serve_metrics(sessions, settings, protection))
            stack.enter_context(_signals_to(sessions))
            stack.enter_context(_notes_to(sessions, line))
            return await sessions.done
    finally:
        ticker.cancel()
        await server.stop(_STOP_GRACE_S)
        sessions.take_leave()


def _line_to_launcher(log: Say) -> Line | None:
    try:
        return Line.of(os.environ)
    except (OSError, ValueError) as error:
        # Whoever passed our environment on did not pass the line.
        log(f"no line to the launcher: {error}", event="warning", level="warning")
        return None


@contextlib.contextmanager
def _notes_to(sessions: _Sessions, line: Line | None) -> Iterator[None]:
    """Turn what the launcher says into events."""
    if line is None:
        yield
        return
    host = own_host()

    def hear() -> None:
        for note in line.read():
            if isinstance(note, Ended):
                sessions.apply(ToldByLauncher(host, note))

    loop = asyncio.get_running_loop()
    loop.add_reader(line.fileno(), hear)
    try:
        yield
    finally:
        loop.remove_reader(line.fileno())


def _serve_metrics(
    sessions: _Sessions, settings: ClusterSettings, protection: Protection
) -> Callable[[], None]:
    loop = asyncio.get_running_loop()

    async def look() -> JobStatus:
        return sessions.status()

    def look_from_outside() -> Iterator[Metric]:
        # The state belongs to the loop's thread; metrics are asked for from others.
        yield from status_metrics(asyncio.run_coroutine_threadsafe(look(), loop).result(_LOOK_S))

    return serve_metrics(
        look_from_outside,
        settings.watching,
        settings.security,
        protection,
        offset=0,
        what="the metrics of the scheduler",
    )


def _bind(server: Any, settings: ClusterSettings, protection: Protection) -> int:
    """Bind the configured address and no other; return the real port."""
    address = format_address(settings.scheduler_host, settings.scheduler_port)
    port = add_port(server, address, protection)
    if port:
        return port
    raise ConfigurationError(
        f"the scheduler cannot listen on {address} (MS_SCHED_HOST, MS_SCHED_PORT): the port is in "
        f"use, or the address is not one of this machine\n"
        f"  Fix: choose another MS_SCHED_PORT for every process of the job; if a scheduler of an "
        f"earlier run is still there, end it first (`ss -ltnp` shows who listens)"
    )


@contextlib.contextmanager
def _signals_to(sessions: _Sessions) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into events, where Python lets us: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, sessions.apply, Interrupted(number.name, int(number)))
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _rules_of(settings: ClusterSettings) -> JobRules:
    return JobRules(
        num_workers=settings.num_workers,
        topo_timeout_s=settings.topo_timeout_s,
        node_timeout_s=settings.node_timeout_s,
        receive_timeout_s=settings.receive_timeout_s,
        recovery=settings.recovery,
        keeps_journal=bool(settings.recovery_path),
    )


def _first_state(rules: JobRules, journal: Journal | None, log: Say) -> SchedulerState:
    """A new job, or the one that a lost scheduler wrote down."""
    now = time.monotonic()
    image = None if journal is None else journal.read(rules, log)
    if image is not None:
        return SchedulerState.restored(rules, image, now)
    # 63 bits: what both torch.manual_seed and a signed 64-bit number can hold.
    identity = JobIdentity(job=secrets.token_hex(16), seed=secrets.randbits(63))
    return SchedulerState(rules, identity, now)


class _Sessions:
    """All streams of one scheduler. Everything runs on one event loop, so nothing is locked."""

    def __init__(
        self, settings: ClusterSettings, protection: Protection, log: Say, line: Line | None = None
    ) -> None:
        self._log = log
        self._line = line
        self._beat = Beat(settings.silence_s)
        self._next_beat_s = 0.0
        self._admission = Admission(settings.num_workers, protection, log)
        self._outboxes: dict[int, _Outbox] = {}
        self._num_nodes = 0
        self._encoded: tuple[SchedulerMessage, bytes] | None = None
        self._plan: tuple[tuple[Peer, ...], bytes] | None = None
        self._large = asyncio.Semaphore(_MAX_LARGE_WRITES)
        path = settings.recovery_path
        self._journal = Journal(Path(path) / JOURNAL_NAME) if path else None
        self._state = _first_state(_rules_of(settings), self._journal, log)
        CONTEXT.source = self._log_fields
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        for effect in self._state.open():
            self._carry_out(effect)

    def _log_fields(self) -> dict[str, Any]:
        return {"job": self._state.job, "generation": self._state.generation}

    async def session(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """One stream, from its opening until either side ends it."""
        first = await self._admission.admit(requests, context)
        if first is None:
            return
        node = self._num_nodes = self._num_nodes + 1
        outbox = self._outboxes[node] = _Outbox(first.incarnation)
        self.apply(Connected(node))
        self.apply(Received(node, first))
        reader = asyncio.create_task(self._read(node, requests, outbox, first))
        try:
            while (parts := await outbox.get()) is not None:
                is_large = sum(len(part) for part in parts) > _LARGE_BYTES
                async with self._large if is_large else _NO_LIMIT:
                    await context.write(b"".join(parts))
        finally:
            # Also reached, by cancellation, when the connection breaks.
            del self._outboxes[node]
            reader.cancel()
            self.apply(Disconnected(node))

    async def tell_status(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Answer somebody who asks what is going on."""
        if await self._admission.admit_visitor(requests, context):
            await context.write(JOB_STATUS.encode(self.status()))

    def status(self) -> JobStatus:
        """What is going on."""
        status = self._state.status(time.monotonic())
        return replace(status, num_refused=status.num_refused + self._admission.num_refused)

    async def _read(
        self, node: int, requests: AsyncIterator[bytes], outbox: _Outbox, first: Register
    ) -> None:
        job = first.resume.job if first.resume is not None else ""
        guard = StreamGuard(Fence(job, incarnation=first.incarnation, number=1))
        try:
            async for data in requests:
                try:
                    fence, message = open_worker(data)
                except MessageError as error:
                    self.apply(Malformed(node, str(error)))
                    continue
                verdict = guard.check(fence)
                if verdict is Verdict.BREAK:
                    self._log(
                        f"a stream was broken off: {guard.why_broken}",
                        event="stream_broken",
                        level="warning",
                    )
                    return
                if verdict is Verdict.TAKE:
                    self.apply(Received(node, message, fence.generation))
        finally:
            _close(outbox)

    async def tick(self) -> None:
        """Tell the state that time passes, until the job ends."""
        while True:
            self.apply(Tick())
            if time.monotonic() >= self._next_beat_s:
                self._next_beat_s = time.monotonic() + heartbeat_interval_s(self._beat.within_s)
                self._tell_launcher(self._beat)
            await asyncio.sleep(TICK_INTERVAL_S)

    def take_leave(self) -> None:
        """Beat for the last time, and hang up: from here on, all is up to Python."""
        if self._line is not None:
            self._line.send(Beat(_EXIT_S))
            self._line.close()

    def apply(self, event: Event) -> None:
        """Feed one event to the state and carry out what it says."""
        if self.done.done():
            return
        try:
            for effect in self._state.handle(event, time.monotonic()):
                self._carry_out(effect)
        except Exception as error:
            self._break_down(error)

    def _break_down(self, error: Exception) -> None:
        """A bug of ours. It would happen again, so all are told, and end."""
        kind = f"{type(error).__name__}: {error}".splitlines()[0]
        cause = FailureCause("exception", f"the scheduler failed: {kind}")
        for node in list(self._outboxes):
            self._send(node, Abort(cause))
            _close(self._outboxes[node])
        write_report(os.environ, cause)
        self.done.set_exception(error)

    def _tell_launcher(self, note: Note) -> None:
        if self._line is not None:
            self._line.send(note)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect.node, effect.message)
            case Refuse():
                self._send(effect.node, Refused(effect.reason))
                _close(self._outboxes.get(effect.node))
            case Drop():
                _close(self._outboxes.get(effect.node))
            case TellLauncher():
                self._tell_launcher(effect.note)
            case Persist():
                assert self._journal is not None
                self._journal.write(effect.image)
            case Log():
                self._log(effect.line, event=effect.event, level=effect.level)
            case Exit():
                for outbox in self._outboxes.values():
                    _close(outbox)
                if effect.cause is not None:
                    write_report(os.environ, effect.cause)
                self.done.set_result(effect.status)

    def _send(self, node: int, message: SchedulerMessage) -> None:
        outbox = self._outboxes.get(node)
        if outbox is None:
            return
        if outbox.qsize() >= _MAX_OUTBOX - 1:
            _close(outbox)
            return
        outbox.num_sent += 1
        fence = Fence(self._state.job, self._state.generation, outbox.incarnation, outbox.num_sent)
        outbox.put_nowait((*self._parts_of(message), encode_fence(fence)))

    def _parts_of(self, message: SchedulerMessage) -> tuple[bytes, ...]:
        """The message as bytes in parts: what goes to everybody is encoded, and held, once."""
        if isinstance(message, Formed):
            return self._plan_for(message)
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = (message, encode_scheduler(message))
        return (self._encoded[1],)

    def _plan_for(self, message: Formed) -> tuple[bytes, ...]:
        if self._plan is None or self._plan[0] is not message.peers:
            self._plan = (message.peers, encode_plan(message.peers))
        return encode_scheduler(replace(message, peers=())), self._plan[1]


def _close(outbox: _Outbox | None) -> None:
    """End a stream after what is already queued. The last place of the queue is kept for this."""
    if outbox is not None and not outbox.full():
        outbox.put_nowait(None)
