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

# What optimizers count themselves is in their groups too, and only where they have parameters: of
# classes that are not torch's, these alone are known to be the script's.
_COMPARED = ("lr", "weight_decay", "momentum", "betas", "eps")
_MAX_TOLD = 24  # numbers; a checksum stands for the rest
_NONE = float("nan")


class Settings:
    """The settings of a Model's optimizers.

    Args:
        optimizers: The optimizers.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._keys = [_keys_of(optimizer) for optimizer in self._optimizers]
        self._seen: list[Any] = []
        self._has_tensors = False  # whose values change in place
        self._numbers: tuple[float, ...] = ()

    def numbers(self) -> tuple[float, ...]:
        """The first numbers among the settings, learning rates before all, and a checksum."""
        now: list[Any] = []
        for group, keys in self._groups():
            now += map(group.get, keys)
        is_same = len(now) == len(self._seen) and all(map(is_, now, self._seen))
        if not is_same or self._has_tensors:
            self._seen = now
            self._has_tensors = any(isinstance(value, torch.Tensor) for value in now)
            told = (number for *_, number in self._told())
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
        pairs = zip(self._told(), mine, theirs, strict=False)
        found = [
            f"{name} of the optimizer's group {number} is {value!r} on worker {rank}, "
            f"{_as(value, there)!r} on worker {other}"
            for (number, name, value, _), here, there in pairs
            if repr(here) != repr(there)
        ]
        if found or mine[-1:] == theirs[-1:]:
            return found
        kept = [{key: group[key] for key in keys if key in group} for group, keys in self._groups()]
        return [
            f"the optimizer's settings are {str(kept)[:300]} on worker {rank}, and others on "
            f"worker {other}"
        ]

    def _groups(self) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
        for optimizer, keys in zip(self._optimizers, self._keys, strict=True):
            for group in optimizer.param_groups:
                yield group, keys

    def _told(self) -> list[tuple[int, str, Any, float]]:
        """Group, name, value and number of the settings that are numbers."""
        found = []
        for number, (group, keys) in enumerate(self._groups()):
            for key in keys:
                value = _plain(group.get(key))
                many = isinstance(value, tuple)
                for index, one in enumerate(value if many else (value,)):
                    if one is None or isinstance(one, (bool, int, float)):
                        name = f"{key}[{index}]" if many else key
                        found.append((number, name, one, _NONE if one is None else float(one)))
        found.sort(key=lambda told: told[1] != "lr")
        return found[:_MAX_TOLD]


def _keys_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    return tuple(optimizer.defaults) if is_torchs else _COMPARED


def _as(value: Any, number: float) -> Any:
    """Another worker's number as the setting that it stands for."""
    if number != number:
        return None
    is_whole = isinstance(value, (bool, int)) and number.is_integer()
    return type(value)(number) if is_whole else number


def _plain(value: Any) -> Any:
    """A value whose text is the same on all workers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else type(value).__name__
