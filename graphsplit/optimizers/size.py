"""How much an optimizer keeps for what it trains: an estimate, before it has kept anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_Settings = Mapping[str, Any]


def _adam(group: _Settings) -> int:
    return 3 if group.get("amsgrad") else 2


def _momentum(group: _Settings) -> int:
    return 1 if group.get("momentum") else 0


def _rmsprop(group: _Settings) -> int:
    return 1 + _momentum(group) + bool(group.get("centered"))


_KEPT: dict[type[torch.optim.Optimizer], Callable[[_Settings], int]] = {
    torch.optim.SGD: _momentum,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.NAdam: _adam,
    torch.optim.RAdam: _adam,
    torch.optim.Adamax: _adam,
    torch.optim.SparseAdam: _adam,
    torch.optim.Adagrad: lambda group: 1,
    torch.optim.ASGD: lambda group: 1,
    torch.optim.Muon: lambda group: 1,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adadelta: lambda group: 2,
    torch.optim.Rprop: lambda group: 2,
    torch.optim.Adafactor: lambda group: 0,  # a row and a column of each matrix
}


def copies_kept(optimizer: torch.optim.Optimizer | None) -> float | None:
    """How many numbers an optimizer keeps for each number that it trains, in its largest group.

    Returns:
        None without an optimizer, and for one that ``torch.optim`` does not have.
    """
    kept = None if optimizer is None else _KEPT.get(type(optimizer))
    if optimizer is None or kept is None:
        return None
    return float(max(kept(group) for group in optimizer.param_groups))
