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

from collections.abc import Mapping
from dataclasses import replace

import torch

from graphsplit.marks.annotations import Annotation
from graphsplit.placement.resolve import PlacementRules
from graphsplit.placement.whole import nearest


def is_replicated(modules: Mapping[str, Annotation]) -> bool:
    """Whether some module is placed on several workers."""
    return any(annotation.replicas for annotation in modules.values())


def lanes_of(modules: Mapping[str, Annotation], parts: range, num_parts: int) -> tuple[range, ...]:
    """The lanes of some microbatches, each as a range of them.

    Args:
        modules: Annotation of every placed module, by module path.
        parts: The microbatches, by their numbers in the batch.
        num_parts: How many the whole batch has.
    """
    counts = sorted({len(a.replicas) for a in modules.values() if a.replicas})
    found: list[range] = []
    before: list[int] | None = None
    for part in parts:
        blocks = [_block_of(part, num_parts, count) for count in counts]
        if blocks == before:
            found[-1] = range(found[-1].start, part + 1)
        else:
            found.append(range(part, part + 1))
        before = blocks
    return tuple(found)


def in_lane(rules: PlacementRules, part: int, num_parts: int) -> PlacementRules:
    """The rules for the microbatches of a lane.

    Args:
        rules: The rules for all.
        part: One of the lane's microbatches.
        num_parts: How many the batch has.
    """
    modules = {
        path: replace(a, rank=a.replicas[_block_of(part, num_parts, len(a.replicas))])
        if a.replicas
        else a
        for path, a in rules.modules.items()
    }
    return replace(rules, modules=modules)


def _block_of(part: int, num_parts: int, num_blocks: int) -> int:
    """The block that a part is in: blocks are contiguous, and the first ones have one more."""
    size, num_larger = divmod(num_parts, num_blocks)
    in_larger = num_larger * (size + 1)
    if part < in_larger:
        return part // (size + 1)
    return num_larger + (part - in_larger) // size


def shared_out(
    modules: Mapping[str, Annotation], tensors: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """The owners of replicated modules' parameters and buffers: whole tensors, balanced by bytes.

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
            owner = min(placed[1].replicas, key=lambda worker: bytes_of.get(worker, 0))
            bytes_of[owner] = bytes_of.get(owner, 0) + tensor.numel() * tensor.element_size()
            owner_of[id(tensor)] = owner
        found[name] = owner_of[id(tensor)]
    return found
