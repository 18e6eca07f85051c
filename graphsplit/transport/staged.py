"""Values on devices, by a transport of host memory: copied there, sent, and copied back.

A copy between a device and the host changes no bits. Strides are kept: kernels look at them.
"""

from __future__ import annotations

import dataclasses

import torch

from graphsplit.tensor_meta import CPU
from graphsplit.transport.base import ChannelSpec, Receiver, Sender
from graphsplit.transport.layout import empty_value, layout_of, wire_view


def staged(spec: ChannelSpec) -> ChannelSpec:
    """A channel as a transport of host memory has it; the same object where values are there."""
    return spec if spec.device == CPU else dataclasses.replace(spec, device=CPU, lends=False)


def moved(value: torch.Tensor, device: str) -> torch.Tensor:
    """A copy of a value on another device, with its strides; returns when it is there."""
    layout = layout_of(value.shape, value.stride())
    copy = empty_value(layout, value.dtype, 0, device=device)
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    wire_view(copy, layout).copy_(wire_view(value.detach(), layout))
    return copy


class StagedSender(Sender):
    """Sends what is on a device from host memory.

    Args:
        sender: The sending end of the ``staged`` channel.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def send(
        self, value: torch.Tensor | None, *, step: int, microbatch: int, quiet: bool = False
    ) -> None:
        """See ``Sender.send``. Waits for the device that makes the value."""
        value = None if value is None else moved(value, CPU)
        self._sender.send(value, step=step, microbatch=microbatch, quiet=quiet)

    def announce(self) -> None:
        """See ``Sender.announce``."""
        self._sender.announce()

    def has_room(self) -> bool:
        """See ``Sender.has_room``."""
        return self._sender.has_room()


class StagedReceiver(Receiver):
    """Receives in host memory what is then copied to a device.

    Args:
        receiver: The receiving end of the ``staged`` channel.
        device: Where values go.
    """

    def __init__(self, receiver: Receiver, device: str) -> None:
        self._receiver, self._device = receiver, device

    def receive(self, *, step: int, microbatch: int) -> torch.Tensor | None:
        """See ``Receiver.receive``."""
        value = self._receiver.receive(step=step, microbatch=microbatch)
        return None if value is None else moved(value, self._device)

    def expect(self) -> None:
        """See ``Receiver.expect``."""
        self._receiver.expect()

    def is_ready(self) -> bool:
        """See ``Receiver.is_ready``."""
        return self._receiver.is_ready()
