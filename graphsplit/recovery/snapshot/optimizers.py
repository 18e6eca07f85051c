"""The settings of an optimizer and the members of its groups, as snapshots keep them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from graphsplit.errors import CheckpointError
from graphsplit.optimizers.optimizer import order_of


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Learning rates and the like, of every group."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def members_of(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """The parameters of every group."""
    return [list(group["params"]) for group in optimizer.param_groups]


def members_named(
    names: Sequence[Sequence[str]],
    named: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> list[list[torch.Tensor]]:
    """The parameters of every group by their names in the network.

    Args:
        names: The names; empty for parameters of what was taken out of the network.
        named: The network's parameters.
        optimizer: Holds those without a name, in the same order.

    Raises:
        CheckpointError: The network, or the optimizer, has other parameters.
    """
    known = {id(tensor) for tensor in named.values()}
    apart = [p for group in members_of(optimizer) for p in group if id(p) not in known]
    missing = sorted({name for group in names for name in group if name and name not in named})
    if missing or sum(group.count("") for group in names) > len(apart):
        what = ", ".join(missing[:3]) or "parameters of parts that were taken out of it"
        raise CheckpointError(
            f"the snapshot has {what}, which the network on this worker has not: a callback or a "
            f"data set has changed its parts inside of train, which a worker that comes back does "
            f"not do again\n"
            f"  Fix: let the script do so between two calls, or start the job with fail_fast."
        )
    left = iter(apart)
    return [[named[name] if name else next(left) for name in group] for group in names]


def put_settings(
    optimizer: torch.optim.Optimizer,
    settings: list[dict[str, Any]],
    members: Sequence[Sequence[torch.Tensor]],
) -> None:
    """Set what ``settings_of`` and ``members_of`` gave, whatever groups were added since."""
    groups = optimizer.param_groups
    del groups[len(settings) :]
    groups += [{} for _ in range(len(settings) - len(groups))]
    for group, saved, parameters in zip(groups, settings, members, strict=True):
        known = group.get("params", ())
        if list(map(id, known)) != list(map(id, parameters)):
            group["params"] = list(parameters)
        for key in [key for key in group if key != "params" and key not in saved]:
            del group[key]
        group.update({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in saved.items()})


def put_entries(
    optimizer: torch.optim.Optimizer, num_steps: int, entries: Iterable[tuple[Any, Any, Any]]
) -> None:
    """Let an optimizer keep nothing but this.

    Args:
        optimizer: The optimizer, its groups as they were.
        num_steps: How many steps it has made.
        entries: Of each parameter that is here: itself, when its entry was made, and the entry.
    """
    order = order_of(optimizer)
    optimizer.state.clear()
    order.made.clear()
    order.num_steps = num_steps
    for parameter, (step, position), entry in entries:
        optimizer.state[parameter] = entry
        order.made[parameter] = step, position
