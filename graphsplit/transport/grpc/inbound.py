"""The receiving side of gRPC streams: one stream per source, pieces of many channels in it.

[Note: taken where they arrive] grpc hands a message from the thread that polls to the thread that
reads the stream, and only then could it go to the program that waits for it: two wake-ups for one
value. The polling thread passes each message through the stream's deserializer first, so that is
where a message is taken; the reading thread only asks for the next one. (Where values are pulled,
one thread is both.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue

import torch

from graphsplit.errors import FrameError, TransportError
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.credit import Arrived, CreditedReceiver, IncomingChannels
from graphsplit.transport.frame import MESSAGE, Frame, Numbers, describe
from graphsplit.transport.grpc.chunk import (
    ChunkPart,
    Outline,
    copy_payload,
    credits_in,
    outline_of,
    read_chunk,
    read_credit,
    write_credit,
)
from graphsplit.transport.grpc.pull import Puller
from graphsplit.transport.grpc.stream_end import BROKEN, CLOSED
from graphsplit.transport.session import AbortWatch

TAKEN = b"taken"
"""Given to the reading thread in place of a message."""

_MAX_REST_BYTES = 4096  # channel, credits


class _Whole(Arrived):
    """A message in one piece. It stays one until it is taken: the polling thread has other work."""

    __slots__ = ("_data", "_receiver", "_start")

    def __init__(
        self, receiver: GrpcReceiver, numbers: Numbers, data: bytes, start: int, frame: Frame
    ) -> None:
        super().__init__(numbers, frame, None)
        self._receiver = receiver
        self._data = data
        self._start = start

    def value(self) -> torch.Tensor | None:
        """See ``Arrived.value``."""
        frame = self.frame
        memory = self._receiver.memory_for(frame)
        if memory is not None and frame.payload_bytes:
            copy_payload(self._data, self._start, frame.payload_bytes, memory.data_ptr())
        return frame.value_in(memory)


class _Arriving(Arrived):
    """A message whose pieces are still coming."""

    filled = 0

    def fill(self, piece: ChunkPart) -> bool:
        """Write the next piece where it belongs; False if it does not fit."""
        if self.filled + piece.size > self.frame.payload_bytes:
            return False
        if piece.size and self.memory is not None:
            address = self.memory.data_ptr() + self.filled
            copy_payload(piece.data, piece.start, piece.size, address)
            self.filled += piece.size
        return True

    @property
    def is_complete(self) -> bool:
        """True once all pieces are there."""
        return self.filled == self.frame.payload_bytes


class GrpcReceiver(CreditedReceiver):
    """The receiving end of a channel. Messages are put in by grpc's polling thread."""

    def __init__(
        self, spec: ChannelSpec, inbound: Inbound, watch: AbortWatch, generation: int
    ) -> None:
        super().__init__(spec, inbound, watch, generation)
        self._arriving: _Arriving | None = None
        # How the last value lay that came in one piece, and memory for another one like it.
        self._last: Frame | None = None
        self._spare: torch.Tensor | None = None

    def memory_for(self, frame: Frame) -> torch.Tensor | None:
        """Memory for a value that came in one piece. Runs on the thread that receives it."""
        last, spare = self._last, self._spare
        self._last, self._spare = frame, None
        return spare if spare is not None and frame is last else self._empty(frame)

    def _next(self) -> Arrived:
        """See ``CreditedReceiver``. Memory for the value is taken while it is on its way."""
        if self._last is not None and self._spare is None and not self.has_message():
            self._spare = self._empty(self._last)
        return super()._next()

    def _empty(self, frame: Frame) -> torch.Tensor | None:
        return self._incoming.memory_for(self, frame)

    def put_alike(self, data: bytes, outline: Outline, frame: Frame) -> bool:
        """Take a message in one piece that has the outline of one before; False if it is not due.

        Args:
            data: The message.
            outline: That of the one before.
            frame: As ``put`` returned it for that one.
        """
        numbers = MESSAGE.unpack_from(data, outline.numbers_at)
        if self.closed or self._arriving is not None or not self.begin_alike(numbers[0]):
            return False
        self.file(_Whole(self, numbers, data, outline.start, frame))
        return True

    def put(self, piece: ChunkPart) -> Frame | None:
        """Take a piece from the stream.

        Returns:
            The frame of a value that came in one piece.

        Raises:
            FrameError: It is not what the plan, or the credits given, allow.
        """
        if piece.header:
            if self._arriving is not None:
                raise FrameError(
                    f"{describe(self.spec)}: a message began before the last one ended"
                )
            frame, numbers = self.begin(piece.header), MESSAGE.unpack_from(piece.header)
            # What is kept as it came is bounded by the channel, whatever else the message holds.
            rest = len(piece.data) - piece.size - len(piece.header)
            if piece.size == frame.payload_bytes and rest <= _MAX_REST_BYTES:
                self.file(_Whole(self, numbers, piece.data, piece.start, frame))
                return frame
            self._arriving = _Arriving(numbers, frame, self._empty(frame))
        message = self._arriving
        if message is None or not message.fill(piece):
            raise FrameError(
                f"{describe(self.spec)}: a piece of {piece.size} bytes that fits nowhere"
            )
        if message.is_complete:
            self._arriving = None
            self.file(message)
        return None

    def close(self) -> None:
        """Let go of what arrived."""
        super().close()
        self._arriving = self._spare = None


