"""Values between workers of one host, through memory that both map (Linux).

A channel is some slots in one region, and words in front of them, each in its own cache line::

    published | taken | receiver waits | sender waits | announced | slot of message n % depth, ...
    slot 0 is lent, slot 1 is lent, ...  | slot 0: header, payload | slot 1: ...

    sender                                        receiver
    1. wait until published - taken < depth       a. wait until published > taken
    2. copy value and header into a free slot     b. check the header; copy the value out, or lend
    3. published += 1                             c. taken += 1
    4. ring, if the receiver waits                d. ring, if the sender waits

[Note: no lost wake-up] Who waits says so in its word *before* it looks once more, and who
publishes looks at that word *after* publishing, with a full fence in between on both sides. At
least one of them sees the other. ``Doorbell`` closes the gap between the look and the sleep, and
no sleep is longer than ``TICK_S`` anyway.

[Note: looking] Waking a process costs more than copying a small value, so who waits looks for a
while before it sleeps: no longer than waking up would take. It yields its core in every round, to
whoever has something to compute. Where the wait before was a long one, it sleeps at once.

[Note: announced values] A sender that begins to compute a value writes its number into
``announced`` and rings. The receiver wakes while the sender computes, and then looks for the value
without sleeping, for ``ANNOUNCED_LOOK_S`` at the most.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from collections.abc import Callable

import torch

from graphsplit.errors import FrameError, TransportError
from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport
from graphsplit.transport.frame import MESSAGE, FrameDecoder, FrameEncoder, describe
from graphsplit.transport.layout import ALIGNMENT
from graphsplit.transport.session import TICK_S, AbortWatch, Session
from graphsplit.transport.shm.links import Link, Links
from graphsplit.transport.shm.region import SharedRegion, adopt_region, create_region
from graphsplit.transport.shm.slots import RingSlot, num_spare, slot_bytes
from graphsplit.transport.wait import Wait, WaitPolicy

LOOK_S = 100e-6
"""The time to look before sleeping: about as long as waking up again takes."""

ANNOUNCED_LOOK_S = 4e-3
"""The time to look for a value that was announced."""

_LONG_S = 3 * LOOK_S

_LINE = ALIGNMENT
_WORDS_PER_LINE = _LINE // 8
_PUBLISHED, _TAKEN, _RECEIVER_WAITS, _SENDER_WAITS, _ANNOUNCED, _FIRST_SLOT_OF = (
    i * _WORDS_PER_LINE for i in range(6)
)


def _num_slots(spec: ChannelSpec) -> int:
    return spec.depth + num_spare(spec)


def _num_lines(spec: ChannelSpec) -> int:
    return 5 + spec.depth + _num_slots(spec)


def channel_bytes(spec: ChannelSpec) -> int:
    """Size of a channel's memory; both ends compute it, neither believes the other."""
    return _num_lines(spec) * _LINE + _num_slots(spec) * slot_bytes(spec)


# It orders by itself all but earlier stores with later loads: nothing is called there at a message.
_IS_X86 = platform.machine() == "x86_64"


