"""Writes through ``.data``, of which autograd's notes are lost in eager mode.

``buffer.data.add_(y)`` gives the tensor that ``.data`` made a gradient function, and not the
buffer, whoever reads it later. Where nobody reads that tensor again, the write is one without
autograd.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Graph, Node

from graphsplit.capture.operations.effects import aliased_operands, written_operands
from graphsplit.capture.operations.regions import region_of, set_region


def forget_unread_gradients(graph: Graph) -> None:
    """Let writes to a detached view run without autograd where nothing reads that view afterwards.

    Args:
        graph: A freshly exported graph with its regions.
    """
    for node in graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            for write in _unread_writes(node):
                set_region(write, replace(region_of(write), grad_enabled=False))


def _unread_writes(detached: Node) -> list[Node]:
    """The operations that write to a detached view something else, if only they look at it then."""
    same, writes = {detached}, []
    node = detached.next
    while node.op != "root":
        written = written_operands(node)
        is_same = not same.isdisjoint((*written, *aliased_operands(node)))
        if written and same.issuperset(written) and not same.issuperset(node.all_input_nodes):
            writes.append(node)
        if is_same and same.issuperset(written):
            same.add(node)
        elif writes and not same.isdisjoint(node.all_input_nodes):
            return []
        node = node.next
    return writes
