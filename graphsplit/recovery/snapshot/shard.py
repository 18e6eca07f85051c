"""One worker's part of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphsplit.checkpoint.generators import set_all_generators
from graphsplit.encoding.packed import Packed
from graphsplit.encoding.values import decode
from graphsplit.errors import FrameError

GENERATORS = "generators"
_PAD_BYTES = 1024


class SnapshotShard(Packed):
    """One worker's part of a snapshot. It is kept, and travels, as packed values."""

    @property
    def number(self) -> int:
        """Number of the snapshot."""
        number: int = self.values["number"]
        return number

    @property
    def rank(self) -> int:
        """The worker whose part it is."""
        rank: int = self.values["rank"]
        return rank

    @classmethod
    def read(cls, pieces: Sequence[torch.Tensor], *, what: str) -> SnapshotShard:
        """See ``Packed.read``."""
        found = super().read(pieces, what=what)
        number = found.values.get("number")
        if type(number) is not int or number < 0:
            raise FrameError(f"{what} has no number")
        return found

    def decoded(self, node: Any) -> Any:
        """A value of this part. Its tensors are copies: the part's memory is used again."""
        return decode(node, lambda name: self.tensor(name).clone())

    def put_generators(self) -> None:
        """Let all generators of random numbers go on as they were."""
        set_all_generators(self.decoded(self.values[GENERATORS]))

    def padded(self) -> list[torch.Tensor]:
        """As bytes, of which most parts have the same number."""
        return self.pieces(pad_bytes=_PAD_BYTES)
