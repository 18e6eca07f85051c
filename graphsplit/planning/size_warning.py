"""Notices batches that come in ever new sizes, each of which takes seconds to plan."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from graphsplit.batches.batch import Signature, leaves
from graphsplit.capture.graph import Mode
from graphsplit.frames import warn_users

_MANY = 5


class SizesSeen:
    """The sizes that plans were made for, of each kind of batch; tells once that they are many.

    Args:
        dynamic: The dimensions that were said to change.
    """

    def __init__(self, dynamic: Container[int]) -> None:
        self._dynamic = dynamic
        self._seen: dict[tuple[Mode, str], list[Signature]] = {}

    def note(self, mode: Mode, signature: Signature) -> None:
        """A plan is made for a signature."""
        seen = self._seen.setdefault((mode, signature.structure()), [])
        if signature in seen or len(seen) >= _MANY:
            return
        seen.append(signature)
        many = _changing_dimensions(seen) if len(seen) == _MANY else {}
        changing = {d: largest for d, largest in many.items() if d not in self._dynamic}
        if changing:
            shown = ", ".join(f"{d}: {2 * largest}" for d, largest in changing.items())
            sizes = ", ".join(f"dimension {d} up to {n}" for d, n in changing.items())
            warn_users(
                f"{_MANY} plans for {mode.value} were made for batches that differ in nothing but "
                f"sizes ({sizes}); each size takes a capture of its own, which takes seconds\n"
                f"  Fix: Model(..., dynamic_dims={{{shown}}}), with the largest sizes that come, "
                f"makes one plan for all; or pad the batches to a few sizes."
            )


def _changing_dimensions(seen: Sequence[Signature]) -> dict[int, int]:
    """The dimensions of tensors that were not equal, each with the largest size it had."""
    shapes = [
        [leaf.shape for leaf in leaves(signature.example("meta")) if torch.is_tensor(leaf)]
        for signature in seen
    ]
    found: dict[int, int] = {}
    for same in zip(*shapes, strict=True):
        for dimension, sizes in enumerate(zip(*same, strict=True)):
            if len(set(sizes)) > 1:
                found[dimension] = max(*sizes, found.get(dimension, 0))
    return dict(sorted(found.items()))
