"""Operations under autocast, on workers that do not have their values.

Autocast belongs to a device, and tensors without memory have one of their own, on which it does
nothing. So under autocast an operation is followed on fake tensors, which are on the CPU as far as
torch can tell; two steps of the script's autograd graph lead there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from graphsplit.distribute.workers.loop import META, shape_of
from graphsplit.errors import ConfigurationError
from graphsplit.torch_ext.attributes import base_of
from graphsplit.torch_ext.private import FakeTensor, FakeTensorMode, pytree

CPU = torch.device("cpu")


class _ToFake(Function):
    """From a shape to a fake tensor on the CPU; the gradient is a shape again."""

    @staticmethod
    def forward(ctx: Any, mode: FakeTensorMode, shape: torch.Tensor) -> torch.Tensor:
        """The fake tensor."""
        ctx.mode = mode
        return FakeTensor(mode, shape.detach(), CPU)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Its shape."""
        return None, shape_of(gradient)


class _ToShape(Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, mode: FakeTensorMode, fake: torch.Tensor) -> torch.Tensor:
        """Its shape."""
        ctx.mode = mode
        return shape_of(fake)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """A fake gradient."""
        return None, FakeTensor(ctx.mode, gradient.detach(), CPU)


_to_fake: Callable[[FakeTensorMode, torch.Tensor], torch.Tensor] = _ToFake.apply
_to_shape: Callable[[FakeTensorMode, torch.Tensor], torch.Tensor] = _ToShape.apply


def casting_dtype() -> torch.dtype | None:
    """The lower dtype of ``torch.autocast`` around the script's line; None: there is none.

    Raises:
        ConfigurationError: It is on for another device than the CPU.
    """
    if torch.is_autocast_enabled("cuda"):
        raise ConfigurationError(
            "torch.autocast('cuda') is on around a call of a distributed network\n  Fix: "
            "torch.autocast('cpu', torch.bfloat16) for values on the CPU; for values on a GPU, "
            "open the block inside forward."
        )
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def refuse_casts_beside_gpus(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse autocast of the CPU around a call of a network with tensors on GPUs.

    Raises:
        ConfigurationError: A tensor is on one.
    """
    where = next((one.device for one in tensors if not one.is_cpu and not one.is_meta), None)
    if where is not None:
        raise ConfigurationError(
            f"torch.autocast('cpu') is on around a call of a distributed network with tensors on "
            f"{where}, where it casts nothing\n  Fix: open the block inside forward, around what "
            f"runs on the CPU."
        )


def follow_casts(
    func: Callable[..., Any], leaves: Sequence[Any], together: Callable[[Sequence[Any]], Any]
) -> Any:
    """Shapes that an operation under autocast makes of shapes; None where nothing can be cast.

    Args:
        func: The operation.
        leaves: Its operands, tensors as shapes.
        together: Puts arguments together from operands.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # as torch makes some numbers in backward

    def fake(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _to_fake(mode, leaf) if leaf.requires_grad else FakeTensor(mode, leaf, CPU)
        return CPU if isinstance(leaf, torch.device) and leaf == META else leaf

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in given:  # an operand itself, as of ``to`` the dtype that it has
            return given[id(leaf)]
        return _to_shape(mode, leaf) if leaf.requires_grad else shape_of(leaf)

    fakes = [fake(leaf) for leaf in leaves]
    given = {id(one): leaf for one, leaf in zip(fakes, leaves, strict=True)}
    args, kwargs = together(fakes)
    result = func(*args, **kwargs)
    made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if any(base_of(one) is not one and id(one) not in given for one in made):
        return None  # a view is cast by nobody, and shares memory with its base
    return pytree.tree_map(shape, result)


def refuse_cached_cast(what: str) -> None:
    """Refuse a leaf with a gradient under autocast, which keeps the casts of leaves in a block.

    Raises:
        ConfigurationError: Autocast is on.
    """
    if torch.is_autocast_enabled("cpu"):
        raise ConfigurationError(
            f"{what} is used by the script under torch.autocast, which casts it once for the whole "
            f"block: its gradients would be added up in another order\n"
            f"  Fix: use it inside the network's forward, or outside of the block."
        )
