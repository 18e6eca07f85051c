"""Values between workers of one host, through memory that both map (Linux).

A channel is a ring of ``depth`` slots in one region, with five words in front, each in a cache
line of its own::

    published | taken | receiver waits | sender waits | announced | slot 0: header, payload | ...

    sender                                        receiver
    1. wait until published - taken < depth       a. wait until published > taken
    2. copy the value into the slot, header       b. check the header, copy the value out
    3. published += 1                             c. taken += 1
    4. ring, if the receiver waits                d. ring, if the sender waits

[Note: no lost wake-up] Who waits says so in its word *before* it looks once more, and who
publishes looks at that word *after* publishing, with a full fence in between on both sides. At
least one of them sees the other. ``Doorbell`` closes the gap between the look and the sleep, and
no sleep is longer than ``TICK_S`` anyway.

[Note: announced values] Waking a process costs more than copying a small value. So a sender that
begins to compute a value writes its number into ``announced`` and rings. The receiver wakes while
the sender computes, and then looks for the value without sleeping, for ``ANNOUNCED_SPIN_S`` at
the most. It yields its core in every round, to whoever has something to compute.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable

import torch

from graphsplit.errors import TransportError
from graphsplit.transport._doorbell import Fence
from graphsplit.transport._region import Region, adopt_region, create_region
from graphsplit.transport._shm_links import Link, Links
from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport
from graphsplit.transport.frame import (
    MESSAGE,
    Frame,
    FrameDecoder,
    FrameEncoder,
    describe,
    header_bytes,
)
from graphsplit.transport.layout import ALIGNMENT
from graphsplit.transport.session import TICK_S, AbortWatch, Session
from graphsplit.transport.wait import Wait, WaitPolicy

SPIN_S = 5e-6
"""How long to look without sleeping. Waking costs more than this, but the cores are shared."""

ANNOUNCED_SPIN_S = 4e-3
"""How long to look for a value that was announced."""

_LINE = ALIGNMENT
_CONTROL_BYTES = 5 * _LINE
_PUBLISHED, _TAKEN, _RECEIVER_WAITS, _SENDER_WAITS, _ANNOUNCED = (i * _LINE // 8 for i in range(5))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _LINE) * _LINE


def _slot_bytes(spec: ChannelSpec) -> int:
    return _aligned(header_bytes(spec)) + max(_aligned(spec.max_bytes), _LINE)


def channel_bytes(spec: ChannelSpec) -> int:
    """Size of a channel's memory; both ends compute it, neither believes the other."""
    return _CONTROL_BYTES + spec.depth * _slot_bytes(spec)


class _Slot:
    """Room for one message: its header, and its payload seen as the last layout sees it."""

    def __init__(self, region: Region, offset: int, spec: ChannelSpec) -> None:
        self._region = region
        self._offset = offset
        self._payload_at = _aligned(header_bytes(spec))
        self._reserved = -1
        self.header = memoryview(region.buffer).cast("B")[offset : offset + header_bytes(spec)]
        self._memory = torch.frombuffer(
            region.buffer,
            dtype=torch.uint8,
            offset=offset + self._payload_at,
            count=_slot_bytes(spec) - self._payload_at,
        )
        self.frame: Frame | None = None
        self.view: torch.Tensor | None = None

    def adopt(self, frame: Frame) -> None:
        """Turn to a new layout."""
        if frame.payload_bytes > self._reserved:
            self._region.reserve(self._offset, self._payload_at + frame.payload_bytes)
            self._reserved = frame.payload_bytes
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.view = frame.payload(self._memory)
        self.frame = frame


