"""Give a size to results whose size depends on values, while there are no values.

``x.nonzero()`` has as many rows as we say, and ``x[mask]`` takes as many. What is made of them must
in the end have a shape that does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten: Any = torch.ops.aten
_BY_MASK = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_MASKS = (torch.bool, torch.uint8)


def sized(func: Any, count: int) -> Callable[..., Any] | None:
    """The function to run instead of one whose result has no known size; None: itself.

    Args:
        func: The operation.
        count: How many elements or rows it is to find.
    """
    if func is _aten.nonzero.default:
        return lambda x: x.new_empty((count, x.dim()), dtype=torch.int64)
    if func is _aten.masked_select.default:
        return lambda x, mask: x.new_empty((count,))
    if func is _aten._unique2.default:
        return lambda x, *flags, **kwargs: _unique(x, max(count, 1))
    if func in _BY_MASK:
        return lambda x, indices, *args, **kwargs: func(
            x, _without_masks(indices, count), *args, **kwargs
        )
    return None


def _unique(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    whole = torch.int64
    counts = x.new_empty((count,), dtype=whole)
    return x.new_empty((count,)), x.new_empty(x.shape, dtype=whole), counts


def _without_masks(indices: Any, count: int) -> list[torch.Tensor | None]:
    """Positions in place of masks: one tensor for each dimension that a mask covers."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            found.append(index)
            continue
        found += [index.new_empty((count,), dtype=torch.int64) for _ in range(index.dim())]
    return found
