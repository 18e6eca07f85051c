"""Take out operations that hand back the very tensor they were given.

``x.contiguous()``, ``x.to(dtype)``, ``broadcast_tensors(x, y)`` and some others return ``x`` itself
when there is nothing to do. In eager mode there is then one tensor whose gradients are summed in
one order; two values of which one is made from the other would be summed in two.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from graphsplit.capture.operations.known_answers import KnownAnswers
from graphsplit.torch_ext.attributes import operator_schema
from graphsplit.torch_ext.fakes import formed_like, on_fakes, value_of
from graphsplit.torch_ext.private import FakeTensor, OpOverload, has_kernel

_IN_PARTS = "CompositeImplicitAutograd"
# Which operand a result is, or each of several results.
_Found = int | list[int | None] | None


def remove_identities(graph: Graph) -> None:
    """Let the users of a freshly exported graph's identities use the operands."""
    casts = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    known = KnownAnswers[_Found]("identities", *casts)  # run where autocast may be on
    for node in list(graph.nodes):
        if not _may_be_identity(node):
            continue
        found, operands = known.of(node, _run), node.all_input_nodes
        had_users = bool(node.users)
        if isinstance(found, list):
            for user in list(node.users):
                if user.target is operator.getitem:
                    _replace(user, found[user.args[1]], operands)
        else:
            _replace(node, found, operands)
        if had_users and not node.users:
            graph.erase_node(node)


def _replace(node: Node, found: int | None, operands: list[Node]) -> None:
    if found is not None:
        node.replace_all_uses_with(operands[found])
        if node.target is operator.getitem:
            node.graph.erase_node(node)


def _may_be_identity(node: Node) -> bool:
    """Only operations made of others can return an operand; it then looks like that operand.

    Strides are not compared: export runs some operations in another way than they really run
    (``dropout`` in eval mode is a copy there), and notes other strides.
    """
    target = node.target
    if not isinstance(target, OpOverload) or operator_schema(target).is_mutable:
        return False
    if not has_kernel(target.name(), _IN_PARTS):
        return False
    looks = {_look(n) for n in node.all_input_nodes}
    results = [node, *(u for u in node.users if u.target is operator.getitem)]
    return bool(looks & {_look(n) for n in results} - {None})


def _look(node: Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor):
        return None
    return value.dtype, str(value.shape)  # dynamic sizes are alike where their expressions are


def _run(node: Node) -> _Found:
    """Run an operation on fake tensors; returns which operand the result, or each of it, is."""
    given: dict[Node, Any] = {}

    def run() -> Any:
        with torch.no_grad():
            for operand in node.all_input_nodes:
                value = given[operand] = value_of(operand)
                if isinstance(value, torch.Tensor):
                    given[operand] = formed_like(value)
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), given.__getitem__)
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def operand_of(result: Any) -> int | None:
        same = (i for i, operand in enumerate(given.values()) if operand is result)
        return next(same, None) if isinstance(result, torch.Tensor) else None

    result = on_fakes(node, run)  # what needs values is no identity
    if isinstance(result, (list, tuple)):
        return [operand_of(one) for one in result]
    return operand_of(result)
