"""A worker's end of the control stream: gRPC, and the two threads that drive it.

gRPC pulls what is to be sent out of ``_outgoing`` in a thread of its own; that generator also
makes the heartbeats, so no other timer is needed. One more thread reads. Both are daemons.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from graphsplit.cluster.codec import MessageError, decode_scheduler, encode_worker
from graphsplit.cluster.limits import HEARTBEAT_INTERVAL_S
from graphsplit.cluster.messages import Heartbeat, Leave, SchedulerMessage, WorkerMessage
from graphsplit.cluster.rpc import METHOD, SERVICE, channel_options, format_address
from graphsplit.settings import ClusterSettings

# What gRPC says when there is nobody to talk to (yet); anything else is not mended by patience.
_RETRYABLE = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED", "DEADLINE_EXCEEDED"})


@dataclass(frozen=True)
class StreamEnd:
    """Why the stream ended, in gRPC's words, and whether another attempt may help."""

    detail: str
    is_retryable: bool


class Session:
    """One attempt to talk to the scheduler.

    Callbacks come from the reading thread and name the session, so that a late word from an
    attempt that was given up is not taken for one from the present attempt.

    Attributes:
        end: Why the stream ended; None while it has not.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        first: WorkerMessage,
        beat: Callable[[], Heartbeat],
        on_message: Callable[[Session, SchedulerMessage], None],
        on_end: Callable[[Session, StreamEnd], None],
    ) -> None:
        # A data loader's children do not use gRPC. Its handlers for those that do would pause it
        # at every fork and print a line; what a child must do, `forked` does.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        import grpc

        self._grpc = grpc
        self._beat = beat
        self._on_message = on_message
        self._on_end = on_end
        self.end: StreamEnd | None = None
        self._outbox: queue.SimpleQueue[WorkerMessage | None] = queue.SimpleQueue()
        self._writer_done = threading.Event()
        self._outbox.put(first)
        address = format_address(settings.scheduler_host, settings.scheduler_port)
        options = channel_options(node_timeout_s=settings.node_timeout_s)
        self._channel = grpc.insecure_channel(address, options=options)
        self._call: Any = None
        self._reader = threading.Thread(target=self._read, name="graphsplit-member", daemon=True)

    def start(self) -> None:
        """Connect, and begin to send and to read."""
        self._call = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")(self._outgoing())
        self._reader.start()

    def send(self, message: WorkerMessage) -> None:
        """Queue a message. Returns at once; order is kept."""
        self._outbox.put(message)

    def close(self, *, timeout_s: float = 1.0) -> None:
        """Say goodbye, wait a little for the answer, and give back threads and socket."""
        self._outbox.put(Leave())
        self._outbox.put(None)
        self._reader.join(timeout_s)
        self._call.cancel()
        self._channel.close()
        self._reader.join(timeout_s)
        self._writer_done.wait(timeout_s)

    def _outgoing(self) -> Iterator[bytes]:
        next_beat = time.monotonic() + HEARTBEAT_INTERVAL_S
        try:
            while True:
                try:
                    pause_s = max(0.0, next_beat - time.monotonic())
                    message = self._outbox.get(timeout=pause_s)
                except queue.Empty:
                    message = self._beat()
                    next_beat = time.monotonic() + HEARTBEAT_INTERVAL_S
                if message is None:
                    return
                yield encode_worker(message)
        finally:
            self._writer_done.set()

    def _read(self) -> None:
        end = StreamEnd("it closed the stream", is_retryable=True)
        try:
            for data in self._call:
                self._on_message(self, decode_scheduler(data))
        except self._grpc.RpcError as error:
            code = error.code().name
            end = StreamEnd(f"{code}: {error.details()}", is_retryable=code in _RETRYABLE)
        except MessageError as error:
            self._call.cancel()
            end = StreamEnd(f"it sent a malformed message: {error}", is_retryable=False)
        # The writer waits for work that will not come.
        self._outbox.put(None)
        self.end = end
        self._on_end(self, end)
