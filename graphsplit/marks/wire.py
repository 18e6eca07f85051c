"""``gs.wire``: a value and its gradient rounded to a smaller dtype, wherever the network runs.

The rounding is an operation of the graph, in one process as well, so no bit depends on where the
cut falls. What it returns has no more bits than the smaller dtype holds. So an edge that carries
it may carry that dtype: ``partition.edges``.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from graphsplit.errors import ConfigurationError
from graphsplit.text import called, described
from graphsplit.torch_ext.attributes import FORWARD_HOOKS
from graphsplit.torch_ext.private import pytree

T = TypeVar("T", torch.Tensor, nn.Module)

WIRE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a dtype is a floating-point one of more bytes than another one."""
    return dtype.is_floating_point and dtype.itemsize > other.itemsize


@torch.library.custom_op("graphsplit::wire", mutates_args=())
def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One operation: torch's compiler would leave out the first of two casts."""
    return x.to(dtype).to(x.dtype)


def _keep_dtype(ctx: Any, inputs: tuple[torch.Tensor, torch.dtype], output: torch.Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.dtype = inputs[1]


def _round_gradient(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
    return None if gradient is None else _rounded(gradient, ctx.dtype), None


_rounded.register_fake(lambda x, dtype: x.to(dtype).to(x.dtype))
_rounded.register_autograd(_round_gradient, setup_context=_keep_dtype)
ROUND = torch.ops.graphsplit.wire.default


@called("gs.wire")
def wire(value: T, dtype: torch.dtype) -> T:
    """Round a value to a smaller dtype and back, and its gradient on the way home.

    In ``forward``: ``h = gs.wire(self.encoder(x), torch.bfloat16)``. Bit for bit what
    ``x.to(dtype).to(x.dtype)`` is in eager mode, with a cluster and without one: backward rounds
    the sum of the gradients of all uses. It runs where ``value`` is made; a worker that gets it is
    sent ``dtype``, and sends ``dtype`` back if no other worker has a part in that sum.

    Args:
        value: A tensor, or a module, to round each floating-point tensor of what its ``forward``
            returns. Wiring a module again replaces its dtype.
        dtype: ``torch.bfloat16``, ``torch.float16``, or ``torch.float32`` for values of
            float64. What is too large for it becomes infinite, as by ``Tensor.to``. A
            value that has this dtype already, as under autocast, is left as it is.

    Returns:
        A new tensor of the value's own shape and dtype; or the module itself.

    Raises:
        ConfigurationError: Another dtype, one that is no smaller than the value's, or a value that
            holds no floating-point numbers.
    """
    if dtype not in WIRE_DTYPES:
        names = ", ".join(map(str, WIRE_DTYPES))
        raise ConfigurationError(
            f"gs.wire: {dtype!r} is none of the dtypes that it rounds to\n"
            f"  Fix: pass one of {names}."
        )
    if isinstance(value, nn.Module):
        _wire_outputs(value, dtype)
        return value
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(
            f"gs.wire: expected a tensor or a module; got {described(value)}\n"
            f"  Fix: wire each tensor of it, or the module that returns it."
        )
    if value.dtype == dtype:
        return value
    if not is_wider(value.dtype, dtype):
        problem = f"{dtype} is not smaller than {value.dtype}"
        if not value.dtype.is_floating_point:
            problem = f"the value holds {value.dtype}, no floating-point numbers"
        raise ConfigurationError(
            f"gs.wire: {problem}\n"
            f"  Fix: wire floating-point values, to a dtype of fewer bytes than theirs."
        )
    made: torch.Tensor = _rounded(value, dtype)
    return made


class _WireOutputs:
    """A forward hook that wires what the module returns."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        leaves, form = pytree.tree_flatten(output)
        is_number = [isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves]
        if not any(is_number):
            raise ConfigurationError(
                f"gs.wire: what {type(module).__name__} returns holds no floating-point "
                f"tensor\n  Fix: wire single values in forward."
            )
        pairs = zip(leaves, is_number, strict=True)
        wired = [wire(leaf, self.dtype) if found else leaf for leaf, found in pairs]
        return pytree.tree_unflatten(wired, form)


def _wire_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    hooks = getattr(module, FORWARD_HOOKS[0])
    for key, hook in hooks.items():
        if isinstance(hook, _WireOutputs):
            hooks[key] = _WireOutputs(dtype)
            return
    module.register_forward_hook(_WireOutputs(dtype))
