"""Messages under way are bounded by credit: what streams to and from one peer have in common.

A receiver gives its sender ``depth`` credits when it is opened, and one more for each value that
was taken. A sender spends one per value, and waits without. So whatever arrives on a stream has a
place to go, nothing on a stream is ever held up by a channel that is full, and any order of sends
and receives that a program may have is as good as any other::

    Outgoing (one per destination)                Incoming (one per source)
      CreditedSender ... CreditedSender             CreditedReceiver ... CreditedReceiver
      granted - sent = what may be sent now         arrived - taken = what waits to be taken

[Note: lazy credit] A credit is as expensive to send as a value. So a receiver owes what was taken,
until it rides along with a value to that peer, or all ``depth`` credits are owed. A sender that
has to wait says so first; it then gets what is owed, or the next one at once. So nobody waits for
a credit that is due: the bound is exactly ``depth``, as the proof that programs do not lock up
assumes.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from graphsplit.errors import FrameError, TransportError
from graphsplit.transport.base import ChannelSpec, Receiver, Sender
from graphsplit.transport.frame import (
    MESSAGE,
    Frame,
    FrameDecoder,
    FrameEncoder,
    Numbers,
    describe,
)
from graphsplit.transport.pool import MemoryPool
from graphsplit.transport.session import TICK_S, AbortWatch
from graphsplit.transport.wait import Wait

Key = tuple[int, int]
ReadUntil = Callable[[Callable[[], bool], Callable[[], None]], bool]
_MAX_EARLY = 1 << 17


class CreditedSender(Sender):
    """The sending end of a channel. May send as long as it has credit from the receiver."""

    def __init__(
        self, spec: ChannelSpec, outgoing: OutgoingChannels[Any], watch: AbortWatch, generation: int
    ) -> None:
        self.spec = spec
        self.closed = False
        self.granted = 0
        self._outgoing = outgoing
        self._watch = watch
        self._what = describe(spec)
        self._encoder = FrameEncoder(spec, generation=generation)
        self._num_sent = 0
        self._holds = False

    def hold(self) -> None:
        """See ``Sender.hold``."""
        self._holds = True

    def has_credit(self) -> bool:
        """True if ``send`` would return at once."""
        return self._num_sent < self.granted

    def has_room(self) -> bool:
        """See ``Sender.has_room``."""
        return self.has_credit() or self.closed or self._outgoing.broken is not None

    def is_within_depth(self) -> bool:
        """False if the receiver gave more credit than it can mean."""
        return self.granted - self._num_sent <= self.spec.depth

    def _next_header(self, frame: Frame, step: int, microbatch: int) -> bytes:
        """Wait for credit, and spend it on a message with this header."""
        if self.closed or not self.has_credit() or self._outgoing.broken is not None:
            self._outgoing.wait(self._watch, self._what, self)
        header = MESSAGE.pack(self._num_sent, step, microbatch) + frame.raw
        self._num_sent += 1
        return header

    def close(self) -> None:
        """Send no more."""
        self.closed = True

    def credited(self, messages: int) -> None:
        """Told that the receiver has taken so many more messages."""


def leave_reading(is_over: Callable[[], bool], look: Callable[[], None]) -> bool:
    """Read what a peer says on this thread, where that is possible, until a wait is over.

    Args:
        is_over: Whether it is, or nothing more will come.
        look: Called by another thread now and then; ends the reading if it raises.

    Returns:
        False if this thread has to wait for the one that reads: here, always.
    """
    return False


_S = TypeVar("_S", bound=CreditedSender)


class OutgoingChannels(Generic[_S]):
    """The channels to one destination. Thread-safe.

    Attributes:
        peer: Rank of the destination.
        broken: Why nothing more can be sent, or None.
    """

    def __init__(self, peer: int, read_until: ReadUntil = leave_reading) -> None:
        self.peer, self._read_until = peer, read_until
        self.broken: str | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._num_waiting = 0
        self._senders: dict[Key, _S] = {}
        # Credits of channels that this worker has not opened yet.
        self._early: dict[Key, int] = {}
        self._closed_plans: set[int] = set()

    def add(self, sender: _S) -> None:
        """Open a channel. The receiver's first credit may be here already."""
        key = sender.spec.plan, sender.spec.edge
        with self._changed:
            sender.granted += self._early.pop(key, 0)
            self._senders[key] = sender

    def remove_plan(self, plan: int | None) -> None:
        """Close the channels of a plan; of all plans for None."""
        with self._changed:
            if plan is not None:
                self._closed_plans.add(plan)
            for key in [key for key in self._senders if plan is None or key[0] == plan]:
                self._senders.pop(key).close()
            self._changed.notify_all()

    def notify(self) -> None:
        """Make every thread that waits for this destination look around."""
        with self._changed:
            self._changed.notify_all()

    @abstractmethod
    def want(self, spec: ChannelSpec) -> None:
        """Tell the receiver of a channel that its sender waits."""

    def flush(self) -> None:
        """Send what is held back to travel with something else."""

    def wait(self, watch: AbortWatch, what: str, sender: CreditedSender) -> None:
        """Wait until a sender has credit."""
        if sender.granted > 0:
            self.want(sender.spec)  # a channel that never had any gets all of it unasked
        self.flush()
        wait = Wait(watch.policy, peer=self.peer, what=what)
        while not sender.has_room():
            wait.check()
            if not self._read_until(sender.has_room, wait.check):
                self._sleep(sender)
        if self.broken is not None:
            wait.check()
        if sender.closed:
            raise TransportError(f"{what}: the channel was closed")
        if self.broken is not None:
            watch.raise_broken(f"{what}: worker {self.peer}: {self.broken}")

    def _sleep(self, sender: CreditedSender) -> None:
        with self._changed:
            self._num_waiting += 1
            if not sender.has_room():
                self._changed.wait(TICK_S)
            self._num_waiting -= 1

    def granted(self, plan: int, edge: int, messages: int) -> None:
        """Take credit from the receiver of a channel, which may not be open here yet.

        Raises:
            FrameError: It is more than the depths of the channels allow.
        """
        with self._lock:
            sender = self._senders.get((plan, edge))
            if sender is None and plan in self._closed_plans:
                return
            if sender is None:
                self._early[plan, edge] = self._early.get((plan, edge), 0) + messages
            else:
                sender.credited(messages)
                sender.granted += messages
                if self._num_waiting:
                    self._changed.notify_all()
            if len(self._early) > _MAX_EARLY or not (sender is None or sender.is_within_depth()):
                raise FrameError(f"worker {self.peer} gives more credit than agreed")

    def fail(self, reason: str) -> None:
        """Nothing more can be sent; the first reason given is the one that counts."""
        with self._changed:
            self.broken = self.broken or reason
            self._changed.notify_all()


