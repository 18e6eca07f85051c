"""The workers of a job, over channels that need no plan.

Every pair of workers has one for step tickets (one small message each), one for messages of any
length (a stream of chunks), and such a one for what scripts send. They are opened when first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from graphsplit.job.group import WorkerGroup
from graphsplit.job.stream import (
    MESSAGES,
    TICKETS,
    IncomingStream,
    OutgoingStream,
    channel_spec,
    send,
)
from graphsplit.tensor_meta import octets_of
from graphsplit.transport.base import Receiver, Sender, Transport


class ControlChannels(WorkerGroup):
    """The workers of a job, as one of them sees them. Used by one thread.

    All workers call the methods that name several workers in the same order.

    Args:
        transport: Moves the messages.
        rank: This worker.
        num_workers: How many there are.
        tick: Shows the others that this worker is alive; called for what comes, too.
        use: What messages are for: ``MESSAGES`` or ``SENT``.

    Attributes:
        topic: What messages are about, from 0: one that is about something else is an error.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        num_workers: int,
        tick: Callable[[], None] = lambda: None,
        *,
        use: int = MESSAGES,
    ) -> None:
        self._use = use
        self.topic = 0
        self._transport = transport
        self.rank = rank
        self.num_workers = num_workers
        self._tick = tick
        self._outgoing: dict[int, OutgoingStream] = {}
        self._incoming: dict[int, IncomingStream] = {}
        self._ticket_senders: dict[int, Sender] = {}
        self._ticket_receivers: dict[int, Receiver] = {}

    def tick(self) -> None:
        """See ``WorkerGroup.tick``."""
        self._tick()

    def ticket_sender(self, peer: int) -> Sender:
        """The channel for step tickets to a worker."""
        if peer not in self._ticket_senders:
            self._ticket_senders[peer] = self._open_sender(TICKETS, peer)
        return self._ticket_senders[peer]

    def ticket_receiver(self, source: int) -> Receiver:
        """The channel for step tickets from a worker."""
        if source not in self._ticket_receivers:
            self._ticket_receivers[source] = self._open_receiver(TICKETS, source)
        return self._ticket_receivers[source]

    def send(self, *pieces: torch.Tensor, to: Iterable[int]) -> None:
        """See ``WorkerGroup.send``."""
        send(self.ends(to), [octets_of(piece) for piece in pieces], topic=self.topic)

    def ends(self, to: Iterable[int]) -> list[OutgoingStream]:
        """The sending ends of the ways to workers, opened: who expects a message waits for one."""
        peers = list(to)
        for peer in peers:
            if peer not in self._outgoing:
                self._outgoing[peer] = OutgoingStream(self._open_sender(self._use, peer))
        return [self._outgoing[peer] for peer in peers]

    def receive(
        self, size_bytes: int, *, source: int, is_exact: bool = True
    ) -> Iterator[torch.Tensor]:
        """See ``WorkerGroup.receive``."""
        self.expect(source)
        return self._incoming[source].receive(size_bytes, is_exact=is_exact, topic=self.topic)

    def expect(self, source: int) -> None:
        """Let a worker have room for what it sends next, though nobody receives yet.

        Workers that send to each other open their own ends first, all then expect, and then send.
        """
        if source not in self._incoming:
            receiver = self._open_receiver(self._use, source)
            self._incoming[source] = IncomingStream(receiver, source=source, tick=self._tick)

    def _open_sender(self, use: int, peer: int) -> Sender:
        spec = channel_spec(use, self.rank, peer, self.num_workers)
        return self._transport.open_sender(spec)

    def _open_receiver(self, use: int, peer: int) -> Receiver:
        spec = channel_spec(use, peer, self.rank, self.num_workers)
        return self._transport.open_receiver(spec)
