"""Gradients, and what eager autograd does with those of parameters."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from graphsplit.torch_ext.attributes import ACCUMULATED_HOOKS, GRADIENT_HOOKS, base_of
from graphsplit.torch_ext.private import run_backward
from graphsplit.torch_ext.stand_ins import is_alone

Gradient = torch.Tensor | None


def gradients(
    roots: Sequence[torch.Tensor | GradientEdge],
    root_gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    keep_graph: bool = False,
) -> tuple[Gradient, ...]:
    """Gradients as ``torch.autograd.grad`` gives them; None where nothing flows."""
    if not inputs:
        return ()
    # What it calls once it has checked its arguments.
    found: tuple[Gradient, ...] = run_backward(
        tuple(roots),
        tuple(root_gradients),
        keep_graph,
        False,
        tuple(inputs),
        True,
        accumulate_grad=False,
    )
    return found


def edge_of(parameter: torch.Tensor) -> GradientEdge:
    """Where a graph adds to ``parameter.grad``; also for one that was frozen after its use."""
    is_trained = parameter.requires_grad
    edge = get_gradient_edge(parameter.requires_grad_())
    parameter.requires_grad_(is_trained)
    return edge


def gradient_sum(terms: Sequence[Gradient]) -> Gradient:
    """Add gradients one after the other, as autograd's input buffers do; None adds nothing."""
    total: Gradient = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor, *, is_shared: bool) -> None:
    """Add a gradient to ``parameter.grad`` as autograd's ``AccumulateGrad`` does.

    To one that was frozen since its use nothing is added; hooks run.

    Args:
        parameter: The parameter.
        gradient: Its gradient of one microbatch, whole.
        is_shared: Whether the same tensor object serves elsewhere too and must be copied.
    """
    existing = parameter.grad
    if not parameter.requires_grad:
        pass
    elif existing is None:
        parameter.grad = _take(parameter, gradient, is_shared)
    elif existing.is_sparse and not gradient.is_sparse:
        parameter.grad = gradient + existing
    else:
        existing += gradient
    hooks = getattr(parameter, ACCUMULATED_HOOKS, None)
    for hook in list(hooks.values()) if hooks else ():
        if hook(parameter) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")  # torch's


def accumulate_all(
    parameters: Sequence[torch.Tensor], found: Sequence[Gradient], others: Sequence[Gradient]
) -> None:
    """Add to ``.grad`` of every parameter what one backward has found for it.

    Args:
        parameters: The parameters.
        found: Their gradients.
        others: What the same backward has found for others, which must not change when later
            microbatches are added in place.
    """
    seen: set[int] = set()
    memories = {_memory(gradient) for gradient in others if gradient is not None}
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            is_shared = id(gradient) in seen or (bool(memories) and _memory(gradient) in memories)
            accumulate(parameter, gradient, is_shared=is_shared)
            seen.add(id(gradient))


def held_elsewhere(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that somebody keeps, as a hook does and the script that gave one to ``backward``.

    Args:
        gradients: They stand in one other container besides.
    """
    counts = [sys.getrefcount(gradient) for gradient in gradients]
    return [
        one
        for one, count in zip(gradients, counts, strict=True)
        if count > _USUAL
        or (one.layout is torch.strided and base_of(one) is one and not is_alone(one))
    ]


_ONE = [torch.zeros(())]
_USUAL = next(sys.getrefcount(one) for one in [*_ONE])  # of what stands in two containers


def keep_apart(parameters: Sequence[torch.Tensor], others: Sequence[Gradient]) -> None:
    """Give parameters gradients of their own, where a backward took those of others for them.

    Args:
        parameters: Those that had no gradient before.
        others: What the same backward has found for others, which must not change when later
            microbatches are added in place.
    """
    memories = {_memory(gradient) for gradient in others if gradient is not None}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and _memory(gradient) in memories:
            parameter.grad = gradient.clone()


def _memory(gradient: torch.Tensor) -> int:
    if gradient.layout is not torch.strided:
        return id(gradient)
    return gradient.untyped_storage().data_ptr()


def run_tensor_hooks(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Run the hooks that ``register_hook`` put on a parameter, for a gradient summed by us."""
    hooks = getattr(parameter, GRADIENT_HOOKS, None)
    for hook in list(hooks.values()) if hooks else ():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _take(parameter: torch.Tensor, gradient: torch.Tensor, is_shared: bool) -> torch.Tensor:
    if gradient.layout is not torch.strided:
        return gradient.clone() if is_shared else gradient
    if gradient.stride() == parameter.stride() and not is_shared:
        return gradient
    laid_out = torch.empty_like(parameter, memory_format=torch.preserve_format)
    return laid_out.detach().copy_(gradient)
