"""Run something once more on fake tensors, to see what it does: they have everything but values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.utils import _pytree as pytree

Result = TypeVar("Result")


def value_of(node: Node) -> Any:
    """The fake tensor, or what else, that stands for a node's value."""
    return node.meta.get("val")


def on_fakes(node: Node, run: Callable[[], Result]) -> Result | None:
    """Run something on the operands of a node.

    Only a ``RuntimeError`` means that values are needed: all that fake tensors raise for that are
    kinds of it; the check of a tensor's sizes raises an ``AssertionError``, as it compares a list.
    What is learned here decides bits; so any other error, as where a release of PyTorch has moved a
    name, is not taken for an answer.

    Args:
        node: The node.
        run: What to run in its operands' fake mode.

    Returns:
        What it gives; None where it needs values, or no operand is a fake tensor.
    """
    values = pytree.tree_leaves([value_of(operand) for operand in node.all_input_nodes])
    fake = next((value for value in values if isinstance(value, FakeTensor)), None)
    if fake is None:
        return None
    try:
        with fake.fake_mode:
            return run()
    except (RuntimeError, AssertionError):
        return None
