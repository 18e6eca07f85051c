"""Outputs that look at the memory of an input, or of one another: writes to one show there, too.

Outputs travel by value. So it is noted when a step is captured which part of which memory each of
them looks at, and each worker puts them together again like that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node as FxNode

from graphsplit.tensor_meta import name_of_size
from graphsplit.torch_ext.attributes import storage_of
from graphsplit.torch_ext.private import FakeTensor


@dataclass(frozen=True)
class MemoryPart:
    """The memory of an output that looks at an input, or at what another output looks at.

    Attributes:
        memory: A number that all parts of this memory have in common.
        begin: How many bytes lie between the beginning of the memory, or of the input, and its own.
        input: The place of the input; None where the step has made the memory.
        number: The name of the number that ``begin`` is, where it follows from sizes that change.
    """

    memory: int
    begin: int
    input: int | None
    number: str = ""


def parts_of(
    leaves: Sequence[Any], inputs: Mapping[FxNode, int], sizes: dict[str, Any]
) -> list[MemoryPart | None]:
    """The part of each output; None for one whose memory is its own, or which is the input itself.

    Args:
        leaves: The outputs.
        inputs: The nodes of inputs, each with its place.
        sizes: Gets the expressions of beginnings that follow from sizes, by name.
    """
    dense = {node: place for node, place in inputs.items() if _storage(node) is not None}
    of_inputs = {_storage(node): (_begin(node), place) for node, place in dense.items()}
    nodes = dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, FxNode))
    looking: dict[int | None, list[FxNode]] = {}
    for node in nodes:
        looking.setdefault(_storage(node), []).append(node)
    found: dict[FxNode, MemoryPart] = {}
    for number, (storage, ones) in enumerate(looking.items()):
        begin, place = of_inputs.get(storage, (0, None))
        if storage is None or (place is None and len(ones) == 1):
            continue
        for node in ones:
            if node in inputs:
                continue
            between = _begin(node) - begin
            own = between.node.expr if isinstance(between, torch.SymInt) else between
            if getattr(own, "free_symbols", ()):
                sizes[name_of_size(own)] = own
                found[node] = MemoryPart(number, 0, place, name_of_size(own))
            elif own >= 0:
                found[node] = MemoryPart(number, int(own), place)
    return [found.get(leaf) if isinstance(leaf, FxNode) else None for leaf in leaves]


def _storage(node: FxNode) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return None
    return storage_of(value)


def _begin(node: FxNode) -> Any:
    """The first byte of a tensor in its memory, as a number or a symbol."""
    value = node.meta["val"]
    return value.storage_offset() * value.element_size()
