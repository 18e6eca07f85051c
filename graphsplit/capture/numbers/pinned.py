"""Numbers that the values of tensors decide, but that the code has checked to be known ones.

    chosen = x[mask]                                 # as many rows as the mask has ones
    torch._check(chosen.shape[0] == y.shape[0])      # from here on export knows the number
    torch._check(mask.any().item())                  # the same for a value

Export then computes with the number, and leaves it and its comparisons in the graph. No worker can
compute them from the shapes of a batch. A check of the tensor itself takes their place, so a batch
for which the number is another one is still an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from graphsplit.capture.numbers.lifted import NUMBER
from graphsplit.capture.numbers.sizes import is_number

_aten = torch.ops.aten
_SIZES = (_aten.sym_size.int, _aten.sym_numel.default)
_ITEMS = (_aten.item.default, _aten._local_scalar_dense.default)


def check_pinned_sizes(graph: Graph) -> None:
    """Replace known numbers that come from tensors by checks, and what follows from them."""
    for node in list(graph.nodes):
        if node.target in _SIZES and _is_known(node):
            _check_sizes(node)
            _replace(node, _plain(node.meta["val"]))
        elif node.target in _ITEMS and _is_known(node):
            _check_item(node)
            _replace(node, _plain(node.meta["val"]))
        elif is_number(node) and not node.all_input_nodes and node.target is not NUMBER:
            _replace(node, node.target(*node.args, **node.kwargs))
        elif node.target is _aten._assert_scalar.default and node.args[0] is True:
            graph.erase_node(node)


def _is_known(node: Node) -> bool:
    """Whether a number read from a tensor, and all sizes of that tensor, are plain numbers."""
    tensor: Any = node.args[0]
    if node.meta.get("val") is None:  # asked, and answered otherwise: nothing reads it
        return False
    numbers = (node.meta["val"], *tensor.meta["val"].shape)
    return all(not getattr(n, "node", None) or not n.node.expr.free_symbols for n in numbers)


def _plain(number: Any) -> Any:
    """A known symbolic number as Python's own."""
    if isinstance(number, torch.SymBool):
        return bool(number)
    return float(number) if isinstance(number, (torch.SymFloat, float)) else int(number)


def _check_sizes(node: Node) -> None:
    tensor: Any = node.args[0]
    sizes = [int(size) for size in tensor.meta["val"].shape]
    _insert(node, _aten._assert_tensor_metadata.default, (tensor, sizes))


def _check_item(node: Node) -> None:
    tensor: Any = node.args[0]
    value, fake = _plain(node.meta["val"]), tensor.meta["val"]
    with fake.fake_mode, torch.no_grad():
        outcome = _aten.eq.Scalar(fake, value)
    message = f"the code checks that a value is {value}; for this batch it is not"
    with node.graph.inserting_before(node):
        equal = node.graph.call_function(_aten.eq.Scalar, (tensor, value))
    equal.meta = {**node.meta, "val": outcome}
    _insert(node, _aten._assert_async.msg, (equal, message))


def _insert(node: Node, target: Any, args: tuple[Any, ...]) -> None:
    with node.graph.inserting_before(node):
        check = node.graph.call_function(target, args)
    check.meta = {**node.meta, "val": None}


def _replace(node: Node, value: Any) -> None:
    def replaced(operand: Node) -> Any:
        return value if operand is node else operand

    for user in list(node.users):
        user.args, user.kwargs = map_arg((user.args, user.kwargs), replaced)
    node.graph.erase_node(node)
