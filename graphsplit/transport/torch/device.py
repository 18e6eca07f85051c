"""Values from device to device, by NCCL.

NCCL matches a send with a receive by the order in which both sides post them, per communicator,
and each occupies its stream until the other side has come. So there is a communicator, and a
stream, for each direction, and the receiver posts in the order in which the records of the
payloads arrive on the link, which is the order in which the sender posted. A receive is posted
only when its send has been: neither side's device ever waits for a program, and the two
directions never wait for each other.

Nothing here waits for the device. A value is copied on the stream that made it, sent on the side
stream, and the stream of the receiving program is made to wait for its arrival.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from graphsplit.errors import TransportError
from graphsplit.torch_ext.private import nccl_group
from graphsplit.transport.credit import Arrived
from graphsplit.transport.frame import MESSAGE, Frame
from graphsplit.transport.torch.rendezvous import Rendezvous
from graphsplit.transport.torch.wire import FOREVER, octets


class DeviceMessage(Arrived):
    """A value whose payload arrives on the device, in the order of its stream."""

    __slots__ = ("_ready",)

    def __init__(self, header: bytes, frame: Frame, memory: torch.Tensor, ready: Any) -> None:
        super().__init__(MESSAGE.unpack_from(header), frame, memory)
        self._ready = ready

    def value(self) -> torch.Tensor | None:
        """See ``Arrived.value``. The current stream waits for the payload, the caller does not."""
        if self.memory is not None:
            stream = torch.cuda.current_stream(self.memory.device)
            stream.wait_event(self._ready)
            self.memory.record_stream(stream)
        return super().value()


class DeviceWire:
    """Device memory between two workers, a communicator for each direction.

    Attributes:
        lock: Held while a record and its payload are posted, so that both have one order.

    Raises:
        TransportError: NCCL refuses the pair, as it does two workers on one GPU.
    """

    def __init__(self, meeting: Rendezvous, device: torch.device) -> None:
        self.lock = threading.Lock()
        self._device = device
        self._peer = 1 - meeting.rank
        self._groups: list[Any] = []
        for direction in ("up", "down"):
            store = dist.distributed_c10d.PrefixStore(direction, meeting.store)
            self._groups.append(nccl_group(store, meeting.rank, FOREVER))
        self._sends = self._groups[meeting.rank]
        self._receives = self._groups[1 - meeting.rank]
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        try:
            self._make_communicators(meeting.rank)
        except RuntimeError as error:  # refused: two workers on one GPU, or other versions
            raise TransportError(
                f"NCCL does not join these two workers; it wants a GPU for each, as by "
                f"CUDA_VISIBLE_DEVICES, or GS_TRANSPORT=auto: {str(error).splitlines()[0]}"
            ) from None

    def _make_communicators(self, rank: int) -> None:
        """NCCL makes a communicator at its first operation, when both sides must be there."""
        token = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for direction, group in enumerate(self._groups):
            move = group.send if direction == rank else group.recv
            move([token], self._peer, 0).wait()
        torch.cuda.synchronize(self._device)

    def send(self, payload: torch.Tensor) -> None:
        """Post a send of memory that the current stream has written. Hold ``lock``."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            self._sends.send([payload], self._peer, 0).wait()
        payload.record_stream(self._out)

    def receive(self, header: bytes, frame: Frame) -> DeviceMessage:
        """Post a receive; the message is there as soon as its stream comes to it.

        The memory is the side stream's: that of another one might still be read there.
        """
        with torch.cuda.stream(self._in):
            memory = frame.empty_payload()
            assert memory is not None
            flat = octets(memory, frame.payload_bytes)
            self._receives.recv([flat], self._peer, 0).wait()
            ready = torch.cuda.Event()
            ready.record(self._in)
        return DeviceMessage(header, frame, memory, ready)

    def drop(self, scratch: torch.Tensor) -> None:
        """Post a receive of something that nobody wants any more."""
        with torch.cuda.stream(self._in):
            self._receives.recv([scratch.to(self._device)], self._peer, 0).wait()

    def abort(self) -> None:
        """End what is posted."""
        for group in self._groups:
            with suppress(RuntimeError):
                group.abort()
