"""Where a value of the script comes to other workers: steps of its autograd graph.

Every worker records the same graph of the script's operations: with values where they are, with
shapes elsewhere. So backward comes to these steps in one order on all workers, and each of them
moves the gradient back the way that the value came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

from graphsplit.distribute.loop import Loop, shape_of


class _Enter(Function):
    """From everywhere to one worker; the gradient goes to all."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, home: int, tensor: torch.Tensor) -> torch.Tensor:
        """The value on its worker, its shape elsewhere."""
        ctx.loop, ctx.home = loop, home
        return tensor.detach() if loop.rank == home else shape_of(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Give it to all."""
        return None, None, ctx.loop.share(gradient, ctx.home)


class _Share(Function):
    """From one worker to all; each has the whole gradient then."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, home: int, tensor: torch.Tensor) -> torch.Tensor:
        """The value, on every worker."""
        ctx.loop, ctx.home = loop, home
        return loop.share(tensor, home)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Every worker has it already."""
        is_here = ctx.loop.rank == ctx.home
        return None, None, gradient if is_here else shape_of(gradient)


class _Move(Function):
    """From one worker to another one."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, ways: tuple[int, int], tensor: torch.Tensor) -> torch.Tensor:
        """The value on the other worker, its shape elsewhere."""
        ctx.loop, ctx.ways = loop, ways
        return loop.move(tensor, *ways)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The same way back."""
        source, destination = ctx.ways
        return None, None, ctx.loop.move(gradient, destination, source)


enter: Callable[[Loop, int, torch.Tensor], torch.Tensor] = _Enter.apply
share: Callable[[Loop, int, torch.Tensor], torch.Tensor] = _Share.apply
move: Callable[[Loop, tuple[int, int], torch.Tensor], torch.Tensor] = _Move.apply
