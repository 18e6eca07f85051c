"""Messages of any length over a channel, a chunk at a time.

A message is a small header, ``kind, number, size in bytes``, with what is small behind it, and then
as many chunks of at most 1 MiB. The receiver says how large a message may be, keeps what has come,
and never sets memory aside for what was announced. A step ticket is a message of one chunk, with
zeros behind it.

The thread that brings snapshots away must not sleep where computing threads sleep: a worker has one
bell, and every ring would wake it in vain. It calls ``pump`` from time to time, which never waits.
All others call ``send`` and ``receive``, which do.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from graphsplit.errors import FrameError
from graphsplit.transport.base import ChannelSpec, Receiver, Sender

CHUNK_BYTES = 1024 * 1024
TOGETHER_BYTES = 64 * 1024
"""Smaller pieces are copied together: a chunk costs more than the copy."""
TICKET_BYTES = 128 * 1024
TICKETS, MESSAGES, SNAPSHOTS, SENT, ASKED = range(5)
"""The uses of the channels that every two workers have, without any plan."""
_LABELS = ("step tickets", "messages", "snapshots", "values of gs.send", "values asked for")
_DEPTHS = (2, 2, 4, 4, 2)
HEADER = struct.Struct("<qqq")
"""Of every message: kind, number, size in bytes of what follows."""
MESSAGE, TICKET = 0, -1
"""Kinds of messages; those of snapshots are counted from 1."""
_NO_PLAN = -1
Pieces = Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor]]


def channel_spec(use: int, source: int, destination: int, num_workers: int) -> ChannelSpec:
    """The channel from one worker to another that is for one use."""
    return ChannelSpec(
        plan=_NO_PLAN,
        edge=len(_LABELS) * (source * num_workers + destination) + use,
        source=source,
        destination=destination,
        dtype=torch.uint8,
        shape=(None,),
        max_bytes=TICKET_BYTES if use == TICKETS else CHUNK_BYTES,
        depth=_DEPTHS[use],
        label=f"{_LABELS[use]}: worker {source} -> worker {destination}",
    )


@dataclass(frozen=True)
class Message:
    """A message that has come from another worker.

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
        return joined(self.pieces)


def joined(pieces: Iterable[torch.Tensor]) -> bytes:
    """Pieces of a message as one."""
    return b"".join(piece.numpy().tobytes() for piece in pieces)


class OtherTopicError(FrameError):
    """A message is about something else than the one that is waited for.

    Attributes:
        source: Who sent it.
        topic: The number that it has.
        octets: How it begins.
    """

    def __init__(self, source: int, topic: int, octets: torch.Tensor) -> None:
        super().__init__(
            f"worker {source} is at another place of the script: it sent a message that this "
            f"worker does not wait for\n"
            f"  Fix: run the same operations and calls in the same order on every worker, and none "
            f"below an `if` on the rank."
        )
        self.source, self.topic = source, topic
        self.octets = octets.numpy().tobytes()


class OutgoingStream:
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
            self._send(chunk)
            self._next, has_moved = None, True
        return has_moved

    def _draw(self) -> torch.Tensor | None:
        while self._queue:
            chunk = next(self._queue[0], None)
            if chunk is not None:
                return chunk
            self._queue.popleft()
        return None

    def _send(self, chunk: torch.Tensor) -> None:
        self._sender.send(chunk, step=self._count, microbatch=0)
        self._count += 1


def send(ends: Sequence[OutgoingStream], pieces: Sequence[torch.Tensor], *, topic: int = 0) -> None:
    """Send one message to several workers, side by side; waits where there is no room."""
    for chunk in _chunks(MESSAGE, topic, pieces):
        for end in ends:
            end._send(chunk)


def _chunks(kind: int, number: int, given: Pieces) -> Iterator[torch.Tensor]:
    pieces = given() if callable(given) else given
    header = bytearray(HEADER.pack(kind, number, sum(piece.numel() for piece in pieces)))
    together, size = [torch.frombuffer(header, dtype=torch.uint8)], HEADER.size
    for piece in pieces:
        if together and size + piece.numel() > TOGETHER_BYTES:
            yield torch.cat(together)
            together, size = [], 0
        if piece.numel() > TOGETHER_BYTES:
            yield from piece.split(CHUNK_BYTES)
        elif piece.numel():
            together.append(piece)
            size += piece.numel()
    if together:
        yield torch.cat(together)


