"""Replicas: several workers that share the microbatches of what is placed on them.

A module that is placed on ranks 1, 2 and 3 gives each of these workers a contiguous block of the
batch's microbatches. Modules may have different numbers of replicas, so microbatches fall into
*lanes*, runs of microbatches in which every operation has one worker::

    microbatch        0   1   2   3   4   5
    encoder on        1   1   2   2   3   3     placed on [1, 2, 3]
    decoder on        4   4   4   5   5   5     placed on [4, 5]
    head on           0   0   0   0   0   0     placed on 0
    lane              0   0   1   2   3   3

Within a lane a placement is one as ever: ``in_lane`` gives the rules for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from graphsplit.capture.graph import CapturedGraph
from graphsplit.marks.annotations import Annotation
from graphsplit.placement.resolve import PlacementRules, asked_placements
from graphsplit.placement.whole import nearest


def replicated(graph: CapturedGraph, rules: PlacementRules) -> dict[str, Annotation]:
    """All that is placed on several workers, in words."""
    return {what: a for what, a in asked_placements(graph, rules).items() if a.replicas}


def lanes_of(annotations: Iterable[Annotation], parts: range, num_parts: int) -> tuple[range, ...]:
    """The lanes of some microbatches, each as a range of them.

    Args:
        annotations: Placements on several workers.
        parts: The microbatches, by their numbers in the batch, or as ``block_of`` takes them.
        num_parts: How many the whole batch has.
    """
    ways = list({(len(a.replicas), a.rows): a for a in annotations}.values())
    found: list[range] = []
    before: list[int] | None = None
    for part in parts:
        blocks = [annotation.block_of(part, num_parts) for annotation in ways]
        if blocks == before:
            found[-1] = range(found[-1].start, part + 1)
        else:
            found.append(range(part, part + 1))
        before = blocks
    return tuple(found)


def num_together(annotations: Iterable[Annotation]) -> int:
    """How many batches replicas evaluate at once: enough for each of them to have its share."""
    shares = [annotation.rows or (1,) * len(annotation.replicas) for annotation in annotations]
    return max((sum(some) // math.gcd(*some) for some in shares), default=1)


def in_lane(rules: PlacementRules, part: int, num_parts: int) -> PlacementRules:
    """The rules for the microbatches of a lane.

    Args:
        rules: The rules for all.
        part: One of the lane's microbatches, as for ``block_of``.
        num_parts: How many the batch has.
    """
    modules = {path: a.in_lane(part, num_parts) for path, a in rules.modules.items()}
    return replace(rules, modules=modules, lane=(part, num_parts))


def shared_out(
    modules: Mapping[str, Annotation], tensors: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """The owners of replicated modules' parameters and buffers: whole tensors, balanced by bytes.

    Buffers are with the first replica, which updates them by the first microbatches.

    Args:
        modules: Annotation of every placed module, by module path.
        tensors: Parameters and buffers by name; tied ones under each name.
    """
    bytes_of: dict[int, int] = {}  # by worker
    owner_of: dict[int, int] = {}  # by the tensor's id
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        placed = nearest(modules, name.rpartition(".")[0])
        if id(tensor) not in owner_of:
            if placed is None or not placed[1].replicas:
                continue
            owner = placed[1].replicas[0]
            if isinstance(tensor, torch.nn.Parameter):
                owner = min(placed[1].replicas, key=lambda worker: bytes_of.get(worker, 0))
                bytes_of[owner] = bytes_of.get(owner, 0) + tensor.numel() * tensor.element_size()
            owner_of[id(tensor)] = owner
        found[name] = owner_of[id(tensor)]
    return found
