"""Messages of any length over a channel, a chunk at a time, by a thread that never waits.

A message is a small header, ``kind, number, size in bytes``, with what is small behind it, and then
as many chunks of at most 1 MiB. The receiver keeps what has come, and never sets memory aside for
what was announced.

The thread that does this must not sleep where computing threads sleep: a worker has one bell, and
every ring would wake it in vain. It looks at its channels from time to time instead.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from graphsplit.errors import FrameError
from graphsplit.transport.base import ChannelSpec, Receiver, Sender

CHUNK_BYTES = 1024 * 1024
TOGETHER_BYTES = 64 * 1024
"""Less than that is copied behind the header: a chunk costs more than the copy."""
DEPTH = 4
Pieces = Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor]]
_HEADER = struct.Struct("<qqq")
_NO_PLAN = -1


def stream_spec(source: int, destination: int, num_workers: int) -> ChannelSpec:
    """The channel for messages from one worker to another, beside those of ``ControlChannels``."""
    first = 2 * num_workers * num_workers
    return ChannelSpec(
        plan=_NO_PLAN,
        edge=first + source * num_workers + destination,
        source=source,
        destination=destination,
        dtype=torch.uint8,
        shape=(None,),
        max_bytes=CHUNK_BYTES,
        depth=DEPTH,
        label=f"snapshots: worker {source} -> worker {destination}",
    )


@dataclass(frozen=True)
class Message:
    """The messages that have come from another worker.

    Attributes:
        kind: What it is about.
        number: Of the snapshot.
        pieces: Its bytes, cut anywhere.
    """

    kind: int
    number: int
    pieces: tuple[torch.Tensor, ...] = ()

    def octets(self) -> bytes:
        """All bytes."""
        return b"".join(piece.numpy().tobytes() for piece in self.pieces)


class Outgoing:
    """The sending end."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._queue: deque[Iterator[torch.Tensor]] = deque()
        self._next: torch.Tensor | None = None
        self._count = 0

    def put(self, kind: int, number: int, pieces: Pieces = ()) -> None:
        """Queue a message. Its memory must stay as it is until the message has left.

        Args:
            kind: What it is about.
            number: Of the snapshot.
            pieces: Its bytes; or a function that gives them, which ``pump`` calls.
        """
        self._queue.append(_chunks(kind, number, pieces))

    @property
    def is_empty(self) -> bool:
        """Whether all messages have left."""
        return self._next is None and not self._queue

    def pump(self) -> bool:
        """Send what can be sent without waiting; whether anything was."""
        has_moved = False
        while self._sender.has_room():
            chunk = self._next if self._next is not None else self._draw()
            if chunk is None:
                break
            self._sender.send(chunk, step=self._count, microbatch=0)
            self._next, has_moved = None, True
            self._count += 1
        return has_moved

    def _draw(self) -> torch.Tensor | None:
        while self._queue:
            chunk = next(self._queue[0], None)
            if chunk is not None:
                return chunk
            self._queue.popleft()
        return None


def _chunks(kind: int, number: int, given: Pieces) -> Iterator[torch.Tensor]:
    pieces = deque(given() if callable(given) else given)
    header = bytearray(_HEADER.pack(kind, number, sum(piece.numel() for piece in pieces)))
    together, size = [torch.frombuffer(header, dtype=torch.uint8)], _HEADER.size
    while pieces and size + pieces[0].numel() <= TOGETHER_BYTES:
        size += pieces[0].numel()
        together.append(pieces.popleft())
    yield torch.cat(together)
    for piece in pieces:
        for start in range(0, piece.numel(), CHUNK_BYTES):
            yield piece[start : start + CHUNK_BYTES]


class Incoming:
    """The receiving end.

    Args:
        receiver: The channel's end.
        source: The worker at the other end.
        limit_bytes: No message may be larger.
    """

    def __init__(self, receiver: Receiver, *, source: int, limit_bytes: int) -> None:
        self._receiver = receiver
        self._source = source
        self._limit_bytes = limit_bytes
        self._count = 0
        self._header: tuple[int, int, int] | None = None
        self._pieces: list[torch.Tensor] = []
        self._size = 0

    @property
    def is_amid_message(self) -> bool:
        """Whether the rest of a message is still to come."""
        return self._header is not None

    def pump(self) -> Iterator[Message | None]:
        """Take what has come: whole messages, and None for every piece of one."""
        while self._receiver.is_ready():
            chunk = self._receiver.receive(step=self._count, microbatch=0)
            self._count += 1
            if chunk is None:
                raise FrameError(f"an empty chunk of a snapshot from worker {self._source}")
            yield self._take(chunk)

    def _take(self, chunk: torch.Tensor) -> Message | None:
        if self._header is None:
            self._header = self._read_header(chunk[: _HEADER.size])
            chunk = chunk[_HEADER.size :]
        if chunk.numel():
            self._pieces.append(chunk)
            self._size += chunk.numel()
        kind, number, size = self._header
        if self._size > size:
            raise FrameError(
                f"worker {self._source} announced {size} bytes of a snapshot; {self._size} came"
            )
        if self._size < size:
            return None
        message = Message(kind, number, tuple(self._pieces))
        self._header, self._pieces, self._size = None, [], 0
        return message

    def _read_header(self, chunk: torch.Tensor) -> tuple[int, int, int]:
        octets = chunk.numpy().tobytes()
        if len(octets) != _HEADER.size:
            raise FrameError(f"worker {self._source} sent {len(octets)} bytes for a header")
        kind, number, size = _HEADER.unpack(octets)
        if not 0 <= size <= self._limit_bytes or number < 0:
            raise FrameError(
                f"worker {self._source} announces message {kind} of snapshot {number} with {size} "
                f"bytes; at most {self._limit_bytes} are allowed"
            )
        return kind, number, size