def _most_chunks(size: int) -> int:
    """How many chunks ``_chunks`` makes at most of a message: each takes memory of its own."""
    num_large = size // TOGETHER_BYTES
    return 3 * num_large + 1  # of each large piece the last, what is before it, and all others


class IncomingStream:
    """The receiving end.

    Args:
        receiver: The channel's end.
        source: The worker at the other end.
        limit_bytes: No message may be larger.
        tick: Called for each chunk that ``receive`` has got.
    """

    def __init__(
        self,
        receiver: Receiver,
        *,
        source: int,
        limit_bytes: int = 0,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._receiver = receiver
        self._source = source
        self._limit_bytes = limit_bytes
        self._tick = tick
        self._count = 0
        self._header: tuple[int, int, int] | None = None
        self._pieces: list[torch.Tensor] = []
        self._missing = 0  # bytes of the message under way that have not come
        self._num_chunks = 0  # of it that may still come

    def pump(self) -> Iterator[Message | None]:
        """Take what has come: whole messages, and None for every piece of one."""
        while self._receiver.is_ready():
            piece = self._take(self._limit_bytes)
            if piece.numel():
                self._pieces.append(piece)
            if self._missing:
                yield None
                continue
            assert self._header is not None
            message = Message(*self._header[:2], tuple(self._pieces))
            self._header, self._pieces = None, []
            yield message

    def receive(
        self, limit_bytes: int, *, is_exact: bool, topic: int = 0
    ) -> Iterator[torch.Tensor]:
        """Take one message, piece by piece, as it comes; no more is held at a time.

        Args:
            limit_bytes: How large it may be. Memory is taken for what came, not for this.
            is_exact: Whether it must be that large.
            topic: The number that it must have.

        Raises:
            FrameError: It has another size or topic.
        """
        while self._header is None or self._missing:
            piece = self._take(limit_bytes, limit_bytes if is_exact else 0, topic)
            self._tick()
            if piece.numel():
                yield piece
        self._header = None

    def _take(
        self, limit_bytes: int, least_bytes: int = 0, topic: int | None = None
    ) -> torch.Tensor:
        """The part of a message that the next chunk holds."""
        chunk = self._receiver.receive(step=self._count, microbatch=0)
        self._count += 1
        if chunk is None:
            raise FrameError(f"an empty chunk of a message from worker {self._source}")
        if self._header is None:
            if topic is not None:
                self._check_topic(topic, chunk)
            self._header = self._read_header(chunk[: HEADER.size], least_bytes, limit_bytes)
            self._missing = self._header[2]
            self._num_chunks = _most_chunks(self._missing)
            chunk = chunk[HEADER.size :]
        self._num_chunks -= 1
        self._missing -= chunk.numel()
        if self._missing < 0:
            size = self._header[2]
            raise FrameError(
                f"worker {self._source} announced a message of {size} bytes; "
                f"{size - self._missing} came"
            )
        if self._num_chunks < 0:
            raise FrameError(
                f"worker {self._source} sends a message of {self._header[2]} bytes in more pieces "
                f"than it takes"
            )
        return chunk

    def _check_topic(self, topic: int, chunk: torch.Tensor) -> None:
        octets = chunk[: HEADER.size].numpy().tobytes()
        if len(octets) == HEADER.size and (found := HEADER.unpack(octets)[1]) != topic:
            raise OtherTopicError(self._source, found, chunk[HEADER.size :])

    def _read_header(self, chunk: torch.Tensor, least: int, most: int) -> tuple[int, int, int]:
        octets = chunk.numpy().tobytes()
        if len(octets) != HEADER.size:
            raise FrameError(f"worker {self._source} sent {len(octets)} bytes for a header")
        kind, number, size = HEADER.unpack(octets)
        if not least <= size <= most or number < 0:
            allowed = f"{most} are expected" if least == most else f"at most {most} are allowed"
            raise FrameError(
                f"worker {self._source} announces message {kind} of {number} with {size} bytes; "
                f"{allowed}"
            )
        return kind, number, size
