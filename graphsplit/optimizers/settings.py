"""The settings of optimizers that scripts change, as numbers that workers compare at each step.

Each worker steps what lives there with its own copy of the optimizer. A script that changes a
learning rate on one worker alone, or a data set that does so where it is read, would train a part
of the network at another rate than the rest.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import torch

# What optimizers count themselves is in their groups too, and only where they have parameters.
_COMPARED = ("lr", "weight_decay", "momentum", "betas", "eps")
_MAX_RATES = 8


class Settings:
    """The settings of a Model's optimizers.

    Args:
        optimizers: The optimizers.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._seen: list[Any] = []
        self._numbers: tuple[float, ...] = ()

    def numbers(self) -> tuple[float, ...]:
        """The learning rates of the first groups, and a checksum of all that is compared."""
        now = [group.get(key) for group in self._groups() for key in _COMPARED]
        is_same = len(now) == len(self._seen) and all(map(is_, now, self._seen))
        if not is_same or any(isinstance(value, torch.Tensor) for value in now):
            self._seen = now
            rates = map(_plain, now[:: len(_COMPARED)][:_MAX_RATES])
            told = [float(rate) if isinstance(rate, (int, float)) else 0.0 for rate in rates]
            self._numbers = (*told, float(zlib.crc32(repr(list(map(_plain, now))).encode())))
        return self._numbers if now else ()

    def differing(
        self, mine: Sequence[float], theirs: Sequence[float], ranks: tuple[int, int]
    ) -> list[str]:
        """The settings that are not the same on two workers, in words.

        Args:
            mine: The numbers of this worker.
            theirs: Those of the other one.
            ranks: This worker, and the other one.
        """
        rank, other = ranks
        if len(mine) != len(theirs):
            return [f"the optimizers have other groups on worker {rank} than on worker {other}"]
        rates = zip(mine[:-1], theirs[:-1], strict=True)
        found = [
            f"lr of the optimizer's group {number} is {here!r} on worker {rank}, {there!r} on "
            f"worker {other}"
            for number, (here, there) in enumerate(rates)
            if repr(here) != repr(there)
        ]
        if found or mine[-1:] == theirs[-1:]:
            return found
        kept = [{k: group[k] for k in _COMPARED if k in group} for group in self._groups()]
        return [
            f"the optimizer's settings are {str(kept)[:300]} on worker {rank}, and others on "
            f"worker {other}"
        ]

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.param_groups


def _plain(value: Any) -> Any:
    """A value whose text is the same on all workers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else type(value).__name__
