"""The least that moves values over Gloo by hand with what our engine says beside them.

A header that is checked, credit that bounds what is under way, and waits that somebody can end. The
thread that waits for a value reads the pair itself; no thread files what comes. A small value
stands behind its header, a large one follows out of the sender's own memory and into fresh one.
"""

from __future__ import annotations

import struct
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

INLINE_BYTES, DEPTH, NUM_POSTED = 64 << 10, 2, 4
_FOREVER, _AT_ONCE = timedelta(days=365), timedelta(milliseconds=1)
# Kind, plan, edge, sequence, step, microbatch, generation, dtype, dimensions, elements, bytes.
_HEADER = struct.Struct("<BIIQQIQBBQQ")
_HEADER_BYTES = 64
_VALUE, _CREDIT = 1, 2
_HEADERS, _PAYLOADS, _ABORT = 0, 1, 2


class GlooByHand:
    """One worker's ends of a channel in each direction. Used by one thread, but for ``abort``.

    Args:
        store: Where the two meet.
        rank: This worker.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        self._peer = 1 - rank
        self._posted: deque[tuple[torch.Tensor, Any]] = deque()
        for _ in range(NUM_POSTED):
            self._post(torch.zeros(_HEADER_BYTES + INLINE_BYTES, dtype=torch.uint8))
        self._arrived: deque[tuple[tuple[Any, ...], torch.Tensor]] = deque()
        self._under_way: deque[Any] = deque()
        self._granted, self._sent, self._taken, self._owed = DEPTH, 0, 0, 0

    def send(self, value: torch.Tensor, step: int) -> None:
        """Send a value, once there is credit. Nobody may write to it until it is taken."""
        while self._sent >= self._granted:
            self._read(torch.empty_like(value))
        size, flat = value.nbytes, value.view(torch.uint8)
        is_small = size <= INLINE_BYTES
        message = torch.empty(_HEADER_BYTES + size * is_small, dtype=torch.uint8)
        numbers = _VALUE, 0, 0, self._sent, step, 0, 1, 6, value.dim(), value.numel(), size
        _HEADER.pack_into(message.numpy(), 0, *numbers)
        if is_small:
            message[_HEADER_BYTES:] = flat
        works = [self._gloo.send([message], self._peer, _HEADERS)]
        if not is_small:
            works.append(self._gloo.send([flat], self._peer, _PAYLOADS))
        self._under_way.append((works, message, value))
        self._sent += 1

    def receive(self, like: torch.Tensor, step: int) -> torch.Tensor:
        """Wait for the value of a step, into fresh memory."""
        fresh = torch.empty_like(like)
        while not self._arrived:
            self._read(fresh)
        header, value = self._arrived.popleft()
        if header[3:6] != (self._taken, step, 0):
            raise SystemExit("another value was expected")
        self._taken += 1
        self._owed += 1
        if self._owed == DEPTH:
            message = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
            _HEADER.pack_into(message.numpy(), 0, _CREDIT, 0, 0, self._owed, *[0] * 7)
            self._under_way.append((self._gloo.send([message], self._peer, _HEADERS), message))
            self._owed = 0
        return value

    def abort(self) -> None:
        """End every wait, from any thread: Gloo breaks a pair when a wait runs out of time."""
        try:
            nothing = torch.empty(1, dtype=torch.uint8)
            self._gloo.recv([nothing], self._peer, _ABORT).wait(_AT_ONCE)
        except RuntimeError:
            pass

    def _post(self, message: torch.Tensor) -> None:
        self._posted.append((message, self._gloo.recv([message], self._peer, _HEADERS)))

    def _read(self, fresh: torch.Tensor) -> None:
        """Wait for one message; the payload of a value comes into ``fresh``."""
        message, work = self._posted.popleft()
        work.wait(_FOREVER)
        header = _HEADER.unpack_from(message.numpy())
        kind, _, _, number, _, _, generation, dtype, dims, elements, size = header
        if kind == _CREDIT:
            self._granted += number
            for _ in range(min(2 * number, len(self._under_way) - DEPTH)):
                self._under_way.popleft()
        elif (kind, generation, dtype, dims, elements, size) != (
            *(_VALUE, 1, 6, fresh.dim(), fresh.numel(), fresh.nbytes),
        ):
            raise SystemExit("a value of another layout")
        else:
            flat = fresh.view(torch.uint8)
            if size <= INLINE_BYTES:
                flat[:] = message[_HEADER_BYTES : _HEADER_BYTES + size]
            else:
                self._gloo.recv([flat], self._peer, _PAYLOADS).wait(_FOREVER)
            self._arrived.append((header, fresh))
        self._post(message)
