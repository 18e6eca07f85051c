"""The writing half of a link: records gathered into messages, messages handed to Gloo.

Sending never waits for the peer's program, only for its thread, and that only when
``_NUM_MESSAGES`` messages are under way. What is sent stands in memory of the writer's own, which
is used again when the send that reads from it is done.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from graphsplit.errors import TransportError
from graphsplit.transport.layout import copy_bytes
from graphsplit.transport.torch.wire import (
    FOREVER,
    MESSAGE_TAG,
    PAYLOAD_TAG,
    PIECE_BYTES,
    MessageBuffer,
    RecordKind,
    WireRecord,
)

_NUM_MESSAGES = 16


class Writer:
    """Writes to one peer. Thread-safe; what is written before ``start`` waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: deque[MessageBuffer] = deque()
        self._current: MessageBuffer | None = None
        self._num_made = 0
        self._early: list[WireRecord] = []
        self._gloo: Any = None
        self._peer = -1

    def start(self, gloo: Any, peer: int, first: WireRecord) -> None:
        """Begin to write, this record before all others."""
        with self._lock:
            self._gloo, self._peer = gloo, peer
            for record in (first, *self._early):
                self._add(record, 0)
                self._flush()
            self._early.clear()

    def put(self, record: WireRecord, *, address: int = 0, hold: bool = False) -> None:
        """Write a record, with a payload copied from ``address`` if it is a small one.

        Args:
            record: The record.
            address: Where the payload is.
            hold: It may wait for the next record, to travel together.
        """
        with self._lock:
            if self._gloo is None:
                if record.kind is RecordKind.SMALL:
                    raise TransportError("a value was sent without credit: there is no link yet")
                self._early.append(record)
                return
            self._add(record, address)
            if not hold:
                self._flush()

    def put_large(
        self, record: WireRecord, payload: torch.Tensor, source: torch.Tensor | None = None
    ) -> list[Any]:
        """Write a record and, out of ``payload``, its payload.

        Args:
            record: The record.
            payload: uint8, as many as the record says.
            source: What is to be copied to ``payload`` first; None: it is there.

        Returns:
            The sends; they and the payload must be kept until the peer has taken the value.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._add(record, 0)
            self._flush()
            sends = []
            for at in range(0, payload.numel(), PIECE_BYTES):
                piece = payload[at : at + PIECE_BYTES]
                if source is not None:
                    piece.copy_(source[at : at + PIECE_BYTES])
                sends.append(self._call(self._gloo.send, piece, PAYLOAD_TAG))
            return sends

    def flush(self) -> None:
        """Send what is held back."""
        with self._lock:
            self._flush()

    def stop(self) -> None:
        """Let go of the group."""
        with self._lock:
            self._gloo = None
            self._free.clear()
            self._current = None

    def _add(self, record: WireRecord, address: int) -> None:
        message = self._current
        target = None if message is None else message.write(record)
        if target is None:
            self._flush()
            self._current = self._empty()
            target = self._current.write(record)
            assert target is not None
        if address:
            copy_bytes(target, address, record.payload_bytes)

    def _empty(self) -> MessageBuffer:
        """Memory for a message: new, or the oldest, once its send is done."""
        if self._num_made < _NUM_MESSAGES:
            self._num_made += 1
            return MessageBuffer()
        message = self._free.popleft()
        if message.work is not None:
            try:
                message.work.wait(FOREVER)
            except RuntimeError as error:
                raise TransportError(f"the link broke: {error}") from error
        message.clear()
        return message

    def _flush(self) -> None:
        message, self._current = self._current, None
        if message is not None:
            self._free.append(message)
            message.work = self._call(self._gloo.send, message.written(), MESSAGE_TAG)

    def _call(self, send: Any, memory: torch.Tensor, tag: int) -> Any:
        try:
            return send([memory], self._peer, tag)
        except RuntimeError as error:
            raise TransportError(f"the link broke: {error}") from error
