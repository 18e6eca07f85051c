"""Numbers and tensors that operations of the script take from outside: each worker has its own.

A value of the loop is on one worker. A target, the weight of a loss, a learning rate is on each:
an operation takes that of the worker where it runs. Where they differ, as without a common seed, a
step would mix them, and nobody would see it. So each worker keeps a checksum of all that it met,
which goes with messages that are sent anyway.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from graphsplit.errors import LoaderMismatchError
from graphsplit.tensor_meta import octets_of
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

_NUMBERS = (type(None), float, bool, int, str, complex)  # the usual ones first
_MOST_ELEMENTS = 4096  # of larger tensors a part is looked at
_MOST_NAMED = 8


class FromOutside:
    """The checksum of what the operations of one worker took from outside.

    Attributes:
        count: How many operations were noted, and calls of networks.
        checksum: Of all of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.checksum = 0
        self._latest: deque[tuple[str, list[Any]]] = deque(maxlen=_MOST_NAMED)

    def note(self, name: str, operands: Iterable[Any], marks: Iterable[int] = ()) -> None:
        """Take note of an operation's operands; values of the loop are not among them.

        Args:
            name: The operation, as errors name it.
            operands: Numbers and tensors count; all else is left out.
            marks: What tells the values of the loop that it is given from others.
        """
        found: list[Any] = []
        self.count += 1
        for operand in operands:
            if type(operand) in _NUMBERS:
                found.append(operand)
            elif isinstance(operand, torch.Tensor):
                if operand.device.type == "cpu" and operand.layout is torch.strided:
                    self.checksum = zlib.crc32(_sample(operand), self.checksum)
                    found.append(operand.shape)
            elif isinstance(operand, _NUMBERS):
                found.append(operand)
        self.checksum = zlib.crc32(repr((name, found, [*marks])).encode(), self.checksum)
        self._latest.append((name, found))

    def next(self) -> int:
        """A number for a value, the same on all workers: they come here together."""
        self.count += 1
        return self.count

    def compare(self, told: int, rank: int, other: int, *, mine: int) -> None:
        """Compare it with that of another worker.

        Args:
            told: That of the other one.
            rank: This worker.
            other: That worker.
            mine: That of this one, at the same place of the script.

        Raises:
            LoaderMismatchError: They differ.
        """
        if told == mine:
            self._latest.clear()
            return
        raise LoaderMismatchError(
            f"workers {rank} and {other} ran the script's operations on different numbers or "
            f"tensors; on worker {rank} they were, latest last: {self.described()}\n"
            f"  Fix: give every worker the same targets, weights and learning rates: seed all "
            f"generators alike, and let none of them depend on the rank."
        )

    def described(self) -> str:
        """The latest operations, as errors show them."""
        texts = []
        for name, operands in self._latest:
            shown = (
                f"tensor of {tuple(o)}" if isinstance(o, torch.Size) else str(o) for o in operands
            )
            texts.append(f"{name}({', '.join(shown)})")
        return ", ".join(texts) or "none"


def _sample(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor; of a large one those of evenly spaced elements."""
    with DisableTorchFunctionSubclass():
        tensor = tensor.detach()
        if tensor.numel() > _MOST_ELEMENTS:
            each = max(1, round(_MOST_ELEMENTS ** (1 / tensor.dim())))
            tensor = tensor[tuple(slice(None, None, max(1, s // each)) for s in tensor.shape)]
        return octets_of(tensor).numpy().tobytes() if tensor.numel() else b""
