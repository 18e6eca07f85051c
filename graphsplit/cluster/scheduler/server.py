"""The scheduler's process: a gRPC server for its ``Sessions``, with signals and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from graphsplit.cluster.scheduler.grpc_lines import limited_grpc_lines
from graphsplit.cluster.scheduler.job.events import (
    Interrupted,
    ToldByLauncher,
)
from graphsplit.cluster.scheduler.launcher import Launcher
from graphsplit.cluster.scheduler.sessions import Sessions
from graphsplit.cluster.status.job_status import JobStatus
from graphsplit.cluster.status.metrics import status_metrics
from graphsplit.cluster.wire.rpc import (
    METHOD,
    SERVICE,
    STATUS_METHOD,
    format_address,
    max_connections,
    own_host,
    server_options,
)
from graphsplit.errors import ConfigurationError
from graphsplit.logs import LogLine, configure, say, teller
from graphsplit.metrics_port import serve_metrics
from graphsplit.security.connections import ConnectionWatch
from graphsplit.security.grpc_ports import add_port
from graphsplit.security.names import SCHEDULER
from graphsplit.security.protection import Protection, load_protection, require_protection
from graphsplit.settings import ClusterSettings

_STOP_GRACE_S = 0.5
_LOOK_S = 5.0


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
        with limited_grpc_lines():
            return asyncio.run(_serve(settings, on_listening, say))
    return asyncio.run(_serve(settings, on_listening, teller(log)))


async def _serve(
    settings: ClusterSettings,
    on_listening: Callable[[str, int], None] | None,
    log: LogLine,
) -> int:
    import grpc

    protection = load_protection(settings.security, role=SCHEDULER)
    require_protection(settings.scheduler_host, protection, what="the scheduler")
    launcher = Launcher.of_process(log, settings.silence_s)
    server = grpc.aio.server(
        options=server_options(num_workers=settings.num_workers, silence_s=settings.silence_s),
        maximum_concurrent_rpcs=max_connections(settings.num_workers),
    )
    port = _bind(server, settings, protection)
    tell = partial(log, event="refused", level="warning")
    connections = ConnectionWatch(port, settings.num_workers, tell)
    sessions = Sessions(settings, protection, log, launcher, connections.prove)
    # Without serializers gRPC hands over bytes, and the codec decides what is a message.
    handlers = {
        METHOD: grpc.stream_stream_rpc_method_handler(sessions.session),
        STATUS_METHOD: grpc.stream_stream_rpc_method_handler(sessions.tell_status),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
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
            host = own_host()
            stack.enter_context(
                launcher.heard_by(lambda note: sessions.apply(ToldByLauncher(host, note)))
            )
            return await sessions.done
    finally:
        ticker.cancel()
        connections.close()
        await server.stop(_STOP_GRACE_S)
        launcher.take_leave()


def _serve_metrics(
    sessions: Sessions, settings: ClusterSettings, protection: Protection
) -> Callable[[], None]:
    loop = asyncio.get_running_loop()

    async def look() -> JobStatus:
        return sessions.status()

    def look_from_outside() -> Iterator[Any]:
        # The state belongs to the loop's thread; metrics are asked for from others.
        return status_metrics(asyncio.run_coroutine_threadsafe(look(), loop).result(_LOOK_S))

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
def _signals_to(sessions: Sessions) -> Iterator[None]:
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
