"""Values between workers that are threads of one process; for tests.

The contract is that of the other transports, headers, copies and bounds included: a program that
runs here and fails elsewhere would be a bad test.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import torch

from graphsplit.errors import TransportError
from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport
from graphsplit.transport.frame import MESSAGE, FrameDecoder, FrameEncoder, describe
from graphsplit.transport.layout import pack, unpack
from graphsplit.transport.session import TICK_S, AbortWatch
from graphsplit.transport.wait import Wait, WaitPolicy

_Message = tuple[bytes, "torch.Tensor | None"]


class _Channel:
    """The messages under way; made by whichever end is opened first."""

    def __init__(self) -> None:
        self.messages: deque[_Message] = deque()
        self.sender_left = False
        self.receiver_left = False


class MemoryFabric:
    """The channels that the workers of one in-process job share.

    Attributes:
        changed: Guards all channels; notified whenever any of them changes.
        channels: All channels, by (plan, edge).
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.channels: dict[tuple[int, int], _Channel] = {}

    def channel(self, spec: ChannelSpec) -> _Channel:
        """The channel of a spec."""
        with self.changed:
            return self.channels.setdefault((spec.plan, spec.edge), _Channel())

    def wait(self, spec: ChannelSpec, wait: Wait, is_ready: Callable[[], bool]) -> None:
        """Wait until ``is_ready``. The caller holds ``changed``."""
        while not is_ready():
            wait.check()
            self.changed.wait(TICK_S)

    def wake(self) -> None:
        """Make every waiting thread look around."""
        with self.changed:
            self.changed.notify_all()


class _End:
    """The common part of both ends of a channel."""

    def __init__(self, spec: ChannelSpec, fabric: MemoryFabric, watch: AbortWatch) -> None:
        self._spec = spec
        self._fabric = fabric
        self._watch = watch
        self._channel = fabric.channel(spec)
        self._count = 0
        self.closed = False

    def _wait(self, peer: int, is_ready: Callable[[], bool], peer_left: Callable[[], bool]) -> None:
        def may_go_on() -> bool:
            return self.closed or is_ready() or peer_left()

        wait = Wait(self._watch.policy, peer=peer, what=describe(self._spec))
        self._fabric.wait(self._spec, wait, may_go_on)
        if self.closed:
            raise TransportError(f"{describe(self._spec)}: the channel was closed")

    def _raise_left(self, peer: int) -> NoReturn:
        self._watch.raise_broken(f"{describe(self._spec)}: worker {peer} closed its end")


class _MemorySender(_End, Sender):
    """The sending end."""

    def __init__(
        self, spec: ChannelSpec, fabric: MemoryFabric, watch: AbortWatch, generation: int
    ) -> None:
        super().__init__(spec, fabric, watch)
        self._encoder = FrameEncoder(spec, generation=generation)

    def send(
        self, value: torch.Tensor | None, *, step: int, microbatch: int, quiet: bool = False
    ) -> None:
        """See ``Sender.send``."""
        frame = self._encoder.frame_of(value)
        channel, depth, peer = self._channel, self._spec.depth, self._spec.destination
        with self._fabric.changed:
            self._wait(peer, lambda: len(channel.messages) < depth, lambda: channel.receiver_left)
            left = channel.receiver_left
        if left:
            self._raise_left(peer)
        payload = None if value is None else pack(value.detach())[0]
        header = MESSAGE.pack(self._count, step, microbatch) + frame.raw
        self._count += 1
        with self._fabric.changed:
            channel.messages.append((header, payload))
            self._fabric.changed.notify_all()

    def has_room(self) -> bool:
        """See ``Sender.has_room``."""
        channel = self._channel
        return self.closed or channel.receiver_left or len(channel.messages) < self._spec.depth

    def close(self) -> None:
        """Say that nothing more will come."""
        self.closed = self._channel.sender_left = True


class _MemoryReceiver(_End, Receiver):
    """The receiving end."""

    def __init__(
        self, spec: ChannelSpec, fabric: MemoryFabric, watch: AbortWatch, generation: int
    ) -> None:
        super().__init__(spec, fabric, watch)
        self._decoder = FrameDecoder(spec, generation=generation)

    def receive(self, *, step: int, microbatch: int) -> torch.Tensor | None:
        """See ``Receiver.receive``."""
        messages, channel = self._channel.messages, self._channel
        peer = self._spec.source
        with self._fabric.changed:
            self._wait(peer, lambda: bool(messages), lambda: channel.sender_left)
            message = messages[0] if messages else None
        if message is None:
            self._raise_left(peer)
        header, payload = message
        frame = self._decoder.frame_of_message(
            header, sequence=self._count, step=step, microbatch=microbatch
        )
        self._count += 1
        with self._fabric.changed:
            messages.popleft()
            self._fabric.changed.notify_all()
        if payload is None or frame.layout is None:
            return None
        return unpack(payload, frame.layout, frame.dtype, frame.offset)

    def is_ready(self) -> bool:
        """See ``Receiver.is_ready``."""
        return self.closed or self._channel.sender_left or bool(self._channel.messages)

    def close(self) -> None:
        """Say that nothing more will be taken."""
        self.closed = self._channel.receiver_left = True
        self._channel.messages.clear()


class MemoryTransport(Transport):
    """Moves values between threads.

    Args:
        fabric: Shared by all workers of the job.
        generation: Generation of the job's membership.
        policy: The rule for every wait.
    """

    name = "memory"

    def __init__(self, fabric: MemoryFabric, *, generation: int, policy: WaitPolicy) -> None:
        self._fabric = fabric
        self._generation = generation
        self._watch = AbortWatch(policy)
        self._ends: dict[tuple[int, int, bool], _MemorySender | _MemoryReceiver] = {}
        policy.abort.add_waker(fabric.wake)

    def open_sender(self, spec: ChannelSpec) -> Sender:
        """See ``Transport.open_sender``."""
        sender = _MemorySender(spec, self._fabric, self._watch, self._generation)
        self._ends[spec.plan, spec.edge, True] = sender
        return sender

    def open_receiver(self, spec: ChannelSpec) -> Receiver:
        """See ``Transport.open_receiver``."""
        receiver = _MemoryReceiver(spec, self._fabric, self._watch, self._generation)
        self._ends[spec.plan, spec.edge, False] = receiver
        return receiver

    def close_plan(self, plan: int) -> None:
        """See ``Transport.close_plan``."""
        with self._fabric.changed:
            for key in [key for key in self._ends if key[0] == plan]:
                self._ends.pop(key).close()
            self._fabric.changed.notify_all()

    def close(self) -> None:
        """See ``Transport.close``."""
        for plan in {key[0] for key in self._ends}:
            self.close_plan(plan)
