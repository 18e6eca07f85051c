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
from graphsplit.optimizers.ownership import Elsewhere, bring_back, moved, num_writes
from graphsplit.tensor_meta import TensorMeta, contiguous_strides
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass
from graphsplit.torch_ext.stand_ins import is_alone

_HERE = -1


@dataclass(frozen=True)
class _Seen:
    """Some tensors, as one worker sees them.

    Attributes:
        names: Their names.
        owners: Where each lives; -1 where it is here, as far as is known.
        num_writes: How often each was written to; -1 where that is not known.
    """

    names: tuple[str, ...]
    owners: tuple[int, ...]
    num_writes: tuple[int, ...]


def settle_moved(tensors: Mapping[str, torch.Tensor], owners: Mapping[str, int], job: Job) -> bool:
    """Fix the owners of tensors that have moved, on all workers. Collective.

    What the script has put in the place of a tensor goes to where that has lived.

    Args:
        tensors: Parameters and buffers of a Model by name; on all workers alike.
        owners: Where those of such names live.
        job: Knows the owners of all.

    Returns:
        Whether there are any.

    Raises:
        OwnershipError: Workers have not written to a tensor alike.
    """
    known = job.owners.known(tensors)
    unused = {name: tensor for name, tensor in tensors.items() if name not in known}
    if not unused or not job.owners.num_fixed or job.script.gives_again:
        return False
    with job.reporting():
        found = _owners(unused, job.control)
        for name, source in found.items():
            if (owner := owners.get(name, source)) != source:
                _send(name, tensors[name], job, source, owner)
        job.owners.fix({n: tensors[n] for n in found}, {n: owners.get(n, found[n]) for n in found})
    return bool(found)


def _send(name: str, tensor: torch.Tensor, job: Job, source: int, owner: int) -> None:
    """Let a value that one worker has computed be on another one."""
    if job.rank == source and not is_alone(tensor):
        raise OwnershipError(
            f"{name!r} has to move to worker {owner}, and shares its memory with another tensor\n"
            f"  Fix: make it of a copy: torch.nn.Parameter(value.clone())."
        )
    shape = tuple(tensor.shape)
    meta = TensorMeta(tensor.dtype, shape, contiguous_strides(shape))
    with torch.no_grad(), DisableTorchFunctionSubclass():
        value = job.control.broadcast(tensor.detach(), meta, source=source)
        if job.rank == owner and isinstance(tensor, Elsewhere):
            bring_back(tensor)
            tensor.copy_(value)


def _owners(tensors: Mapping[str, torch.Tensor], group: WorkerGroup) -> dict[str, int]:
    """The owners of those that have moved, as all workers see them."""
    mine = records.to_text(_seen(tensors))
    told = [read_record(_Seen, text, what="what has moved") for text in group.exchange(mine)]
    by_name = [
        dict(zip(s.names, zip(s.owners, s.num_writes, strict=True), strict=True)) for s in told
    ]
    owners = {}
    for name in dict.fromkeys(name for one in by_name for name in one):
        seen = [one.get(name, (_HERE, _HERE)) for one in by_name]
        found = sorted({owner for owner, _ in seen} - {_HERE})
        if found:
            _check(name, seen, found)
            owners[name] = found[0]
    return owners


def _seen(tensors: Mapping[str, torch.Tensor]) -> _Seen:
    hows = [moved(tensor) for tensor in tensors.values()]
    counts = [
        num_writes(tensor) if how is None else _HERE if how.num_writes is None else how.num_writes
        for how, tensor in zip(hows, tensors.values(), strict=True)
    ]
    return _Seen(
        tuple(tensors), tuple(_HERE if how is None else how.owner for how in hows), tuple(counts)
    )


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
