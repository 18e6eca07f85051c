"""Memory of large values that is used again once nobody sees it.

Fresh memory costs a page fault for every 4 KiB, which is a good part of what a large value costs
on its way. Whether somebody sees a piece is asked of torch, which counts the holders of every
storage: views, saved activations and arrays of numpy hold one as the value itself does.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass

import torch

from graphsplit.torch_ext.attributes import storage_key
from graphsplit.torch_ext.private import storage_use_count

POOLED_BYTES = 128 << 10
"""Smaller values are not worth it."""

MOST_BYTES = 256 << 20
"""The most that a pool holds; what is taken beyond it is fresh, and not remembered."""


def _holders(memory: torch.Tensor) -> tuple[int, int]:
    """How many hold a tensor's memory, and how many of Python's names the object for it has."""
    storage = memory.untyped_storage()
    return storage_use_count(storage_key(storage)), sys.getrefcount(storage)


@dataclass(frozen=True, eq=False)
class _Piece:
    memory: torch.Tensor
    address: int

    def is_free(self) -> bool:
        """Whether nobody else holds it, and it is what it was: it may have become shared memory."""
        if _holders(self.memory) != _ALONE:
            return False
        storage = self.memory.untyped_storage()
        return storage.nbytes() == self.memory.numel() and storage.data_ptr() == self.address


class MemoryPool:
    """Remembers the memory that it gave, and gives that again which nobody sees. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: dict[int, list[_Piece]] = {}  # by size
        self._held_bytes = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """Memory that nobody sees, as bytes of whatever value.

        Returns:
            uint8 of shape (size_bytes,). The caller has its memory as long as a tensor holds it.
        """
        with torch.inference_mode(False), self._lock:
            for piece in self._pieces.get(size_bytes, ()):
                if piece.is_free():
                    return piece.memory[:]
            fresh = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
            if self._held_bytes + size_bytes > MOST_BYTES:
                self._forget_free()
            if self._held_bytes + size_bytes <= MOST_BYTES:
                piece = _Piece(fresh, fresh.untyped_storage().data_ptr())
                self._pieces.setdefault(size_bytes, []).append(piece)
                self._held_bytes += size_bytes
            return fresh[:]

    def clear(self) -> None:
        """Forget everything; what is in use stays with those that hold it."""
        with self._lock:
            self._pieces, self._held_bytes = {}, 0

    def _forget_free(self) -> None:
        for size_bytes, pieces in list(self._pieces.items()):
            kept = [piece for piece in pieces if not piece.is_free()]
            self._held_bytes -= size_bytes * (len(pieces) - len(kept))
            self._pieces[size_bytes] = kept
            if not kept:
                del self._pieces[size_bytes]


_ALONE = _holders(torch.empty(1))
