"""An estimate of what segments keep for backward: their operations are run on fake tensors.

Autograd saves what it needs there, too: operands that several operations share once, masks of
dropout, statistics of norms, and nothing of views and sums. An operation that needs values, as an
opaque call does, counts with its result.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from graphsplit.capture.graph import Node
from graphsplit.partition.plan import PartitionPlan
from graphsplit.partition.segments import Segment
from graphsplit.torch_ext.attributes import storage_of
from graphsplit.torch_ext.fakes import formed_like, on_fakes, value_of
from graphsplit.torch_ext.private import FakeTensor, OpOverload


def saved_bytes(plan: PartitionPlan) -> dict[int, int]:
    """The bytes that each segment saves for its backward, without parameters and buffers."""
    return {segment.index: _Forward(plan).run(segment) for segment in plan.segments}


class _Forward:
    """The forward of one segment on fake tensors.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: PartitionPlan) -> None:
        graph = plan.placed.graph
        self._plan, self._nodes, self._fx_nodes = plan, graph.nodes, graph.fx_nodes
        self._by_name = {node.name: node for node in graph.nodes}
        self._values: dict[fx.Node, Any] = {}
        self._state: set[int] = set()
        self._saved: dict[int, torch.UntypedStorage] = {}

    def run(self, segment: Segment) -> int:
        """The bytes that it saves."""
        again = {
            position: group
            for group in self._plan.recomputed.get(segment.index, ())
            for position in group.positions
        }
        size = 0
        for position in segment.nodes:
            node = self._nodes[position]
            operation, group = self._fx_nodes.get(node.name), again.get(position)
            if operation is None:  # a graph made by hand
                size += node.meta.size_bytes if node.meta is not None else 0
                continue
            if group is None:
                with self._noted():
                    self._compute(node, operation)
                continue
            self._compute(node, operation)
            for read in node.reads:  # only what goes into the group is kept
                entering = self._fx_nodes.get(self._nodes[read].name)
                if read not in group.positions and entering is not None:
                    self._note(self._value(entering))
        return size + sum(memory.nbytes() for memory in self._saved.values())

    def _compute(self, node: Node, operation: fx.Node) -> None:
        """Run an operation; where it cannot be run, its result counts."""
        args, kwargs = fx.map_arg((operation.args, operation.kwargs), self._value)
        is_on = node.region.grad_enabled is not False
        target: Any = operation.target

        def run() -> Any:
            with torch.set_grad_enabled(is_on):
                return target(*args, **kwargs)

        is_known = isinstance(target, OpOverload) or target is operator.getitem
        made = on_fakes(operation, run) if is_known else None
        if made is None:
            self._note(self._value(operation))
        else:
            self._values[operation] = made

    def _value(self, operand: fx.Node) -> Any:
        """The value that stands for an operand: a leaf where it is made elsewhere."""
        if operand not in self._values:
            value = value_of(operand)
            node = self._by_name.get(operand.name)
            if isinstance(value, FakeTensor):
                with value.fake_mode:
                    value = formed_like(value)
                if node is not None and node.requires_grad:
                    value.requires_grad_()
                if node is not None and node.is_state:
                    self._state.add(storage_of(value))
            self._values[operand] = value
        return self._values[operand]

    @contextmanager
    def _noted(self) -> Iterator[None]:
        def note(tensor: torch.Tensor) -> torch.Tensor:
            self._note(tensor)
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield

    def _note(self, value: Any) -> None:
        is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if is_plain and storage_of(value) not in self._state:
            self._saved[storage_of(value)] = value.untyped_storage()