_Known = tuple[GrpcReceiver, Outline, Frame]


class Inbound(IncomingChannels[GrpcReceiver]):
    """The stream from one source, before, while and after it is open. Thread-safe.

    Args:
        source: Rank of the source.
        on_credit: Told of credits for channels to the source, which rode along: plan, edge, and
            messages.
    """

    def __init__(self, source: int, on_credit: Callable[[int, int, int], None]) -> None:
        super().__init__(source)
        self.is_connected = False
        self.puller: Puller | None = None
        self._on_credit = on_credit
        # Values that came in one piece, by how their messages begin; and the sizes of that.
        self._known: dict[bytes, _Known] = {}
        self._lead_sizes: tuple[int, ...] = ()
        # Credits for a stream that is not open yet wait here.
        self._credits: SimpleQueue[bytes | None] = SimpleQueue()

    def grant(self, spec: ChannelSpec, messages: int) -> None:
        """See ``IncomingChannels.grant``."""
        self._credits.put(write_credit(spec.plan, spec.edge, messages))

    def connect(self) -> bool:
        """Claim the stream; False if it was claimed before."""
        with self._lock:
            first, self.is_connected = not self.is_connected, True
        return first

    def take(self, data: bytes) -> bytes:
        """Take a message of the source; see [Note: taken where they arrive]."""
        try:
            if self.broken is None and not self._take_alike(data):
                self._take_piece(read_chunk(data))
        except FrameError as error:
            self.end(error)
        return TAKEN

    def _take_alike(self, data: bytes) -> bool:
        """Take a value that is like the one before it in its channel; see ``Outline``."""
        for size in self._lead_sizes:
            known = self._known.get(data[:size])
            if known is None:
                continue
            receiver, outline, frame = known
            rest = data[outline.end :]
            credits = credits_in(rest) if len(rest) <= _MAX_REST_BYTES else None
            if credits is None or not outline.fits(data):
                return False
            if not receiver.put_alike(data, outline, frame):
                return False
            for credit in credits:
                self._on_credit(*credit)
            return True
        return False

    def _take_piece(self, piece: ChunkPart) -> None:
        for chunk in piece.companions:
            companion = read_chunk(chunk)
            if companion.companions or not companion.header:
                raise FrameError(f"worker {self.source} sent a companion that is no small value")
            self._take_piece(companion)
        if piece.companions and not piece.header:
            return
        for credit in piece.credits:
            self._on_credit(*read_credit(credit))
        if piece.waits:
            self.wanted(piece.plan, piece.edge)
            return
        receiver = self.find(piece.plan, piece.edge)
        if receiver is None:
            return
        frame = receiver.put(piece)
        outline = None if frame is None else outline_of(piece, MESSAGE.size)
        if frame is not None and outline is not None:
            self._known[outline.lead] = receiver, outline, frame
            self._lead_sizes = tuple(sorted({*self._lead_sizes, len(outline.lead)}))

    def remove_plan(self, plan: int | None) -> None:
        """See ``IncomingChannels.remove_plan``."""
        super().remove_plan(plan)
        self._known = {}

    def read(self, messages: Iterator[object], is_broken: Callable[[], bool]) -> None:
        """Ask for everything that the source sends. Runs on a thread of its own.

        Args:
            messages: What it sends.
            is_broken: Asked when nothing more comes: whether the source did not close its end.
                What is pulled comes first.
        """
        try:
            for _ in messages:
                if self.broken is not None:
                    return
            if self.puller is not None:
                self.puller.wait()
            self.end(TransportError((BROKEN if is_broken() else CLOSED).reason))
        except Exception as error:
            # Whatever grpc raises here (it has no base class for it) means that the stream ended.
            self.end(TransportError(f"{BROKEN.reason}: {error}" if str(error) else BROKEN.reason))

    def end(self, error: Exception) -> None:
        """See ``IncomingChannels.end``. Lets the streams end too."""
        super().end(error)
        self._credits.put(None)
        if self.puller is not None:
            self.puller.stop()

    def credits(self) -> Iterator[bytes]:
        """Credits to return to the source, until the stream ends."""
        while (credit := self._credits.get()) is not None:
            yield credit
