"""Counts what a worker sends and receives, and how long it waits: only where metrics are served.

Wrapped around the ends of channels, so that jobs without metrics pay nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graphsplit.transport.base import ChannelSpec, Receiver, Sender


@dataclass
class PeerTraffic:
    """The traffic to and from one worker. Each field has one writer.

    Attributes:
        sent_bytes: Bytes of values sent, without frames.
        sent: Messages sent.
        send_s: Seconds in ``send``: copying, and waiting for room.
        received_bytes: Bytes of values received.
        received: Messages received.
        receive_s: Seconds in ``receive``: waiting, and taking over.
    """

    sent_bytes: int = 0
    sent: int = 0
    send_s: float = 0.0
    received_bytes: int = 0
    received: int = 0
    receive_s: float = 0.0


class MeteredTraffic:
    """The traffic of one worker, by peer."""

    def __init__(self) -> None:
        self._peers: defaultdict[int, PeerTraffic] = defaultdict(PeerTraffic)

    def peers(self) -> Mapping[int, PeerTraffic]:
        """The traffic so far; may be read from another thread."""
        return dict(self._peers)

    def sender(self, sender: Sender, spec: ChannelSpec) -> Sender:
        """The same sender, counted."""
        return _MeteredSender(sender, self._peers[spec.destination])

    def receiver(self, receiver: Receiver, spec: ChannelSpec) -> Receiver:
        """The same receiver, counted."""
        return _MeteredReceiver(receiver, self._peers[spec.source])


def _size(value: torch.Tensor | None) -> int:
    return 0 if value is None else value.numel() * value.dtype.itemsize


class _MeteredSender(Sender):
    """Counts, and hands everything on."""

    def __init__(self, sender: Sender, traffic: PeerTraffic) -> None:
        self._sender = sender
        self._traffic = traffic

    def send(
        self, value: torch.Tensor | None, *, step: int, microbatch: int, quiet: bool = False
    ) -> None:
        start = time.perf_counter()
        self._sender.send(value, step=step, microbatch=microbatch, quiet=quiet)
        traffic = self._traffic
        traffic.send_s += time.perf_counter() - start
        traffic.sent += 1
        traffic.sent_bytes += _size(value)

    def announce(self) -> None:
        self._sender.announce()

    def hold(self) -> None:
        self._sender.hold()

    def has_room(self) -> bool:
        return self._sender.has_room()


class _MeteredReceiver(Receiver):
    """Counts, and hands everything on."""

    def __init__(self, receiver: Receiver, traffic: PeerTraffic) -> None:
        self._receiver = receiver
        self._traffic = traffic

    def receive(self, *, step: int, microbatch: int) -> torch.Tensor | None:
        start = time.perf_counter()
        value = self._receiver.receive(step=step, microbatch=microbatch)
        traffic = self._traffic
        traffic.receive_s += time.perf_counter() - start
        traffic.received += 1
        traffic.received_bytes += _size(value)
        return value

    def expect(self) -> None:
        self._receiver.expect()

    def is_ready(self) -> bool:
        return self._receiver.is_ready()
