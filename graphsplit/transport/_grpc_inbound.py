"""The receiving side of gRPC streams: one stream per source, pieces of many channels in it."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue

import torch

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import FrameError, TransportError
from graphsplit.transport.base import ChannelSpec, Receiver
from graphsplit.transport.frame import Frame, FrameDecoder, describe
from graphsplit.transport.layout import unpack
from graphsplit.transport.session import TICK_S, AbortWatch
from graphsplit.transport.wait import Wait


class _Arriving:
    """A message whose pieces are still coming."""

    def __init__(self, header: bytes, frame: Frame) -> None:
        self.header = header
        self.frame = frame
        self.filled = 0
        self._memory: torch.Tensor | None = None
        if frame.layout is not None:
            is_dense = frame.layout.is_dense
            size = frame.payload_bytes
            self._memory = frame.empty() if is_dense else torch.empty(size, dtype=torch.uint8)

    def fill(self, piece: bytes) -> bool:
        """Write the next piece where it belongs; False if it does not fit."""
        if self.filled + len(piece) > self.frame.payload_bytes:
            return False
        if piece and self._memory is not None:
            ctypes.memmove(self._memory.data_ptr() + self.filled, piece, len(piece))
            self.filled += len(piece)
        return True

    @property
    def is_complete(self) -> bool:
        """True once all pieces are there."""
        return self.filled == self.frame.payload_bytes

    def value(self) -> torch.Tensor | None:
        """The value; its memory is this message's own."""
        layout = self.frame.layout
        if layout is None or self._memory is None or layout.is_dense:
            return self._memory
        return unpack(self._memory, layout, self.frame.dtype, self.frame.offset)


class GrpcReceiver(Receiver):
    """The receiving end of a channel. Messages are put in by the stream's thread."""

    def __init__(self, spec: ChannelSpec, inbound: Inbound, watch: AbortWatch, generation: int):
        self.spec = spec
        self.closed = False
        self._inbound = inbound
        self._watch = watch
        self._decoder = FrameDecoder(spec, generation=generation)
        self._arrived: deque[_Arriving] = deque()
        self._arriving: _Arriving | None = None
        self._num_arrived = 0
        self._num_taken = 0

    def put(self, chunk: pb.Chunk) -> None:
        """Take a piece from the stream.

        Raises:
            FrameError: It is not what the plan, or the credits given, allow.
        """
        if chunk.header:
            self._begin(chunk.header)
        message = self._arriving
        if message is None or not message.fill(chunk.payload):
            raise FrameError(
                f"{describe(self.spec)}: a piece of {len(chunk.payload)} bytes that fits nowhere"
            )
        if message.is_complete:
            self._arriving = None
            self._arrived.append(message)
            self._inbound.notify()

    def _begin(self, header: bytes) -> None:
        if self._arriving is not None:
            raise FrameError(f"{describe(self.spec)}: a message began before the last one ended")
        if self._num_arrived - self._num_taken >= self.spec.depth:
            raise FrameError(
                f"{describe(self.spec)}: expected at most {self.spec.depth} messages under way"
            )
        frame = self._decoder.frame_of(header)
        self._decoder.check_sequence(header, self._num_arrived)
        self._num_arrived += 1
        self._arriving = _Arriving(header, frame)

    def receive(self, *, step: int, microbatch: int) -> torch.Tensor | None:
        """See ``Receiver.receive``."""
        if not self._arrived:
            self._inbound.wait(self._watch, describe(self.spec), self)
        message = self._arrived[0]
        self._decoder.check_message(
            message.header, sequence=self._num_taken, step=step, microbatch=microbatch
        )
        value = message.value()
        self._arrived.popleft()
        self._num_taken += 1
        self._inbound.grant(self.spec, 1)
        return value

    def has_message(self) -> bool:
        """True if ``receive`` would return at once."""
        return bool(self._arrived)

    def close(self) -> None:
        """Let go of what arrived."""
        self.closed = True
        self._arrived.clear()
        self._arriving = None


class Inbound:
    """The stream from one source, before, while and after it is open. Thread-safe."""

    def __init__(self, source: int) -> None:
        self.source = source
        self.is_connected = False
        self.broken: Exception | None = None
        self._changed = threading.Condition()
        self._receivers: dict[tuple[int, int], GrpcReceiver] = {}
        # What was under way when a plan was closed is dropped.
        self._closed_plans: set[int] = set()
        # Credits for a stream that is not open yet wait here.
        self._credits: SimpleQueue[pb.Credit | None] = SimpleQueue()

    def add(self, receiver: GrpcReceiver) -> None:
        """Open a channel: from now on the source may send."""
        with self._changed:
            self._receivers[receiver.spec.plan, receiver.spec.edge] = receiver
        self.grant(receiver.spec, receiver.spec.depth)

    def remove_plan(self, plan: int | None) -> None:
        """Close the channels of a plan; of all plans for None."""
        with self._changed:
            if plan is not None:
                self._closed_plans.add(plan)
            for key in [key for key in self._receivers if plan is None or key[0] == plan]:
                self._receivers.pop(key).close()
            self._changed.notify_all()

    def grant(self, spec: ChannelSpec, messages: int) -> None:
        """Let the source send more messages of a channel."""
        self._credits.put(pb.Credit(plan=spec.plan, edge=spec.edge, messages=messages))

    def notify(self) -> None:
        """Make every thread that waits for this source look around."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, watch: AbortWatch, what: str, receiver: GrpcReceiver) -> None:
        """Wait until a receiver has a message."""
        wait = Wait(watch.policy, peer=self.source, what=what)
        with self._changed:
            while not receiver.has_message() and self.broken is None:
                if receiver.closed:
                    raise TransportError(f"{what}: the channel was closed")
                wait.check()
                self._changed.wait(TICK_S)
        if receiver.has_message():
            return
        if isinstance(self.broken, FrameError):
            raise FrameError(str(self.broken)) from self.broken
        watch.raise_broken(f"{what}: worker {self.source}: {self.broken}")

    def connect(self) -> bool:
        """Claim the stream; False if it was claimed before."""
        with self._changed:
            first, self.is_connected = not self.is_connected, True
        return first

    def read(self, chunks: Iterator[pb.Chunk]) -> None:
        """Take everything that the source sends. Runs on a thread of its own."""
        try:
            for chunk in chunks:
                receiver = self._receivers.get((chunk.plan, chunk.edge))
                if receiver is not None:
                    receiver.put(chunk)
                elif chunk.plan not in self._closed_plans:
                    raise FrameError(
                        f"worker {self.source} sent a value of plan {chunk.plan}, edge "
                        f"{chunk.edge}, which is not open"
                    )
            self.end(TransportError("closed its end"))
        except FrameError as error:
            self.end(error)
        except Exception as error:
            # Whatever grpc raises here (it has no base class for it) means that the stream ended.
            self.end(TransportError(f"the stream broke {error}".rstrip()))

    def end(self, error: Exception) -> None:
        """Let the stream end; the first reason given is the one that counts."""
        with self._changed:
            self.broken = self.broken or error
            self._changed.notify_all()
        self._credits.put(None)

    def credits(self) -> Iterator[pb.Credit]:
        """Credits to return to the source, until the stream ends."""
        while (credit := self._credits.get()) is not None:
            yield credit