class _End:
    """What both ends of a channel share: the ring, the peer, and how to wait for it."""

    def __init__(
        self, spec: ChannelSpec, region: Region, link: Link, links: Links, watch: AbortWatch
    ) -> None:
        region.reserve(0, _CONTROL_BYTES)
        self.closed = False
        self._what = describe(spec)
        self._words = memoryview(region.buffer).cast("B")[:_CONTROL_BYTES].cast("Q")
        with torch.inference_mode(False):
            self._slots = [
                _Slot(region, _CONTROL_BYTES + i * _slot_bytes(spec), spec)
                for i in range(spec.depth)
            ]
        self._depth = spec.depth
        self._link = link
        self._bell = links.bell
        self._watch = watch
        self._fence = Fence()
        self._count = 0

    def close(self) -> None:
        """Let go of the memory; it is unmapped once no thread uses it any more."""
        self.closed = True
        self._slots = []
        self._words = memoryview(b"").cast("Q")

    def _wait(self, is_ready: Callable[[memoryview], bool], waits: int) -> None:
        """Wait until the words say so; ``waits`` is the word that tells the peer to ring."""
        words = self._words
        spin_until = time.perf_counter() + SPIN_S
        while time.perf_counter() < spin_until:
            if is_ready(words):
                return
        words[waits] = 1
        next_announced = self._count + 1 if waits == _RECEIVER_WAITS else 0
        try:
            wait = Wait(self._watch.policy, peer=self._link.peer, what=self._what)
            while True:
                seen = self._bell.read()
                self._fence.full()
                if is_ready(words):
                    return
                wait.check()
                if next_announced and words[_ANNOUNCED] == next_announced:
                    next_announced = 0
                    words[waits] = 0  # the sender need not ring
                    if self._look(is_ready):
                        return
                    words[waits] = 1
                    continue
                self._raise_if_ended(words, is_ready)
                self._bell.sleep(seen, timeout_s=TICK_S)
        finally:
            words[waits] = 0

    def _look(self, is_ready: Callable[[memoryview], bool]) -> bool:
        """Look for an announced value without sleeping; False if it did not come in time."""
        words = self._words
        until = time.perf_counter() + ANNOUNCED_SPIN_S
        while not is_ready(words):
            if time.perf_counter() > until:
                return False
            os.sched_yield()
        return True

    def _raise_if_ended(self, words: memoryview, is_ready: Callable[[memoryview], bool]) -> None:
        if self.closed:
            raise TransportError(f"{self._what}: the channel was closed")
        # The peer may have published its last value and left.
        if self._link.broken is not None and not is_ready(words):
            self._watch.raise_broken(f"{self._what}: {self._link.broken}")


class _ShmSender(_End, Sender):
    """The sending end of a ring."""

    def __init__(
        self,
        spec: ChannelSpec,
        region: Region,
        link: Link,
        links: Links,
        watch: AbortWatch,
        generation: int,
    ) -> None:
        super().__init__(spec, region, link, links, watch)
        self._encoder = FrameEncoder(spec, generation=generation)

    def send(
        self, value: torch.Tensor | None, *, step: int, microbatch: int, quiet: bool = False
    ) -> None:
        """See ``Sender.send``."""
        frame = self._encoder.frame_of(value)
        count, words = self._count, self._words
        if self.closed or self._link.broken is not None:
            self._raise_if_ended(words, lambda _: False)
        if count - words[_TAKEN] >= self._depth:
            self._wait(lambda words: count - words[_TAKEN] < self._depth, _SENDER_WAITS)
        slot = self._slots[count % self._depth]
        if slot.frame is not frame:
            slot.adopt(frame)
            slot.header[MESSAGE.size :] = frame.raw
        if value is not None and slot.view is not None:
            slot.view.copy_(frame.wire(value))
        MESSAGE.pack_into(slot.header, 0, count, step, microbatch)
        self._fence.light()
        self._count = words[_PUBLISHED] = count + 1
        self._fence.full()
        if words[_RECEIVER_WAITS] and not quiet:
            self._link.ring()

    def announce(self) -> None:
        """See ``Sender.announce``."""
        words = self._words
        if not self.closed:
            words[_ANNOUNCED] = self._count + 1
            self._fence.full()
            if words[_RECEIVER_WAITS]:
                self._link.ring()


