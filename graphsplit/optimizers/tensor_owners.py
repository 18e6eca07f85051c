"""Where the tensors of all Models of a job live, and how often they were written to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from graphsplit.optimizers.ownership import is_elsewhere, note_state, num_writes
from graphsplit.torch_ext.data_attribute import is_lent_written_to, lend_data


class TensorOwners:
    """Which worker each parameter and buffer of a job lives on.

    A tensor has one owner, however many Models use it, and whichever of them was planned first.

    Attributes:
        num_fixed: How often owners were fixed, on every worker.
    """

    def __init__(self) -> None:
        self._owners: Any = WeakTensorKeyDictionary()
        self.num_fixed = 0

    def fix(self, tensors: Mapping[str, torch.Tensor], owners: Mapping[str, int]) -> None:
        """Note the owner of every tensor, by its name in one Model."""
        self.num_fixed += 1
        for name, tensor in tensors.items():
            note_state(tensor, name)
            self._owners[tensor] = owners[name]

    def known(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The owners that are fixed, by the names that another Model has for its tensors."""
        return {name: self._owners[t] for name, t in tensors.items() if t in self._owners}


class ComparedWrites:
    """How often each tensor of a job had been written to when workers last compared that.

    A tensor has one number of writes, however many Models use it, and whichever has compared last.

    Attributes:
        writes: The writes to each tensor, by its key.
    """

    def __init__(self) -> None:
        self._keys: Any = WeakTensorKeyDictionary()  # numbers, none of which comes twice
        self.writes: dict[int, int] = {}

    def key_of(self, tensor: torch.Tensor) -> int:
        """The number by which a tensor is known; of a new one, no write so far counts."""
        key: int | None = self._keys.get(tensor)
        if key is None:
            key = self._keys[tensor] = len(self.writes)
            self.writes[key] = num_writes(tensor)
            lend_data(tensor)
        return key

    def forget(self) -> None:
        """Know no tensor."""
        self._keys = WeakTensorKeyDictionary()
        self.writes.clear()

    def is_written_to(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that is here, and known, was written to since."""
        key = None if is_elsewhere(tensor) else self._keys.get(tensor)
        if key is None:
            return False
        return self.writes[key] != num_writes(tensor) or is_lent_written_to(tensor)
