"""An operation of the script: run where its operands are, and followed by their forms elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from graphsplit.distribute.following.casts import casting_dtype, follow_casts
from graphsplit.distribute.following.forms import Following, form_of
from graphsplit.distribute.following.one_step import OneStep, Together, found_out
from graphsplit.distribute.following.operands import written
from graphsplit.errors import ConfigurationError
from graphsplit.torch_ext.private import (
    DisableTorchFunctionSubclass,
    num_dispatch_modes,
    num_function_modes,
)

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})
_MOST = 4096  # operations remembered; then all are followed anew
# Operations that draw nothing, by their keys; with what stands for them elsewhere, if it can.
_remembered: dict[Any, OneStep | None] = {}


def key_of(call: tuple[Any, ...], operands: Sequence[Any]) -> Any:
    """All that the form of an operation's result hangs on; None where that is more than forms.

    Args:
        call: The operation, whether it is run here, and how its operands are given.
        operands: Its operands, values of the loop as the tensors that they hold.
    """
    if not _is_torchs(call[0]) or torch.is_inference_mode_enabled():
        return None
    if num_dispatch_modes() or num_function_modes():
        return None
    has_history = torch.is_grad_enabled()
    looks: list[Any] = [*call, has_history, torch.get_default_dtype()]
    for operand in operands:
        kind = type(operand)
        if kind in _TENSORS:
            if operand.layout is not torch.strided or operand.is_complex():
                return None
            looks += form_of(operand)
            looks.append(has_history and operand.requires_grad)
        elif kind in _PLAIN:
            looks += kind, operand
        else:
            return None
    return tuple(looks)


def _is_torchs(func: Any) -> bool:
    """Whether a function is one of torch's own, which keeps nothing between two calls."""
    module = getattr(func, "__module__", None)
    return module is None or f"{module}.".startswith("torch.")


def _is_of_matrices(name: str) -> bool:
    """Whether it draws nothing, and torch may compute more where a mode watches, in other bits.

    Singular values and eigenvalues come with vectors then, as for tensors with a gradient.
    """
    return name.startswith("linalg_") or name in ("norm", "nuclear_norm")


def is_known(key: Any) -> bool:
    """Whether the result of an operation is known without following it."""
    return _remembered.get(key) is not None


def run_or_follow(
    func: Callable[..., Any],
    name: str,
    operands: Sequence[Any],
    together: Together,
    key: Any,
    *,
    is_here: bool,
) -> tuple[Any, bool]:
    """The result of an operation, elsewhere in its form alone; and whether it may have drawn.

    Args:
        func: The operation.
        name: Its name.
        operands: Its operands; elsewhere tensors without memory.
        together: Puts arguments together from operands.
        key: What ``key_of`` gave.
        is_here: Whether this worker runs it.

    Raises:
        ConfigurationError: It cannot be followed.
    """
    known = _remembered.get(key)
    if known is not None:
        return known.result(operands), False
    args, kwargs = together(operands)
    if is_here and key in _remembered:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs), False
    following = Following(has_values=is_here)
    watching = nullcontext() if is_here and _is_of_matrices(name) else following
    try:
        with DisableTorchFunctionSubclass(), watching:
            result = None
            if not is_here and casting_dtype() is not None and not written(name, args, kwargs):
                result = follow_casts(func, operands, together)
            if result is None:
                result = func(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
        if is_here:
            raise
        if not (isinstance(error, NotImplementedError) or "meta tensor" in str(error)):
            _run_on_zeros(func, operands, together)
            raise
        raise ConfigurationError(
            f"{name} cannot be followed on workers that do not have its operands: {error}\n"
            f"  Fix: do it inside the network's forward, or ask for the value first."
        ) from error
    if key is not None and not following.draws:
        if len(_remembered) >= _MOST:
            _remembered.clear()
        _remembered[key] = None if is_here else found_out(func, result, operands, together)
    return result, following.draws


def _run_on_zeros(func: Callable[..., Any], operands: Sequence[Any], together: Together) -> None:
    """Raise what eager raises for such operands: forms fail in other words."""
    zeros = [
        torch.zeros(one.shape, dtype=one.dtype) if getattr(one, "is_meta", False) else one
        for one in operands
    ]
    args, kwargs = together(zeros)
    with DisableTorchFunctionSubclass():
        func(*args, **kwargs)
