"""The one interface between the runtime and whatever moves tensors.

A *channel* is one direction of one edge of a plan: it has one source worker, one destination
worker, and a bound. Both ends derive the same ``ChannelSpec`` from the plan they agreed on, so no
size is ever taken from a message::

    worker 0                                   worker 1
    sender = transport.open_sender(spec)       receiver = transport.open_receiver(spec)
    sender.send(value, step=7, microbatch=0)   value = receiver.receive(step=7, microbatch=0)

Messages of one channel arrive in the order they were sent. Channels are independent of each
other: a full channel never delays another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ChannelSpec:
    """A channel, as both of its ends know it before the first message.

    Attributes:
        plan: Number of the plan the channel belongs to (-1: channels that every job has).
        edge: Number of the edge in that plan. ``(plan, edge)`` is unique in a job.
        source: Rank of the sending worker.
        destination: Rank of the receiving worker.
        dtype: dtype of every value.
        shape: Shape of every value, None for each size that may change from value to value within
            ``max_bytes``: of dynamic dimensions, of tickets, of chunks of a state dictionary.
        max_bytes: The most memory one received value may take, strides included.
        depth: How many messages may be under way before ``send`` waits for the receiver.
        label: The edge in words, for errors: ``"conv1.relu: worker 3 -> worker 4"``.
        lends: Received values are gone when the step is, so their memory may be used again.
        keeps: Nobody writes to a value once it was sent, so it need not be copied.
        device: Where values are, on both ends: ``"cpu"``, or another device such as ``"cuda:0"``.
    """

    plan: int
    edge: int
    source: int
    destination: int
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    max_bytes: int
    depth: int = 2
    label: str = ""
    lends: bool = False
    keeps: bool = False
    device: str = "cpu"


class Sender(ABC):
    """The sending end of one channel. Used by one thread at a time."""

    @abstractmethod
    def send(
        self, value: torch.Tensor | None, *, step: int, microbatch: int, quiet: bool = False
    ) -> None:
        """Send a value; None is a value too (a gradient that does not exist).

        The value is copied before this returns, so it may be modified afterwards, unless the spec
        ``keeps``: then the sender may read from it until the receiver has taken it. dtype, shape
        and strides arrive unchanged; autograd history and ``requires_grad`` do not travel.
        Returns at once unless ``depth`` messages are under way; then waits for the receiver.

        Args:
            value: The value.
            step: Number of the step.
            microbatch: Number of the microbatch.
            quiet: The receiver need not be woken for this value: it will be, soon after, by a
                message that it ``expect``s. Transports for which waking is free ignore it.

        Raises:
            TransportError: The value does not fit the channel's spec, or the link broke.
            ReceiveTimeoutError: The receiver took nothing and made no progress for the deadline.
            JobFailedError: The job was aborted while waiting.
        """

    def announce(self) -> None:  # noqa: B027  a hint, which most transports have no use for
        """Tell the receiver that the next value will be sent within milliseconds.

        Waking a sleeping process takes longer than a small value does to cross. Announced when its
        computation begins, the value finds a receiver that is awake and looks for it.
        """

    def hold(self) -> None:  # noqa: B027  a hint, which most transports have no use for
        """Tell that another value to the same worker follows the next one, with no wait between.

        The two may then travel together. A value is never held up by one that has to wait.
        """

    def has_room(self) -> bool:
        """Whether ``send`` would return, or raise, without waiting; True if it is not known."""
        return True


class Receiver(ABC):
    """The receiving end of one channel. Used by one thread at a time."""

    @abstractmethod
    def receive(self, *, step: int, microbatch: int) -> torch.Tensor | None:
        """Wait for the next value of the channel and return it in memory of its own.

        Nobody else writes to that memory until it is freed. It is fresh, unless the spec ``lends``.

        Raises:
            FrameError: What arrived is not the message of this step and microbatch, or not as
                the spec says.
            ReceiveTimeoutError: Nothing arrived, and the sender made no progress, for the
                deadline.
            JobFailedError: The job was aborted while waiting.
        """

    def expect(self) -> None:  # noqa: B027  a hint, which most transports have no use for
        """Have this worker woken by the channel's next message, whatever it then waits for."""

    def is_ready(self) -> bool:
        """Whether ``receive`` would return, or raise, without waiting; True if it is not known."""
        return True


class Transport(ABC):
    """Moves tensors between this worker and its peers."""

    name: str

    @abstractmethod
    def open_sender(self, spec: ChannelSpec) -> Sender:
        """Open the sending end of a channel. Does not wait for the peer."""

    @abstractmethod
    def open_receiver(self, spec: ChannelSpec) -> Receiver:
        """Open the receiving end of a channel. May wait, with a deadline, for the peer's end."""

    @abstractmethod
    def close_plan(self, plan: int) -> None:
        """Give back everything the channels of a plan hold."""

    @abstractmethod
    def close(self) -> None:
        """Give back everything. Safe to call twice, and after a failure."""
