"""The scheduler's process: a thin server that feeds ``SchedulerState`` and does what it says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from graphsplit.cluster.codec import MessageError, decode_worker, encode_scheduler
from graphsplit.cluster.events import (
    Connected,
    Disconnected,
    Effect,
    Event,
    Exit,
    Interrupted,
    Log,
    Malformed,
    Received,
    Refuse,
    Send,
    Tick,
)
from graphsplit.cluster.limits import TICK_INTERVAL_S
from graphsplit.cluster.messages import Refused, SchedulerMessage
from graphsplit.cluster.rpc import METHOD, SERVICE, format_address, max_connections, server_options
from graphsplit.cluster.scheduler_state import JobIdentity, JobRules, SchedulerState
from graphsplit.errors import ConfigurationError
from graphsplit.settings import ClusterSettings

# A worker that does not read for so long that this many messages wait for it is cut off.
_MAX_OUTBOX = 4_096
_STOP_GRACE_S = 0.5


class _Outbox(asyncio.Queue["bytes | None"]):
    """What waits to be written to one stream; None ends it."""


def print_log(line: str) -> None:
    """Print one line of the scheduler's log. A reader that has gone must not end the job."""
    with contextlib.suppress(OSError, ValueError):
        # One write, so that lines of several processes on one terminal do not mix.
        print("".join(f"[scheduler] {part}\n" for part in line.splitlines()), end="", flush=True)


def serve(
    settings: ClusterSettings,
    *,
    on_listening: Callable[[str, int], None] | None = None,
    log: Callable[[str], None] = print_log,
) -> int:
    """Run the scheduler until the job ends.

    In the main thread, SIGINT and SIGTERM end the job in order; a second one ends it at once.

    Args:
        settings: The cluster. Port 0 takes any free port.
        on_listening: Called with host and real port once workers can connect.
        log: Takes the lines for the person who watches.

    Returns:
        The exit status: 0 when all workers finished, 130 or 143 when the job was interrupted by
        SIGINT or SIGTERM, else 1.

    Raises:
        ConfigurationError: The address cannot be bound.
    """
    return asyncio.run(_serve(settings, on_listening, log))


async def _serve(
    settings: ClusterSettings,
    on_listening: Callable[[str, int], None] | None,
    log: Callable[[str], None],
) -> int:
    import grpc

    sessions = _Sessions(settings, log)
    server = grpc.aio.server(
        options=server_options(
            num_workers=settings.num_workers, node_timeout_s=settings.node_timeout_s
        ),
        maximum_concurrent_rpcs=max_connections(settings.num_workers),
    )
    # Without serializers gRPC hands over bytes, and the codec decides what is a message.
    handler = grpc.stream_stream_rpc_method_handler(sessions.session)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
    )
    port = _bind(server, settings)
    await server.start()
    address = format_address(settings.scheduler_host, port)
    log(f"listening on {address} for {settings.num_workers} workers, pid {os.getpid()}")
    if on_listening is not None:
        on_listening(settings.scheduler_host, port)
    ticker = asyncio.create_task(sessions.tick())
    try:
        with _signals_to(sessions):
            return await sessions.done
    finally:
        ticker.cancel()
        await server.stop(_STOP_GRACE_S)


def _bind(server: Any, settings: ClusterSettings) -> int:
    """Bind the configured address and no other; return the real port."""
    address = format_address(settings.scheduler_host, settings.scheduler_port)
    try:
        port = int(server.add_insecure_port(address))
    except RuntimeError:
        port = 0
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


class _Sessions:
    """All streams of one scheduler. Everything runs on one event loop, so nothing is locked."""

    def __init__(self, settings: ClusterSettings, log: Callable[[str], None]) -> None:
        self._log = log
        self._outboxes: dict[int, _Outbox] = {}
        self._num_nodes = 0
        rules = JobRules(
            num_workers=settings.num_workers,
            topo_timeout_s=settings.topo_timeout_s,
            node_timeout_s=settings.node_timeout_s,
            receive_timeout_s=settings.receive_timeout_s,
        )
        # 63 bits: what both torch.manual_seed and a signed 64-bit number can hold.
        identity = JobIdentity(job=secrets.token_hex(16), seed=secrets.randbits(63))
        self._state = SchedulerState(rules, identity, time.monotonic())
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def session(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """One stream, from its opening until either side ends it."""
        node = self._num_nodes = self._num_nodes + 1
        outbox = self._outboxes[node] = _Outbox(_MAX_OUTBOX)
        self.apply(Connected(node))
        reader = asyncio.create_task(self._read(node, requests, outbox))
        try:
            while (message := await outbox.get()) is not None:
                await context.write(message)
        finally:
            # Also reached, by cancellation, when the connection breaks.
            del self._outboxes[node]
            reader.cancel()
            self.apply(Disconnected(node))

    async def _read(self, node: int, requests: AsyncIterator[bytes], outbox: _Outbox) -> None:
        try:
            async for data in requests:
                try:
                    self.apply(Received(node, decode_worker(data)))
                except MessageError as error:
                    self.apply(Malformed(node, str(error)))
        finally:
            _close(outbox)

    async def tick(self) -> None:
        """Tell the state that time passes, until the job ends."""
        while True:
            self.apply(Tick())
            await asyncio.sleep(TICK_INTERVAL_S)

    def apply(self, event: Event) -> None:
        """Feed one event to the state and carry out what it says."""
        if self.done.done():
            return
        try:
            for effect in self._state.handle(event, time.monotonic()):
                self._carry_out(effect)
        except Exception as error:  # a bug of ours: the streams must break, not stay silent
            self.done.set_exception(error)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect.node, effect.message)
            case Refuse():
                self._send(effect.node, Refused(effect.reason))
                _close(self._outboxes.get(effect.node))
            case Log():
                self._log(effect.line)
            case Exit():
                for outbox in self._outboxes.values():
                    _close(outbox)
                self.done.set_result(effect.status)

    def _send(self, node: int, message: SchedulerMessage) -> None:
        outbox = self._outboxes.get(node)
        if outbox is None:
            return
        if outbox.qsize() >= _MAX_OUTBOX - 1:
            _close(outbox)
        else:
            outbox.put_nowait(encode_scheduler(message))


def _close(outbox: _Outbox | None) -> None:
    """End a stream after what is already queued. The last place of the queue is kept for this."""
    if outbox is not None and not outbox.full():
        outbox.put_nowait(None)
