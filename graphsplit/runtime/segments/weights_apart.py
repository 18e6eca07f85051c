"""Operations whose weight gradients are computed apart, with the bits that autograd gives them.

Such an operation is recorded in a graph of its own, inside one node of its segment's graph. Its
backward is autograd's own, called twice: once for the activation, once for the weights::

    segment's graph     ... <- relu <- [ linear ] <- relu <- ...
    inside the node             x -> addmm -> y
    BACKWARD_INPUT              gradient of x, from that of y, which is noted
    BACKWARD_WEIGHT             gradients of weight and bias, from the noted gradient of y

Autograd computes of an operation's gradients only those that are asked for, each by itself; so
nothing is computed twice, and the kernels are those of eager mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from graphsplit.partition.plan import WeightUse
from graphsplit.runtime.segments.autograd import Gradient, gradients

# Asks for a gradient, and gets none: autograd runs a node's backward only on the way to something
# that does, and not all activations do. The weights themselves stay out of the segment's graph, so
# that their hooks see nothing before there is a gradient.
ANCHOR = torch.zeros((), requires_grad=True)


@dataclass(frozen=True, slots=True)
class Pending:
    """Weight gradients of one operation that are still to be computed.

    Attributes:
        use: The operation.
        edge: Where its backward begins.
        gradient: The gradient of its result.
        weights: Its weights, in the order of ``use.operands``.
    """

    use: WeightUse
    edge: GradientEdge
    gradient: torch.Tensor
    weights: tuple[torch.Tensor, ...]

    def compute(self) -> tuple[Gradient, ...]:
        """The gradients of the weights; frees what was kept for them."""
        return gradients((self.edge,), (self.gradient,), self.weights)


class WeightsApart:
    """Called by a segment's code in the place of an operation.

    Args:
        target: The operation.
        use: What is known of it.
        weights: Which of its arguments are weights, in the order of ``use.operands``.
        activations: Which of its arguments are other tensors.
        keywords: Its keyword arguments; no tensors.
        pending: Where backward notes what is left to compute.
    """

    def __init__(
        self,
        target: Callable[..., torch.Tensor],
        use: WeightUse,
        *,
        weights: Sequence[int],
        activations: Sequence[int],
        keywords: Mapping[str, Any],
        pending: list[Pending],
    ) -> None:
        self.run = functools.partial(target, **keywords) if keywords else target
        self.use = use
        self.weights = tuple(weights)
        self.activations = tuple(activations)
        self.pending = pending
        # The generated code of a graph names what it calls.
        self.__name__ = self.__qualname__ = f"weights_apart_{use.position}"
        self.__module__ = "graphsplit_weights_apart"

    def __call__(self, *arguments: Any) -> Any:
        """Run the operation."""
        own = list(arguments)
        weights = tuple(own[index] for index in self.weights)
        for index in self.weights:
            own[index] = None
        return _Apart.apply(self, ANCHOR, weights, *own)  # type: ignore[no-untyped-call]


class _Apart(torch.autograd.Function):
    """One node of a segment's graph, around an operation's own graph."""

    @staticmethod
    def forward(
        ctx: Any,
        call: WeightsApart,
        anchor: torch.Tensor,
        weights: tuple[torch.Tensor, ...],
        *arguments: Any,
    ) -> torch.Tensor:
        """Run the operation on leaves, so that its graph ends there."""
        own = list(arguments)
        for index in call.activations:
            own[index] = own[index].detach().requires_grad_(own[index].requires_grad)
        for index, weight in zip(call.weights, weights, strict=True):
            own[index] = weight
        with torch.enable_grad():
            result = call.run(*own)
        ctx.call = call
        ctx.edge = get_gradient_edge(result)
        ctx.asking = tuple(i for i in call.activations if own[i].requires_grad)
        ctx.leaves = tuple(own[i] for i in ctx.asking)
        ctx.weights = weights
        ctx.num_arguments = len(arguments)
        ctx.set_materialize_grads(False)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        """The gradients of the activations; those of the weights are noted."""
        (gradient,) = given
        found: list[Gradient] = [None] * ctx.num_arguments
        if gradient is not None:
            if ctx.leaves:
                made = gradients((ctx.edge,), (gradient,), ctx.leaves, keep_graph=True)
                for index, one in zip(ctx.asking, made, strict=True):
                    found[index] = one
            ctx.call.pending.append(Pending(ctx.call.use, ctx.edge, gradient, ctx.weights))
        return (None, None, None, *found)
