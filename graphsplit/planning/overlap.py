"""Different tensors over one memory, of which one changes: they must live together.

Trained parameters are changed by the optimizer, between steps. What forward modifies changes inside
a step, so there all that reads such a tensor must run where it lives, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping

import torch

from graphsplit.capture.graph import NodeKind
from graphsplit.errors import PlacementError
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.placement.resolve import PlacedGraph
from graphsplit.tensor_meta import share_elements
from graphsplit.torch_ext.attributes import storage_of
from graphsplit.torch_ext.stand_ins import plain_torch


def overlapping(state: Mapping[str, torch.Tensor]) -> tuple[tuple[str, str], ...]:
    """Pairs of different tensors that share at least one number, by name.

    Args:
        state: Parameters and buffers by name; those whose values are not here are left out.
    """
    by_memory: dict[int, dict[int, str]] = {}
    tensors: dict[str, torch.Tensor] = {}
    with plain_torch():  # a deferred tensor has a storage, in which no memory is yet
        for name, tensor in state.items():
            if is_elsewhere(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
                continue
            if tensor.numel() > 0:
                tensors[name] = tensor
                by_memory.setdefault(storage_of(tensor), {}).setdefault(id(tensor), name)
        return tuple(
            (first, second)
            for names in by_memory.values()
            for first, second in itertools.combinations(names.values(), 2)
            if share_elements(tensors[first], tensors[second])
        )


def check_overlapping(
    pairs: Iterable[tuple[str, str]], owners: Mapping[str, int], changing: Collection[str]
) -> None:
    """Refuse tensors over one memory that live on different workers, if one of them changes.

    Raises:
        PlacementError: A change of one would not be seen in the other, as it is in one process.
    """
    for first, second in pairs:
        if first not in changing and second not in changing:
            continue
        if first in owners and second in owners and owners[first] != owners[second]:
            raise _refusal(first, second, {owners[first], owners[second]}, "live on")


def modified_state(placed: PlacedGraph) -> set[str]:
    """The names of the parameters and buffers that a graph modifies."""
    graph = placed.graph
    folded = (graph.positions[name] for fold in graph.buffer_updates for name in fold.buffers)
    return {graph.nodes[p].target for p in (*graph.modified, *folded) if graph.nodes[p].is_state}


def check_used(
    placed: PlacedGraph, state: Mapping[str, torch.Tensor], pairs: Iterable[tuple[str, str]]
) -> None:
    """Refuse tensors over one memory that a graph modifies, and that several workers use.

    Args:
        placed: The graph.
        state: Parameters and buffers by name.
        pairs: Those of them that share memory.

    Raises:
        PlacementError: A worker would use what was there before.
    """
    modified = modified_state(placed)
    trained = {name for name, tensor in state.items() if tensor.requires_grad}
    constants = {
        node.target: placed.graph.constants[node.name]
        for node in placed.graph.nodes
        if node.kind is NodeKind.CONSTANT
    }
    with_constants = overlapping({**state, **constants}) if constants else ()
    for first, second in with_constants:
        is_copied = first in constants or second in constants  # every worker has a constant
        if is_copied and {first, second} & (modified | trained) and placed.num_workers > 1:
            raise _refusal(first, second, range(placed.num_workers), "are used on")
    users = _users(placed)
    for first, second in pairs:
        workers = users.get(first, set()) | users.get(second, set())
        if {first, second} & modified and len(workers) > 1 and {first, second} <= users.keys():
            raise _refusal(first, second, workers, "are used on")


def _users(placed: PlacedGraph) -> dict[str, set[int]]:
    """Where parameters and buffers live, and where they are read."""
    nodes = placed.graph.nodes
    found: dict[str, set[int]] = {}
    for position, node in enumerate(nodes):
        if node.is_state:
            found.setdefault(node.target, set()).add(placed.workers[position])
        for operand in node.reads:
            if nodes[operand].is_state:
                found.setdefault(nodes[operand].target, set()).add(placed.workers[position])
    return found


def _refusal(first: str, second: str, workers: Collection[int], how: str) -> PlacementError:
    return PlacementError(
        f"{first} and {second} are different tensors over the same memory, and {how} workers "
        f"{' and '.join(map(str, sorted(workers)))}: a change of one would not reach the other\n"
        f"  Fix: place both on one worker, or make them one tensor, as in "
        f"second.weight = first.weight, and take views of it in forward."
    )
