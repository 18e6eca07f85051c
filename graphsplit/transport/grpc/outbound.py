"""The sending side of gRPC streams: one stream per destination."""

from __future__ import annotations

import hmac
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import torch

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import FrameError
from graphsplit.logs import say
from graphsplit.security.addresses import why_not_reached
from graphsplit.security.grpc_ports import (
    first_metadata,
    is_refused_by_tls,
    keepalive,
    open_channel,
)
from graphsplit.security.handshake import PROOF_KEY, Recall, entry_of
from graphsplit.security.protection import UNPROTECTED, Protection
from graphsplit.settings import NODE_TIMEOUT_S
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.credit import CreditedSender, OutgoingChannels
from graphsplit.transport.frame import header_bytes
from graphsplit.transport.grpc.calls import CARRY, DIAL_OPTIONS, HELLO_KEY, write_hello
from graphsplit.transport.grpc.chunk import (
    CHUNK_BYTES,
    PULLS,
    accompanying,
    first_prefix,
    read_credit,
    riding,
    waiting,
    write_chunk,
    write_more,
)
from graphsplit.transport.grpc.inbound import TAKEN
from graphsplit.transport.grpc.stream_end import CLOSED, Patience, StreamEnd, end_of, out_of_reach
from graphsplit.transport.layout import pack
from graphsplit.transport.session import AbortWatch, Session

FLUSH_S = 5.0
"""The time that ``close`` gives a healthy peer to take what was sent already."""

COMPANION_BYTES = 64 << 10
"""Values up to this size may wait for the next one, to travel together."""
_MAX_HELD_BYTES = 256 << 10  # with a chunk it must fit into one message

# A peer that does not serve yet, or has no room for one more stream just now.
_NOT_YET = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_RETRY_S = 0.05
LATE_S = 7.0
"""A peer that cannot be reached is named after this time, long before the job fails for it."""
_PROBE_S = 2.0
_UNPROVED = "it does not prove that it is this job's worker"


class GrpcSender(CreditedSender):
    """The sending end of a channel."""

    def __init__(
        self, spec: ChannelSpec, outbound: Outbound, watch: AbortWatch, generation: int
    ) -> None:
        super().__init__(spec, outbound, watch, generation)
        self._outbound = outbound
        self._prefix = pb.Chunk(plan=spec.plan, edge=spec.edge).SerializeToString()
        self._first = first_prefix(self._prefix, header_bytes(spec))

    def send(
        self, value: torch.Tensor | None, *, step: int, microbatch: int, quiet: bool = False
    ) -> None:
        """See ``Sender.send``."""
        hold, self._holds = self._holds, False
        frame = self._encoder.frame_of(value)
        header = self._next_header(frame, step, microbatch)
        address = 0
        if value is not None:
            if not frame.is_payload(value):
                value, _ = pack(value.detach())
            address = value.data_ptr()
        size_bytes = frame.payload_bytes
        if size_bytes <= CHUNK_BYTES:
            self._outbound.put(self._first, header, address, size_bytes, hold=hold)
            return
        more = write_more(self._prefix, address + CHUNK_BYTES, size_bytes - CHUNK_BYTES)
        self._outbound.put(self._first, header, address, CHUNK_BYTES, more=more)


