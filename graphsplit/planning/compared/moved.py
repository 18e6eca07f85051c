"""Tensors that have moved to one worker, since the script has written to them what lives there.

The worker itself sees ordinary writes, so the others tell it before a plan is made::

    for p, q in zip(average.parameters(), net.parameters()): p.lerp_(q, 0.1)
    gs.Model(average).predict(x)        p lives where q does
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from graphsplit.encoding import records
from graphsplit.errors import OwnershipError
from graphsplit.job.group import WorkerGroup, read_record
from graphsplit.job.job import Job
from graphsplit.optimizers.ownership import moved, num_writes

_HERE = -1


@dataclass(frozen=True)
class _Seen:
    """Some tensors, as one worker sees them.

    Attributes:
        owners: Where each lives; -1 where it is here, as far as is known.
        num_writes: How often each was written to; -1 where that is not known.
    """

    owners: tuple[int, ...]
    num_writes: tuple[int, ...]


def settle_moved(tensors: Mapping[str, torch.Tensor], owners: Mapping[str, int], job: Job) -> None:
    """Fix the owners of tensors that have moved, on all workers. Collective.

    Args:
        tensors: Parameters and buffers of a Model by name; on all workers alike.
        owners: The owners of those that have one.
        job: Knows the owners of all.

    Raises:
        OwnershipError: Workers have not written to a tensor alike.
    """
    unused = {name: tensor for name, tensor in tensors.items() if name not in owners}
    if unused and job.owners.num_fixed and not job.script.gives_again:
        with job.reporting():
            found = _owners(unused, job.control)
            job.owners.fix({name: unused[name] for name in found}, found)


def _owners(tensors: Mapping[str, torch.Tensor], group: WorkerGroup) -> dict[str, int]:
    """The owners of those that have moved, as all workers see them."""
    mine = records.to_text(_seen(list(tensors.values())))
    told = [read_record(_Seen, text, what="what has moved") for text in group.exchange(mine)]
    owners = {}
    for name, *seen in zip(
        tensors, *(zip(s.owners, s.num_writes, strict=True) for s in told), strict=True
    ):
        found = sorted({owner for owner, _ in seen} - {_HERE})
        if found:
            _check(name, seen, found)
            owners[name] = found[0]
    return owners


def _seen(tensors: Sequence[torch.Tensor]) -> _Seen:
    hows = [moved(tensor) for tensor in tensors]
    counts = [
        num_writes(tensor) if how is None else _HERE if how.num_writes is None else how.num_writes
        for how, tensor in zip(hows, tensors, strict=True)
    ]
    return _Seen(tuple(_HERE if how is None else how.owner for how in hows), tuple(counts))


def _check(name: str, seen: Sequence[tuple[int, int]], owners: Sequence[int]) -> None:
    """Refuse a tensor to which workers have not written alike."""
    fix = "\n  Fix: let all workers write to it, from tensors that live on one of them."
    if len(owners) > 1:
        raise OwnershipError(
            f"what lives on workers {' and '.join(map(str, owners))} was written to {name!r}{fix}"
        )
    counted = [count for _, count in seen]
    known = sorted(set(counted) - {_HERE})
    apart = [rank for rank, (owner, _) in enumerate(seen) if owner == _HERE and rank != owners[0]]
    if apart:
        raise OwnershipError(
            f"{name!r} was written to with what lives on worker {owners[0]}, and not on worker "
            f"{apart[0]}{fix}"
        )
    if len(known) > 1 and _HERE not in counted:
        times = ", ".join(f"{count} on worker {rank}" for rank, count in enumerate(counted))
        raise OwnershipError(f"{name!r} was not written to equally often: {times}{fix}")