class Arrived:
    """A message that has arrived, whole.

    Attributes:
        numbers: Sequence number, step and microbatch, as its header says.
        frame: The layout of its value.
        memory: The payload, in memory of its own.
    """

    __slots__ = ("frame", "memory", "numbers")

    def __init__(self, numbers: Numbers, frame: Frame, memory: torch.Tensor | None) -> None:
        self.numbers = numbers
        self.frame = frame
        self.memory = memory

    def value(self) -> torch.Tensor | None:
        """Its value, whose memory is its own."""
        return self.frame.value_in(self.memory)


class CreditedReceiver(Receiver):
    """The receiving end of a channel. Messages are put in by the stream's thread."""

    def __init__(
        self, spec: ChannelSpec, incoming: IncomingChannels[Any], watch: AbortWatch, generation: int
    ) -> None:
        self.spec = spec
        self.key: Key = (spec.plan, spec.edge)
        self.closed = False
        self._incoming = incoming
        self._watch = watch
        self._what = describe(spec)
        self._decoder = FrameDecoder(spec, generation=generation)
        # None stands for: look around.
        self._arrived: SimpleQueue[Arrived | None] = SimpleQueue()
        self._first: Arrived | None = None  # out of the queue, and not taken yet
        self._num_arrived = 0  # that have begun to
        self._num_filed = 0
        self._num_taken = 0
        self.num_owed = 0
        self.is_wanted = False

    def begin(self, header: bytes) -> Frame:
        """Check the header of the next message, before any memory is taken for it.

        Raises:
            FrameError: It is not what the plan, or the credits given, allow.
        """
        if self._num_arrived - self._num_taken >= self.spec.depth:
            raise FrameError(f"{self._what}: expected at most {self.spec.depth} messages under way")
        frame = self._decoder.frame_of(header)
        self._decoder.check_sequence(header, self._num_arrived)
        self._num_arrived += 1
        return frame

    def begin_alike(self, sequence: int) -> bool:
        """Begin the message with this number, whose layout is right, if it is the next one.

        Whoever is told no lets ``begin`` say what is wrong.
        """
        number = self._num_arrived
        if sequence != number or number - self._num_taken >= self.spec.depth:
            return False
        self._num_arrived += 1
        return True

    def file(self, message: Arrived) -> None:
        """Keep a message that has arrived until it is taken."""
        self._num_filed += 1
        self._arrived.put(message)

    def receive(self, *, step: int, microbatch: int) -> torch.Tensor | None:
        """See ``Receiver.receive``."""
        message = self._first
        if message is None:
            message = self._first = self._next()
        expected = self._num_taken, step, microbatch
        if message.numbers != expected:
            self._decoder.check_numbers(message.numbers, expected)
        value = message.value()
        self._first = None
        self._num_taken += 1
        self._incoming.owe(self)
        return value

    def _next(self) -> Arrived:
        """Wait for the next message.

        Most come soon. What is done before the first sleep keeps the thread that sends what this
        worker has just sent from running, so the wait begins, for everybody else, after it.
        """
        waits: list[Wait] = []

        def look() -> None:
            if not waits:
                policy, coming = self._watch.policy, self._incoming.is_coming
                peer, what = self.spec.source, self._what
                waits.append(Wait(policy, peer=peer, what=what, is_coming=coming))
            waits[0].check()

        while not self.closed and (self.has_message() or self._incoming.broken is None):
            is_read = not self.has_message() and self._incoming.read_until(self.is_ready, look)
            try:
                message = self._arrived.get(not is_read, TICK_S)
            except Empty:
                message = None
            if message is not None:
                return message
            look()
        if self.closed:
            raise TransportError(f"{self._what}: the channel was closed")
        error = self._incoming.broken
        if isinstance(error, FrameError):
            raise FrameError(str(error)) from error
        self._watch.raise_broken(f"{self._what}: worker {self.spec.source}: {error}")

    def has_message(self) -> bool:
        """True if ``receive`` would return at once."""
        return self._num_filed > self._num_taken

    def is_coming(self) -> bool:
        """True if a message has begun to arrive, and is not there yet."""
        return self._num_arrived > self._num_filed

    def is_ready(self) -> bool:
        """See ``Receiver.is_ready``."""
        return self.has_message() or self.closed or self._incoming.broken is not None

    def wake(self) -> None:
        """Make the thread that waits for a message look around."""
        self._arrived.put(None)

    def close(self) -> None:
        """Let go of what arrived."""
        self.closed = True
        self._first = None
        while not self._arrived.empty():
            with suppress(Empty):  # the thread that receives may be quicker
                self._arrived.get_nowait()
        self.wake()


