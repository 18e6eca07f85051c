"""Outgoing messages of the scheduler: one queue per stream, and each message encoded once."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

from graphsplit.cluster.wire.codec import encode_fence, encode_plan, encode_scheduler
from graphsplit.cluster.wire.messages import Fence, Formed, Peer, SchedulerMessage

# A worker that does not read for so long that this many messages wait for it is cut off.
MAX_OUTBOX = 4_096
# A plan for many workers is large, and goes to all: gRPC must not hold a copy for each at once.
_LARGE_BYTES = 64 << 10
_MAX_LARGE_WRITES = 16
_NO_LIMIT = contextlib.nullcontext()


class Outbox(asyncio.Queue["tuple[bytes, ...] | None"]):
    """The messages that wait to be written to one stream, in parts; None ends it.

    Attributes:
        incarnation: The life of the worker at the other end.
        num_sent: How many messages were put in.
    """

    def __init__(self, incarnation: str) -> None:
        super().__init__(MAX_OUTBOX)
        self.incarnation = incarnation
        self.num_sent = 0

    def close(self) -> None:
        """End the stream after what is queued. The last place of the queue is kept for this."""
        if not self.full():
            self.put_nowait(None)


class Outboxes:
    """The outboxes of all streams, by node."""

    def __init__(self) -> None:
        self._by_node: dict[int, Outbox] = {}
        self._encoded: tuple[SchedulerMessage, bytes] | None = None
        self._plan: tuple[tuple[Peer, ...], bytes] | None = None
        self._large = asyncio.Semaphore(_MAX_LARGE_WRITES)

    def add(self, node: int, incarnation: str) -> Outbox:
        """The outbox of a new stream."""
        outbox = self._by_node[node] = Outbox(incarnation)
        return outbox

    def remove(self, node: int) -> None:
        """The stream has ended."""
        del self._by_node[node]

    async def drain(self, outbox: Outbox, context: Any) -> None:
        """Write to a gRPC stream what is put into its outbox, until that is closed."""
        while (parts := await outbox.get()) is not None:
            is_large = sum(len(part) for part in parts) > _LARGE_BYTES
            async with self._large if is_large else _NO_LIMIT:
                await context.write(b"".join(parts))

    def send(self, node: int, message: SchedulerMessage, job: str, generation: int) -> None:
        """Queue a message, if the stream is still there; cut off a worker that does not read."""
        outbox = self._by_node.get(node)
        if outbox is None:
            return
        if outbox.qsize() >= MAX_OUTBOX - 1:
            outbox.close()
            return
        outbox.num_sent += 1
        fence = Fence(job, generation, outbox.incarnation, outbox.num_sent)
        outbox.put_nowait((*self._parts_of(message), encode_fence(fence)))

    def close(self, node: int) -> None:
        """End a stream, if it is still there."""
        outbox = self._by_node.get(node)
        if outbox is not None:
            outbox.close()

    def close_all(self) -> None:
        """End all streams."""
        for outbox in self._by_node.values():
            outbox.close()

    @property
    def nodes(self) -> list[int]:
        """The nodes whose streams are there."""
        return list(self._by_node)

    def _parts_of(self, message: SchedulerMessage) -> tuple[bytes, ...]:
        """The message as bytes in parts: what goes to everybody is encoded, and held, once."""
        if isinstance(message, Formed):
            return self._plan_for(message)
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = (message, encode_scheduler(message))
        return (self._encoded[1],)

    def _plan_for(self, message: Formed) -> tuple[bytes, ...]:
        if self._plan is None or self._plan[0] is not message.peers:
            self._plan = (message.peers, encode_plan(message.peers))
        return encode_scheduler(replace(message, peers=())), self._plan[1]
