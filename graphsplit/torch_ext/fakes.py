"""Run something once more on fake tensors, to see what it does: they have everything but values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from graphsplit.torch_ext.replaced import replaced

Result = TypeVar("Result")
_NOTES = ("nn_module_stack", "stack_trace", "custom")


def value_of(node: Node) -> Any:
    """The fake tensor, or what else, that stands for a node's value."""
    return node.meta.get("val")


def formed_like(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the same form, strides included; its values are any."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def copy_notes(made: Node, like: Node) -> None:
    """Give a new node the module path, the user's line and the annotations of another one."""
    made.meta.update({key: like.meta[key] for key in _NOTES if key in like.meta})


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
    sizes = fake.fake_mode.shape_env  # what is asked here must not fix a size of the graph
    try:
        with fake.fake_mode, sizes.suppress_guards() if sizes is not None else nullcontext():
            return run()
    except (RuntimeError, AssertionError):
        return None


@contextmanager
def looks_real_to_transformers(knows: Callable[[Any], bool]) -> Iterator[None]:
    """Let transformers look into fake tensors whose values are known, as into real ones.

    Args:
        knows: Whether a fake tensor's values are known.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(module, "is_fake_tensor"):  # one that asks nothing of the kind
        yield
        return
    original = module.is_fake_tensor
    with replaced(module, "is_fake_tensor", lambda value: not knows(value) and original(value)):
        yield