class _ShmReceiver(_End, Receiver):
    """The receiving end of a ring."""

    def __init__(
        self,
        spec: ChannelSpec,
        region: Region,
        link: Link,
        links: Links,
        watch: AbortWatch,
        generation: int,
    ) -> None:
        super().__init__(spec, region, link, links, watch)
        self._decoder = FrameDecoder(spec, generation=generation)
        self._expects = False

    def expect(self) -> None:
        """See ``Receiver.expect``."""
        self._words[_RECEIVER_WAITS] = 1
        self._expects = True

    def receive(self, *, step: int, microbatch: int) -> torch.Tensor | None:
        """See ``Receiver.receive``."""
        count, words = self._count, self._words
        if self.closed:
            self._raise_if_ended(words, lambda _: False)
        if words[_PUBLISHED] <= count:
            self._wait(lambda words: words[_PUBLISHED] > count, _RECEIVER_WAITS)
        elif self._expects:
            words[_RECEIVER_WAITS] = 0
        self._expects = False
        self._fence.light()
        slot = self._slots[count % self._depth]
        # A snapshot: what is checked must not change under the check.
        header = bytes(slot.header)
        frame = self._decoder.frame_of(header)
        self._decoder.check_message(header, sequence=count, step=step, microbatch=microbatch)
        if slot.frame is not frame:
            slot.adopt(frame)
        value = None
        if slot.view is not None:
            value = frame.empty()
            frame.wire(value).copy_(slot.view)
        self._fence.light()
        self._count = words[_TAKEN] = count + 1
        self._fence.full()
        if words[_SENDER_WAITS]:
            self._link.ring()
        return value


class SharedMemoryTransport(Transport):
    """Moves values between workers of one host.

    Args:
        listener: A socket made by ``_shm_links.listen``, whose name the peers know.
        session: The job and this worker's place in it.
        names: The name on which each worker listens, by rank; None for those elsewhere.
        policy: The rule for every wait.
    """

    name = "shm"

    def __init__(
        self,
        listener: socket.socket,
        *,
        session: Session,
        names: tuple[str | None, ...],
        policy: WaitPolicy,
    ) -> None:
        self._generation = session.generation
        self._watch = AbortWatch(policy)
        self._links = Links(listener, session=session, names=names, watch=self._watch)
        self._ends: dict[tuple[int, int, bool], _ShmSender | _ShmReceiver] = {}
        links = weakref.ref(self._links)

        def wake() -> None:
            alive = links()
            if alive is not None:
                alive.wake()

        policy.abort.add_waker(wake)

    def open_sender(self, spec: ChannelSpec) -> Sender:
        """See ``Transport.open_sender``."""
        link = self._links.outbound(spec.destination)
        size_bytes = channel_bytes(spec)
        region, fd = create_region(f"graphsplit-{spec.plan}-{spec.edge}", size_bytes)
        try:
            sender = _ShmSender(spec, region, link, self._links, self._watch, self._generation)
            self._links.announce(link, spec.plan, spec.edge, size_bytes, fd)
        finally:
            os.close(fd)
        self._ends[spec.plan, spec.edge, True] = sender
        return sender

    def open_receiver(self, spec: ChannelSpec) -> Receiver:
        """See ``Transport.open_receiver``."""
        what = describe(spec)
        fd, link = self._links.wait_memory(spec.source, spec.plan, spec.edge, what)
        region = adopt_region(fd, channel_bytes(spec), what=what)
        receiver = _ShmReceiver(spec, region, link, self._links, self._watch, self._generation)
        self._ends[spec.plan, spec.edge, False] = receiver
        return receiver

    def close_plan(self, plan: int) -> None:
        """See ``Transport.close_plan``."""
        for key in [key for key in self._ends if key[0] == plan]:
            self._ends.pop(key).close()
        self._links.drop_plan(plan)
        self._links.wake()

    def close(self) -> None:
        """See ``Transport.close``."""
        for end in self._ends.values():
            end.close()
        self._ends.clear()
        self._links.close()
