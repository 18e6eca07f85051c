"""Parameters and buffers where they live: what others own is freed, or has memory again."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphsplit.deferred.construction import is_deferred, materialize
from graphsplit.errors import InvariantError
from graphsplit.optimizers.ownership import Elsewhere, Residence, bring_back, free, is_elsewhere
from graphsplit.partition.plan import PartitionPlan
from graphsplit.planning.task import Task, state_names, stateful_modules


def check_homes(plan: PartitionPlan, owners: Mapping[str, int]) -> None:
    """A plan uses everything where it lives."""
    for position in plan.placed.graph.state_names:
        name = plan.placed.graph.nodes[position].target
        if owners[name] != plan.placed.workers[position]:
            raise InvariantError(f"{name} would move to another worker")


def state_here(
    plan: PartitionPlan, tensors: Mapping[str, torch.Tensor], rank: int
) -> dict[int, torch.Tensor]:
    """The tensors of a plan that a worker owns, by the positions of nodes."""
    return {p: tensors[plan.placed.graph.nodes[p].target] for p in plan.owned_state(rank)}


def free_others(task: Task, residence: Residence) -> None:
    """Give what is owned here its memory, and free what others own."""
    tensors, owners, rank = residence.tensors, residence.owners, residence.rank
    strides = {name: tensor.stride() for name, tensor in tensors.items()}
    owned = [name for name, owner in owners.items() if owner == rank]
    for module in stateful_modules(task):
        if is_deferred(module):
            materialize(module, state_names(task, module, owned))
    for name, tensor in tensors.items():
        if owners[name] != rank and not is_elsewhere(tensor):
            free(tensor, name=name, owner=owners[name], strides=strides[name])


def own_all(tensors: Mapping[str, torch.Tensor]) -> None:
    """Give all of them memory here; values are to be put in."""
    for tensor in tensors.values():
        if isinstance(tensor, Elsewhere):
            bring_back(tensor)
