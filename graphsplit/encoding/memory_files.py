"""Memory that a process and what it starts have as an open file: no name, no network, no disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

_PIECE_BYTES = 1 << 30


@contextlib.contextmanager
def memory_files(number: int) -> Iterator[tuple[int, ...]]:
    """Some empty files, while this lasts."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(number):
            found.append(os.memfd_create("graphsplit-call"))
            stack.callback(os.close, found[-1])
        yield tuple(found)


def write(file: int, pieces: list[torch.Tensor]) -> None:
    """Put bytes into a file, in place of what is there."""
    os.ftruncate(file, 0)
    at = 0
    for piece in pieces:
        for part in piece.split(_PIECE_BYTES):
            octets = part.numpy().data
            while octets:
                done = os.pwrite(file, octets, at)
                octets, at = octets[done:], at + done


def read(file: int) -> torch.Tensor:
    """The bytes of a file."""
    found = torch.empty(os.fstat(file).st_size, dtype=torch.uint8)
    octets, at = found.numpy().data, 0
    while octets:
        done = os.preadv(file, [octets[:_PIECE_BYTES]], at)
        if done == 0:
            break  # its writer was ended meanwhile: who reads the bytes will find out
        octets, at = octets[done:], at + done
    return found[:at]