_R = TypeVar("_R", bound=CreditedReceiver)


class IncomingChannels(Generic[_R]):
    """The channels from one source, before, while and after there is a stream. Thread-safe.

    Attributes:
        source: Rank of the source.
        broken: Why nothing more will come, or None.
    """

    def __init__(self, source: int, read_until: ReadUntil = leave_reading) -> None:
        self.source, self.read_until = source, read_until
        self.broken: Exception | None = None
        self._lock = threading.RLock()  # a signal handler may notify while its thread holds it
        self._receivers: dict[Key, _R] = {}
        self._debtors: dict[Key, _R] = {}
        # What was under way when a plan was closed is dropped.
        self._closed_plans: set[int] = set()
        self._pool = MemoryPool()

    def memory_for(self, receiver: _R, frame: Frame) -> torch.Tensor | None:
        """Memory for a value: fresh, unless the channel lends."""
        return frame.empty_payload(self._pool if receiver.spec.lends else None)

    @abstractmethod
    def grant(self, spec: ChannelSpec, messages: int) -> None:
        """Let the source send more messages of a channel, and know it at once."""

    def owe(self, receiver: _R) -> None:
        """Owe a credit for a message that was taken; see [Note: lazy credit]."""
        with self._lock:
            receiver.num_owed += 1
            if receiver.num_owed < receiver.spec.depth and not receiver.is_wanted:
                self._debtors[receiver.key] = receiver
                return
            messages = self._settle(receiver)
        self.grant(receiver.spec, messages)

    def wanted(self, plan: int, edge: int) -> None:
        """A sender waits for credit: give it what is owed, or the next one at once."""
        with self._lock:
            receiver = self._receivers.get((plan, edge))
            if receiver is None:
                return
            receiver.is_wanted = receiver.num_owed == 0
            if receiver.is_wanted:
                return
            messages = self._settle(receiver)
        self.grant(receiver.spec, messages)

    def owed(self) -> list[tuple[int, int, int]]:
        """All credits that are owed, to ride along with a value; they count as given.

        Returns:
            Plan, edge and messages of each.
        """
        if not self._debtors:
            return []
        with self._lock:
            return [(*one.key, self._settle(one)) for one in list(self._debtors.values())]

    def _settle(self, receiver: _R) -> int:
        messages, receiver.num_owed, receiver.is_wanted = receiver.num_owed, 0, False
        self._debtors.pop(receiver.key, None)
        return messages

    def add(self, receiver: _R) -> None:
        """Open a channel: from now on the source may send."""
        with self._lock:
            self._receivers[receiver.key] = receiver
        self.grant(receiver.spec, receiver.spec.depth)

    def remove_plan(self, plan: int | None) -> None:
        """Close the channels of a plan; of all plans for None."""
        with self._lock:
            if plan is not None:
                self._closed_plans.add(plan)
            for key in [key for key in self._receivers if plan is None or key[0] == plan]:
                self._receivers.pop(key).close()
                self._debtors.pop(key, None)
        self._pool.clear()

    def find(self, plan: int, edge: int) -> _R | None:
        """The receiver of a channel; None if its plan was closed.

        Raises:
            FrameError: There is no such channel.
        """
        receiver = self._receivers.get((plan, edge))
        if receiver is None and plan not in self._closed_plans:
            raise FrameError(
                f"worker {self.source} sent a value of plan {plan}, edge {edge}, which is not open"
            )
        return receiver

    def is_coming(self) -> bool:
        """True if a message of any channel has begun to arrive, and is not there yet."""
        return any(one.is_coming() for one in list(self._receivers.values()))

    def notify(self) -> None:
        """Make every thread that waits for this source look around."""
        with self._lock:
            receivers = list(self._receivers.values())
        for receiver in receivers:
            receiver.wake()

    def end(self, error: Exception) -> None:
        """Nothing more will come; the first reason given is the one that counts."""
        with self._lock:
            self.broken = self.broken or error
        self.notify()
