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
from dataclasses import dataclass, replace
from typing import Any

from graphsplit.cluster.wire.codec import encode_fence, encode_worker, open_scheduler
from graphsplit.cluster.wire.fencing import FencingVerdict, StreamGuard
from graphsplit.cluster.wire.limits import heartbeat_interval_s
from graphsplit.cluster.wire.messages import (
    Fence,
    Heartbeat,
    Leave,
    Refused,
    SchedulerMessage,
    WorkerMessage,
)
from graphsplit.cluster.wire.rpc import METHOD, PURPOSE, SERVICE, channel_options, format_address
from graphsplit.encoding.fields import MessageError
from graphsplit.security.grpc_ports import first_metadata, is_refused_by_tls, open_channel
from graphsplit.security.handshake import PROOF_KEY, Dialer, entry_of
from graphsplit.security.names import SCHEDULER, CertifiedName
from graphsplit.security.protection import Protection
from graphsplit.settings import ClusterSettings

# What gRPC says when there is nobody to talk to (yet); anything else is not mended by patience.
_RETRYABLE = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED", "DEADLINE_EXCEEDED"})

_UNPROVED = (
    "it does not know this worker's job token (GS_JOB_TOKEN, GS_JOB_TOKEN_FILE), so it is the "
    "scheduler of another job, or none"
)


_Outgoing = tuple[WorkerMessage, Fence]


class _UnprovedError(Exception):
    """The scheduler does not prove that it knows the job's token."""


@dataclass(frozen=True)
class SessionEnd:
    """Why the stream ended, in gRPC's words, and whether another attempt may help."""

    detail: str
    is_retryable: bool


class MemberSession:
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
        protection: Protection,
        first: WorkerMessage,
        fence: Callable[[], Fence],
        beat: Callable[[], Heartbeat],
        on_message: Callable[[MemberSession, SchedulerMessage, int], None],
        on_end: Callable[[MemberSession, SessionEnd], None],
    ) -> None:
        # A data loader's children do not use gRPC. Its handlers for those that do would pause it
        # at every fork and print a line; what a child must do, `forked` does.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        import grpc

        self._grpc = grpc
        self._fence = fence
        self._num_sent = 0
        self._beat = beat
        self._beat_interval_s = heartbeat_interval_s(settings.silence_s, settings.num_workers)
        self._on_message = on_message
        self._on_end = on_end
        self.end: SessionEnd | None = None
        self._outbox: queue.SimpleQueue[_Outgoing | bytes | None] = queue.SimpleQueue()
        self._writer_done = threading.Event()
        self._first = (first, fence())
        # What is said before the scheduler has let this worker in waits here: the first message
        # must be the proof, and the second one the registration.
        self._early: list[_Outgoing] = []
        self._introducing = threading.Lock()
        self._dialer = Dialer(protection.token, PURPOSE) if protection.token else None
        self._is_introduced = self._dialer is None
        address = format_address(settings.scheduler_host, settings.scheduler_port)
        options = channel_options(silence_s=settings.silence_s)
        expected = CertifiedName(SCHEDULER).dns
        self._channel = open_channel(address, protection, expected=expected, options=options)
        self._call: Any = None
        self._reader = threading.Thread(target=self._read, name="graphsplit-member", daemon=True)

    def start(self) -> None:
        """Connect, and begin to send and to read."""
        metadata = None if self._dialer is None else self._dialer.metadata()
        session = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._call = session(self._outgoing(), metadata=metadata)
        if self._dialer is None:
            self._outbox.put(self._first)
        self._reader.start()

    def send(self, message: WorkerMessage) -> None:
        """Queue a message. Returns at once; order is kept."""
        outgoing = (message, self._fence())
        with self._introducing:
            if self._is_introduced:
                self._outbox.put(outgoing)
            else:
                self._early.append(outgoing)

    def close(self, *, timeout_s: float = 1.0) -> None:
        """Say goodbye, wait a little for the answer, and give back threads and socket."""
        if self._is_introduced:
            self.send(Leave())
        self._outbox.put(None)
        self._reader.join(timeout_s)
        self._call.cancel()
        self._channel.close()
        self._reader.join(timeout_s)
        self._writer_done.wait(timeout_s)

    def _outgoing(self) -> Iterator[bytes]:
        try:
            message = self._outbox.get()
            next_beat = time.monotonic() + self._beat_interval_s
            while message is not None:
                yield message if isinstance(message, bytes) else self._encode(message)
                try:
                    pause_s = max(0.0, next_beat - time.monotonic())
                    message = self._outbox.get(timeout=pause_s)
                except queue.Empty:
                    message = (self._beat(), self._fence())
                    next_beat = time.monotonic() + self._beat_interval_s
        finally:
            self._writer_done.set()

    def _encode(self, outgoing: _Outgoing) -> bytes:
        message, fence = outgoing
        self._num_sent += 1
        return encode_worker(message) + encode_fence(replace(fence, number=self._num_sent))

    def _introduce(self) -> None:
        """Prove that this worker knows the job's token, once the scheduler has proved it.

        A scheduler that takes no part in that may only refuse us.
        """
        if self._dialer is None:
            return
        metadata = first_metadata(self._call)
        answer = self._dialer.answer(metadata)
        if answer is None and entry_of(metadata, PROOF_KEY):
            raise _UnprovedError
        if answer is not None:
            with self._introducing:
                self._outbox.put(answer)
                for message in (self._first, *self._early):
                    self._outbox.put(message)
                self._is_introduced = True

    def _read(self) -> None:
        end = SessionEnd("it closed the stream", is_retryable=True)
        guard = StreamGuard()
        try:
            self._introduce()
            for data in self._call:
                fence, message = open_scheduler(data)
                if not (self._is_introduced or isinstance(message, Refused)):
                    raise _UnprovedError
                verdict = guard.check(fence)
                if verdict is FencingVerdict.BREAK:
                    self._call.cancel()
                    end = SessionEnd(f"it broke the order: {guard.why_broken}", is_retryable=True)
                    break
                if verdict is FencingVerdict.TAKE:
                    self._on_message(self, message, fence.generation)
        except _UnprovedError:
            self._call.cancel()
            end = SessionEnd(_UNPROVED, is_retryable=False)
        except self._grpc.RpcError as error:
            code = error.code().name
            detail = error.details() or ""
            is_retryable = code in _RETRYABLE and not is_refused_by_tls(detail)
            end = SessionEnd(f"{code}: {detail}", is_retryable=is_retryable)
        except MessageError as error:
            self._call.cancel()
            end = SessionEnd(f"it sent a malformed message: {error}", is_retryable=False)
        # The writer waits for work that will not come.
        self._outbox.put(None)
        self.end = end
        self._on_end(self, end)
