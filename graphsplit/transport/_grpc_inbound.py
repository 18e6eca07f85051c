"""The receiving side of gRPC streams: one stream per source, pieces of many channels in it.

[Note: taken where they arrive] grpc hands a message from the thread that polls to the thread that
reads the stream, and only then could it go to the program that waits for it: two wake-ups for one
value. The polling thread passes each message through the stream's deserializer first, so that is
where a message is taken; the reading thread only asks for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue

import torch

from graphsplit.errors import FrameError, TransportError
from graphsplit.transport._credit import CreditedReceiver, Incoming
from graphsplit.transport._grpc_chunk import Piece, copy_payload, read_chunk, write_credit
from graphsplit.transport._grpc_ends import BROKEN, CLOSED
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.frame import Frame, describe
from graphsplit.transport.layout import unpack
from graphsplit.transport.session import AbortWatch

TAKEN = b"taken"
"""What the reading thread gets instead of a message."""

_MAX_REST_BYTES = 4096  # channel, credits


class _Whole:
    """A message in one piece. It stays one until it is taken: the polling thread has other work."""

    def __init__(self, header: bytes, frame: Frame, piece: Piece) -> None:
        self.header = header
        self._frame = frame
        self._piece = piece

    def value(self) -> torch.Tensor | None:
        """See ``Arrived.value``."""
        message = _Arriving(self.header, self._frame)
        message.fill(self._piece)
        return message.value()


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

    def fill(self, piece: Piece) -> bool:
        """Write the next piece where it belongs; False if it does not fit."""
        if self.filled + piece.size > self.frame.payload_bytes:
            return False
        if piece.size and self._memory is not None:
            copy_payload(piece, self._memory.data_ptr() + self.filled)
            self.filled += piece.size
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


class GrpcReceiver(CreditedReceiver):
    """The receiving end of a channel. Messages are put in by grpc's polling thread."""

    def __init__(
        self, spec: ChannelSpec, inbound: Inbound, watch: AbortWatch, generation: int
    ) -> None:
        super().__init__(spec, inbound, watch, generation)
        self._arriving: _Arriving | None = None

    def put(self, piece: Piece) -> None:
        """Take a piece from the stream.

        Raises:
            FrameError: It is not what the plan, or the credits given, allow.
        """
        if piece.header:
            if self._arriving is not None:
                raise FrameError(
                    f"{describe(self.spec)}: a message began before the last one ended"
                )
            frame = self.begin(piece.header)
            # What is kept as it came is bounded by the channel, whatever else the message holds.
            rest = len(piece.data) - piece.size - len(piece.header)
            if piece.size == frame.payload_bytes and rest <= _MAX_REST_BYTES:
                self.file(_Whole(piece.header, frame, piece))
                return
            self._arriving = _Arriving(piece.header, frame)
        message = self._arriving
        if message is None or not message.fill(piece):
            raise FrameError(
                f"{describe(self.spec)}: a piece of {piece.size} bytes that fits nowhere"
            )
        if message.is_complete:
            self._arriving = None
            self.file(message)

    def close(self) -> None:
        """Let go of what arrived."""
        super().close()
        self._arriving = None


class Inbound(Incoming[GrpcReceiver]):
    """The stream from one source, before, while and after it is open. Thread-safe.

    Args:
        source: Rank of the source.
        on_credit: Told of serialized credits for channels to the source, which rode along.
    """

    def __init__(self, source: int, on_credit: Callable[[bytes], None]) -> None:
        super().__init__(source)
        self.is_connected = False
        self._on_credit = on_credit
        # Credits for a stream that is not open yet wait here.
        self._credits: SimpleQueue[bytes | None] = SimpleQueue()

    def grant(self, spec: ChannelSpec, messages: int) -> None:
        """See ``Incoming.grant``."""
        self._credits.put(write_credit(spec, messages))

    def connect(self) -> bool:
        """Claim the stream; False if it was claimed before."""
        with self._changed:
            first, self.is_connected = not self.is_connected, True
        return first

    def take(self, data: bytes) -> bytes:
        """Take a message of the source; see [Note: taken where they arrive]."""
        try:
            if self.broken is None:
                self._take_piece(read_chunk(data))
        except FrameError as error:
            self.end(error)
        return TAKEN

    def _take_piece(self, piece: Piece) -> None:
        for chunk in piece.companions:
            companion = read_chunk(chunk)
            if companion.companions or not companion.header:
                raise FrameError(f"worker {self.source} sent a companion that is no small value")
            self._take_piece(companion)
        if piece.companions and not piece.header:
            return
        for credit in piece.credits:
            self._on_credit(credit)
        if piece.waits:
            self.wanted(piece.plan, piece.edge)
            return
        receiver = self.find(piece.plan, piece.edge)
        if receiver is not None:
            receiver.put(piece)

    def read(self, messages: Iterator[object], is_broken: Callable[[], bool]) -> None:
        """Ask for everything that the source sends. Runs on a thread of its own.

        Args:
            messages: What it sends.
            is_broken: Asked when nothing more comes: whether the source did not close its end.
        """
        try:
            for _ in messages:
                if self.broken is not None:
                    return
            self.end(TransportError((BROKEN if is_broken() else CLOSED).reason))
        except Exception as error:
            # Whatever grpc raises here (it has no base class for it) means that the stream ended.
            self.end(TransportError(f"{BROKEN.reason}: {error}" if str(error) else BROKEN.reason))

    def end(self, error: Exception) -> None:
        """See ``Incoming.end``. Lets the stream end too."""
        super().end(error)
        self._credits.put(None)

    def credits(self) -> Iterator[bytes]:
        """Credits to return to the source, until the stream ends."""
        while (credit := self._credits.get()) is not None:
            yield credit