class Outbound(OutgoingChannels[GrpcSender]):
    """The stream to one destination. Thread-safe."""

    def __init__(
        self,
        peer: int,
        target: str,
        session: Session,
        *,
        owed: Callable[[], Iterable[tuple[int, int, int]]],
        protection: Protection = UNPROTECTED,
        expected: str = "",
        silence_s: float = NODE_TIMEOUT_S,
        on_end: Callable[[int, StreamEnd], None] = lambda peer, end: None,
    ) -> None:
        super().__init__(peer)
        self._owed = owed
        self._silence_s = silence_s
        self._patience = Patience(silence_s)
        self._on_end = on_end
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        # Where values go: into the stream, or once the destination pulls, into its answer.
        self._values = self._queue
        self._offered: SimpleQueue[bytes | None] | None = None
        self._recall: Recall | None = None
        # Values that wait for the next one. The lock keeps those of a channel in order, whoever
        # sends the next one.
        self._held: list[bytes] = []
        self._num_held_bytes = 0
        self._writing = threading.Lock()
        self._closing = False
        self._call: Any = None
        self._session = session
        self._target = target
        self._begun_s = time.monotonic()
        self._is_named = False
        self._refusal: str | None = None
        self._is_proved = False
        options = (*DIAL_OPTIONS, *keepalive(silence_s))
        self._channel = open_channel(target, protection, expected=expected, options=options)
        self._carry = self._channel.stream_stream(CARRY, response_deserializer=self._take)
        name = f"graphsplit-grpc-credits-{peer}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def want(self, spec: ChannelSpec) -> None:
        """See ``OutgoingChannels.want``. A channel without credit yet gets all of it by itself."""
        self._values.put(waiting(pb.Chunk(plan=spec.plan, edge=spec.edge).SerializeToString()))

    def put(
        self,
        first: bytes,
        header: bytes,
        address: int,
        size_bytes: int,
        *,
        hold: bool = False,
        more: Iterable[bytes] = (),
    ) -> None:
        """Write a value to the stream, without waiting.

        Args:
            first: What stands before the header.
            header: The value's header.
            address: Where its payload is.
            size_bytes: Size of the payload in the first chunk.
            hold: It may wait for the next value, to travel together.
            more: The other chunks.
        """
        with self._writing:
            if hold and size_bytes <= min(COMPANION_BYTES, _MAX_HELD_BYTES - self._num_held_bytes):
                chunk = write_chunk(first, header, address, size_bytes)
                self._held.append(accompanying(chunk))
                self._num_held_bytes += len(chunk)
                return
            before: Iterable[bytes] = ()
            if self._held:
                before, self._held, self._num_held_bytes = self._held, [], 0
            # Credits that are owed to the peer ride along.
            after = [riding(*credit) for credit in self._owed()]
            self._values.put(
                write_chunk(first, header, address, size_bytes, before=before, after=after)
            )
            for chunk in more:
                self._values.put(chunk)

    def flush(self) -> None:
        """See ``OutgoingChannels.flush``."""
        with self._writing:
            if self._held:
                self._values.put(b"".join(self._held))
            self._held, self._num_held_bytes = [], 0

    def close(self, *, flush: bool) -> None:
        """End the stream; with ``flush``, only after the peer has read all of it."""
        self.flush()
        with self._changed:
            self._closing = True
            self._end_queues()
            self._changed.notify_all()
        if flush and self._is_proved:  # else nothing was sent: nobody has given credit
            self._thread.join(FLUSH_S)
        with self._changed:
            if self._call is not None:
                self._call.cancel()
        self._thread.join()
        self._channel.close()

    def _take(self, data: bytes) -> bytes:
        """Take credit, on grpc's polling thread; see [Note: taken where they arrive]."""
        try:
            if not self._is_proved:
                raise FrameError(_UNPROVED)
            if data == PULLS:
                self._go_over()
            else:
                self.granted(*read_credit(data))
        except FrameError as error:
            self._refusal = str(error)
        return TAKEN

    def pulled(self, proof: bytes) -> Iterator[bytes] | None:
        """All values, for the destination; None if somebody else asks, or it asks again.

        They go there once it has said that it gets them.
        """
        with self._changed:
            recall = self._recall
            if recall is None or self._offered is not None or self._closing:
                return None
            if not hmac.compare_digest(proof, recall.listener):
                return None
            offered = self._offered = SimpleQueue()
        answer = pb.Chunk(proof=recall.dialer).SerializeToString()
        return itertools.chain((answer,), iter(offered.get, None))

    def _go_over(self) -> None:
        """The destination pulls. Nobody has credit yet, so no value is under way."""
        with self._changed:
            if self._offered is None:
                raise FrameError(f"worker {self.peer} pulls what it did not ask for")
            self._values = self._offered

    def _end_queues(self) -> None:
        """Let grpc's own threads, which wait for the next chunk, end."""
        self._queue.put(None)
        if self._offered is not None:
            self._offered.put(None)

    # Everything below runs on the thread.

    def _run(self) -> None:
        while (end := self._attempt()) is None:
            pass
        self.fail(end.reason)
        with self._changed:
            self._closing = True
            self._end_queues()
        self._on_end(self.peer, end)

    def _attempt(self) -> StreamEnd | None:
        """One stream, until it ends. Returns why it is over, or None if another may do better."""
        hello = write_hello(self._session.hello_to(self.peer))
        dialer = self._session.dialer_to(self.peer)
        began = time.monotonic()
        with self._changed:
            if self._closing:
                return CLOSED
            metadata = [(HELLO_KEY, hello), *dialer.metadata()]
            call = self._call = self._carry(iter(self._queue.get, None), metadata=metadata)
        answer = None
        try:
            late_s = self._begun_s + LATE_S - began
            theirs = first_metadata(call, late_s=late_s, on_late=self._name_if_unreached)
            answer = dialer.answer(theirs)
            if answer is None and entry_of(theirs, PROOF_KEY):
                call.cancel()
                return StreamEnd(_UNPROVED)
            if answer is not None:
                self._is_proved = True
                self._recall = dialer.recall(theirs)
                self._queue.put(pb.Chunk(proof=answer).SerializeToString())
            for _ in call:
                if self._refusal is not None:
                    call.cancel()
                    return StreamEnd(self._refusal)
            return CLOSED
        except grpc.RpcError as error:
            code, detail = call.code(), call.details() or str(error)
            is_early = answer is None and code in _NOT_YET and not is_refused_by_tls(detail)
            if not is_early:
                return end_of(code.name, detail, self._silence_s)
        if self._patience.is_over(detail, began, time.monotonic()):
            return out_of_reach(self._silence_s)
        self._begin_anew()
        return None

    def _name_if_unreached(self) -> None:
        """Say once that no connection to the peer can be made; the wait for one goes on."""
        why = "" if self._is_named else why_not_reached(self._target, _PROBE_S)
        self._is_named = True
        if why:
            say(
                f"this worker reaches the scheduler, and cannot reach worker {self.peer} at "
                f"{self._target} ({why})\n  Fix: open the ports between the two in firewalls, or "
                f"set MS_WORKER_IP for that worker to an address that the others reach",
                event="unreached",
                level="warning",
            )

    def _begin_anew(self) -> None:
        """Forget a stream that never began, after a pause."""
        with self._changed:
            # Nothing was in the queue but the end: without credit nobody sends.
            self._queue.put(None)
            self._values = self._queue = SimpleQueue()
            self._changed.wait_for(lambda: self._closing, _RETRY_S)
