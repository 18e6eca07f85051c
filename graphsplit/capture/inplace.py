"""Turn in-place operations into ordinary ones where that changes no bit.

``y = relu_(x)`` becomes ``y = relu(x)`` and every later use of ``x`` becomes a use of ``y``, so
that a cut may fall between them. Left as they are: operations on parameters, buffers and inputs
(their change must last), on memory that other values still share, and those whose ordinary form
would give another dtype or other strides.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from graphsplit.capture.effects import alias_roots, written_operands


def make_in_place_explicit(graph: Graph) -> None:
    """Rewrite a freshly exported graph."""
    candidates = [n for n in graph.nodes if _ordinary_form(n) is not None]
    if not candidates:
        return
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in candidates:
        roots = alias_roots(graph)
        base = node.args[0]
        assert isinstance(base, Node)
        if any(root.op == "placeholder" for root in roots[base]):
            continue
        if _shared_later(node, base, roots, position) or not _same_layout(node, base):
            continue
        ordinary = _ordinary_form(node)
        assert ordinary is not None
        later = [user for user in base.users if position[user] > position[node]]
        for user in later:
            user.replace_input_with(base, node)
        node.target = ordinary
    graph.lint()


def _ordinary_form(node: Node) -> torch._ops.OpOverload | None:
    """The out-of-place overload of an in-place operation that writes to its first operand only."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    packet_name = target._schema.name.split("::")[1]
    if not packet_name.endswith("_") or written_operands(node) != (node.args[0],):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), packet_name[:-1], None)
    overload = getattr(packet, target._overloadname, None) if packet is not None else None
    if not isinstance(overload, torch._ops.OpOverload) or overload._schema.is_mutable:
        return None
    # The first operand may be `self` in one overload and `input` in the other.
    names = [argument.name for argument in target._schema.arguments[1:]]
    same = names == [argument.name for argument in overload._schema.arguments[1:]]
    return overload if same else None


def _shared_later(
    node: Node, base: Node, roots: dict[Node, frozenset[Node]], position: dict[Node, int]
) -> bool:
    """Whether memory of ``base`` is read later through another value than ``base`` itself."""
    for other, its_roots in roots.items():
        if other in (node, base) or position[other] > position[node]:
            continue
        if its_roots & roots[base] and any(position[user] > position[node] for user in other.users):
            return True
    return False


def _same_layout(node: Node, base: Node) -> bool:
    meta = base.meta.get("val")
    if not isinstance(meta, torch.Tensor) or not _is_dense(meta):
        return False
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if not isinstance(value, torch.Tensor) or operand is base:
            continue
        if value.dtype != meta.dtype and value.dtype != torch.bool:
            return False
        if value.shape == meta.shape and value.stride() != meta.stride():
            return False
    return True


def _is_dense(tensor: torch.Tensor) -> bool:
    strides = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return False
        expected *= size
    return True