class MemoryFence:
    """Orders the memory accesses before it with those after it.

    Python has no fence of its own, but the operations of a lock contain them: on x86 one locked
    instruction orders everything; elsewhere a release followed by an acquire does.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release

    def full(self) -> None:
        """Order everything, also earlier stores with later loads."""
        self._acquire()
        self._release()
        if not _IS_X86:
            self._acquire()
            self._release()

    def light(self) -> None:
        """Order everything but earlier stores with later loads; x86 does that by itself."""
        if not _IS_X86:
            self.full()


class _End:
    """The common part of both ends of a channel: the ring, the peer, and the wait for it."""

    def __init__(self, spec: ChannelSpec, region: SharedRegion, link: Link, links: Links) -> None:
        control_bytes = _num_lines(spec) * _LINE
        region.reserve(0, control_bytes)
        self.closed = False
        self._what = describe(spec)
        self._words = memoryview(region.buffer).cast("B")[:control_bytes].cast("Q")
        self._fence = MemoryFence()
        first_lent = _FIRST_SLOT_OF + spec.depth * _WORDS_PER_LINE
        with torch.inference_mode(False):
            self._slots = [
                RingSlot(
                    region,
                    control_bytes + index * slot_bytes(spec),
                    spec,
                    words=self._words,
                    lent_word=first_lent + index * _WORDS_PER_LINE,
                    fence=self._fence.light,
                )
                for index in range(_num_slots(spec))
            ]
        self._depth = spec.depth
        self._num_spare = num_spare(spec)
        self._link = link
        self._bell = links.bell
        self._watch = links.watch
        self._count = 0
        self._waits_long = False

    def close(self) -> None:
        """Let go of the memory; it is unmapped once no thread uses it any more."""
        self.closed = True
        self._slots = []
        self._words = memoryview(b"").cast("Q")

    def _wait(self, is_ready: Callable[[memoryview], bool], waits: int) -> None:
        """Wait until the words say so; ``waits`` is the word that tells the peer to ring."""
        words, began = self._words, time.perf_counter()
        if not self._waits_long and self._look(is_ready, for_s=LOOK_S):
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
                    if self._look(is_ready, for_s=ANNOUNCED_LOOK_S):
                        return
                    words[waits] = 1
                    continue
                self._raise_if_ended(words, is_ready)
                self._bell.sleep(seen, timeout_s=TICK_S)
        finally:
            words[waits] = 0
            self._waits_long = time.perf_counter() - began > _LONG_S

    def _look(self, is_ready: Callable[[memoryview], bool], *, for_s: float) -> bool:
        """Look without sleeping, and let others have the core; False if it did not come in time."""
        words = self._words
        until = time.perf_counter() + for_s
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

    def __init__(self, spec: ChannelSpec, region: SharedRegion, link: Link, links: Links) -> None:
        super().__init__(spec, region, link, links)
        self._encoder = FrameEncoder(spec, generation=links.session.generation)
        self._used = [0] * spec.depth  # the slots of the messages under way

    def send(
        self, value: torch.Tensor | None, *, step: int, microbatch: int, quiet: bool = False
    ) -> None:
        """See ``Sender.send``."""
        count, words = self._count, self._words
        if self.closed or self._link.broken is not None:
            self._raise_if_ended(words, lambda _: False)
        if count - words[_TAKEN] >= self._depth:
            self._wait(lambda words: count - words[_TAKEN] < self._depth, _SENDER_WAITS)
        slot = self._free_slot(count) if self._num_spare else self._slots[count % self._depth]
        frame = self._encoder.frame_of(value)
        if slot.frame is not frame:
            slot.adopt(frame)
            slot.header[MESSAGE.size :] = frame.raw
        if value is not None:
            slot.write(value)
        MESSAGE.pack_into(slot.header, 0, count, step, microbatch)
        if not _IS_X86:
            self._fence.full()
        self._count = words[_PUBLISHED] = count + 1
        self._fence.full()
        if words[_RECEIVER_WAITS] and not quiet:
            self._link.ring()

    def _free_slot(self, count: int) -> RingSlot:
        """A slot that is neither under way nor lent; see [Note: lent slots]."""
        words, depth = self._words, self._depth
        under_way = {self._used[number % depth] for number in range(words[_TAKEN], count)}
        self._fence.light()
        for index, slot in enumerate(self._slots):
            if index not in under_way and not slot.is_lent:
                self._used[count % depth] = index
                words[_FIRST_SLOT_OF + count % depth * _WORDS_PER_LINE] = index
                self._fence.light()
                return slot
        raise TransportError(
            f"{self._what}: more slots are lent than there are to spare\n"
            f"  Fix: all workers must run the same version; restart the job"
        )

    def has_room(self) -> bool:
        """See ``Sender.has_room``."""
        if self.closed or self._link.broken is not None:
            return True
        return self._count - self._words[_TAKEN] < self._depth

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

    def __init__(self, spec: ChannelSpec, region: SharedRegion, link: Link, links: Links) -> None:
        super().__init__(spec, region, link, links)
        self._decoder = FrameDecoder(spec, generation=links.session.generation)
        self._expects = False
        self._lent: list[RingSlot] = []

    def close(self) -> None:
        """See ``_End.close``."""
        super().close()
        self._lent = []

    def is_ready(self) -> bool:
        """See ``Receiver.is_ready``."""
        if self.closed or self._link.broken is not None:
            return True
        return self._words[_PUBLISHED] > self._count

    def expect(self) -> None:
        """See ``Receiver.expect``."""
        if not self.closed:
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
        if not _IS_X86:
            self._fence.full()
        slot = self._slot_of(count) if self._num_spare else self._slots[count % self._depth]
        # A snapshot: what is checked must not change under the check.
        header = bytes(slot.header)
        frame = self._decoder.frame_of_message(
            header, sequence=count, step=step, microbatch=microbatch
        )
        if slot.frame is not frame:
            slot.adopt(frame)
        value = self._value_in(slot) if self._num_spare else slot.copy_out()
        if not _IS_X86:
            self._fence.full()
        self._count = words[_TAKEN] = count + 1
        self._fence.full()
        if words[_SENDER_WAITS]:
            self._link.ring()
        return value

    def _value_in(self, slot: RingSlot) -> torch.Tensor | None:
        """The value of a slot: lent where that is possible; see [Note: lent slots]."""
        self._lent = [other for other in self._lent if other.is_lent]
        value = slot.lend() if len(self._lent) < self._num_spare else None
        if value is None:
            return slot.copy_out()
        self._lent.append(slot)
        return value

    def _slot_of(self, count: int) -> RingSlot:
        index = self._words[_FIRST_SLOT_OF + count % self._depth * _WORDS_PER_LINE]
        if index >= len(self._slots) or self._slots[index].is_lent:
            raise FrameError(
                f"{self._what}: a message in slot {index}; expected one of {len(self._slots)} that "
                f"is free\n  Fix: all workers must run the same version; restart the job"
            )
        return self._slots[index]


class SharedMemoryTransport(Transport):
    """Moves values between workers of one host.

    Args:
        listener: A socket made by ``links.listen``, whose name the peers know.
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
        watch = AbortWatch(policy)
        self._links = Links(listener, session=session, names=names, watch=watch)
        self._ends: dict[tuple[int, int, bool], _ShmSender | _ShmReceiver] = {}
        watch.call(self._links.wake)

    def open_sender(self, spec: ChannelSpec) -> Sender:
        """See ``Transport.open_sender``."""
        link = self._links.outbound(spec.destination)
        region, fd = create_region(f"graphsplit-{spec.plan}-{spec.edge}", channel_bytes(spec))
        try:
            sender = _ShmSender(spec, region, link, self._links)
            self._links.announce(link, spec.plan, spec.edge, fd)
        finally:
            os.close(fd)
        self._ends[spec.plan, spec.edge, True] = sender
        return sender

    def open_receiver(self, spec: ChannelSpec) -> Receiver:
        """See ``Transport.open_receiver``."""
        what = describe(spec)
        fd, link = self._links.wait_memory(spec.source, spec.plan, spec.edge, what)
        region = adopt_region(fd, channel_bytes(spec), what=what)
        receiver = _ShmReceiver(spec, region, link, self._links)
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
        ends, self._ends = self._ends, {}  # another thread may close it too
        for end in ends.values():
            end.close()
        self._links.close()
