"""Answers of operations that were run on fake tensors: those that look alike are run once.

The layers of a tall network do; and the next capture asks much the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.fx import Node

from graphsplit.torch_ext.private import SWITCHES, OpOverload, kernels_of_python

Answer = TypeVar("Answer")

# The answers of ATen's operations in this process: by PyTorch's switches and kernels, of which
# those of the last capture are kept, and by what was asked.
_known: dict[Any, dict[Any, dict[Any, Any]]] = {}
_MOST_KNOWN = 16384


class KnownAnswers(Generic[Answer]):
    """The answers to one question, asked of the operations of one capture.

    Args:
        question: What is asked, and what its answers depend on besides the operations, and
            PyTorch's switches and kernels.
    """

    def __init__(self, *question: object) -> None:
        self._here: dict[Any, Answer] = {}
        around = repr([read() for read in SWITCHES]), frozenset(kernels_of_python)
        if around not in _known:
            _known.clear()
        self._anywhere = _known.setdefault(around, {}).setdefault(question, {})

    def of(self, node: Node, run: Callable[[Node], Answer], *more: object) -> Answer:
        """The answer of an operation.

        Args:
            node: The operation, of a freshly exported graph.
            run: Asks it.
            more: What the answer depends on besides the operation and the looks of its operands.
        """
        key = (*_look(node), more)
        known = self._anywhere if _is_like_any_other(node) else self._here
        if key not in known:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[key] = run(node)
        return known[key]


def _look(node: Node) -> tuple[Any, ...]:
    index = {operand: f"%{i}" for i, operand in enumerate(node.all_input_nodes)}
    arguments = torch.fx.map_arg((node.args, node.kwargs), index.__getitem__)
    values = (operand.meta.get("val") for operand in index)
    looks = (
        (v.dtype, v.device, str(v.shape), str(v.stride()))
        if isinstance(v, torch.Tensor)
        else repr(v)
        for v in values
    )
    return node.target, repr(arguments), *looks


def _is_like_any_other(node: Node) -> bool:
    """Whether the answer holds in other captures: nothing in it has a meaning in this one alone."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    values = [operand.meta.get("val") for operand in node.all_input_nodes]
    return all(
        isinstance(v, torch.Tensor) and all(type(n) is int for n in (*v.shape, *v.stride()))
        for v in values
    ) and not any(operand.op == "get_attr" for operand in node.all_input_nodes)
