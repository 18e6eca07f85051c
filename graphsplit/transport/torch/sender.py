"""The sending end of a channel on a link over ``torch.distributed``."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from graphsplit.errors import TransportError
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.credit import CreditedSender
from graphsplit.transport.frame import Frame, describe, header_bytes
from graphsplit.transport.layout import pack
from graphsplit.transport.pool import MemoryPool
from graphsplit.transport.session import AbortWatch
from graphsplit.transport.torch.link import TorchLink
from graphsplit.transport.torch.wire import (
    INLINE_BYTES,
    MAX_HEADER_BYTES,
    RecordKind,
    WireRecord,
    octets,
)


class TorchSender(CreditedSender):
    """The sending end."""

    def __init__(
        self, spec: ChannelSpec, link: TorchLink, watch: AbortWatch, generation: int
    ) -> None:
        super().__init__(spec, link.outgoing, watch, generation)
        if header_bytes(spec) > MAX_HEADER_BYTES:
            raise TransportError(f"{describe(spec)}: too many dimensions for this transport")
        self._link = link
        # Large payloads that the peer has not taken yet; None for each small one.
        self._under_way: deque[tuple[torch.Tensor, Any] | None] = deque()
        self._pool = MemoryPool()

    def send(
        self, value: torch.Tensor | None, *, step: int, microbatch: int, quiet: bool = False
    ) -> None:
        """See ``Sender.send``."""
        hold, self._holds = self._holds, False
        frame = self._encoder.frame_of(value)
        header = self._next_header(frame, step, microbatch)
        memory = None if value is None else value.detach()
        kind = RecordKind.SMALL if frame.payload_bytes <= INLINE_BYTES else RecordKind.LARGE
        if self.spec.device != "cpu" and frame.payload_bytes:
            kind = RecordKind.DEVICE
        record = WireRecord(kind, self.spec.plan, self.spec.edge, 0, header, frame.payload_bytes)
        try:
            self._link.put_owed()
            if kind is RecordKind.SMALL:
                self._send_small(record, frame, memory, hold)
            elif memory is not None:
                self._send_large(record, frame, memory)
        except TransportError as error:
            self._watch.raise_broken(f"{describe(self.spec)}: worker {self._link.peer}: {error}")

    def _send_small(
        self, record: WireRecord, frame: Frame, memory: torch.Tensor | None, hold: bool
    ) -> None:
        if memory is not None and not frame.is_payload(memory):
            memory, _ = pack(memory)
        self._under_way.append(None)
        address = 0 if memory is None else memory.data_ptr()
        self._link.writer.put(record, address=address, hold=hold)

    def _send_large(self, record: WireRecord, frame: Frame, memory: torch.Tensor) -> None:
        is_payload = frame.is_payload(memory)
        if record.kind is RecordKind.DEVICE:
            payload = octets(memory, frame.payload_bytes).clone() if is_payload else pack(memory)[0]
            self._under_way.append(None)
            self._link.put_device(record, payload)
            return
        source = octets(memory, frame.payload_bytes) if is_payload else pack(memory)[0]
        is_copied = is_payload and not self.spec.keeps
        payload = self._pool.take(frame.payload_bytes) if is_copied else source
        sends = self._link.writer.put_large(record, payload, source if is_copied else None)
        self._under_way.append((payload, sends))

    def credited(self, messages: int) -> None:
        """See ``CreditedSender.credited``."""
        for _ in range(min(messages, len(self._under_way))):
            self._under_way.popleft()
