"""Clipping of gradients, given to ``Model(clip=...)``.

    gs.Model(net, loss_fn, optimizer, clip=gs.clip.GlobalNorm(1.0))

Both give, bit for bit, what ``torch.nn.utils`` gives over ``net.parameters()`` in one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

from graphsplit.errors import ConfigurationError
from graphsplit.text import called, need
from graphsplit.torch_ext.private import foreach_norm, grouped_tensors, has_foreach_support

Kind = tuple[torch.dtype, torch.device]
"""The dtype and the device of a gradient."""


@called("gs.clip.GlobalNorm")
@dataclass(frozen=True)
class GlobalNorm:
    """Scale all gradients so that their common norm is at most ``max_norm``.

    Attributes:
        max_norm: The largest norm.
        norm_type: Which norm: 2.0, 1.0, ``float("inf")``, and so on.
        error_if_nonfinite: Whether a norm that is infinite or NaN is an error.
    """

    max_norm: float
    norm_type: float = 2.0
    error_if_nonfinite: bool = False

    def __post_init__(self) -> None:
        _check_number("GlobalNorm", "max_norm", self.max_norm)
        is_bool = isinstance(self.error_if_nonfinite, bool)
        shown = "error_if_nonfinite", self.error_if_nonfinite
        need("GlobalNorm", *shown, is_bool, "True or False")
        if not isinstance(self.norm_type, (int, float)) or math.isnan(self.norm_type):
            raise ConfigurationError(
                f"GlobalNorm: norm_type is {self.norm_type!r}; expected a number, as in 2.0"
            )

    def in_one_process(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """Clip where every parameter is at hand; returns the total norm."""
        total: torch.Tensor = clip_grad_norm_(
            list(parameters), self.max_norm, self.norm_type, self.error_if_nonfinite
        )
        return total

    def norms(self, gradients: Sequence[torch.Tensor]) -> list[float]:
        """The norm of each gradient, computed by the same kernels as in one process."""
        found = [0.0] * len(gradients)
        with torch.no_grad():
            for members in _groups(gradients):
                group = [gradients[index] for index in members]
                if has_foreach_support(list(group), group[0].device):
                    norms = list(foreach_norm(group, float(self.norm_type)))
                else:
                    norms = [torch.linalg.vector_norm(g, float(self.norm_type)) for g in group]
                for index, norm in zip(members, torch.stack(norms).tolist(), strict=True):
                    found[index] = norm
        return found

    def total(self, norms: Sequence[float], kinds: Sequence[Kind]) -> torch.Tensor:
        """The norm of all gradients, from the norms of each.

        PyTorch gathers the norms by device and dtype of the gradients, in an order that only it
        knows, and adds them up on the device of the first: another one has other bits.

        Args:
            norms: The norm of each gradient, in the order of the parameters.
            kinds: The dtype and the device of each gradient.

        Returns:
            A scalar on the device of the first gradient.

        Raises:
            RuntimeError: It is infinite or NaN, and ``error_if_nonfinite`` is set.
        """
        if not norms:
            return torch.tensor(0.0)
        empty = {kind: torch.empty(0, dtype=kind[0], device=kind[1]) for kind in set(kinds)}
        groups = [
            torch.tensor([norms[index] for index in members], dtype=torch.float64).to(
                kinds[members[0]][0].to_real()
            )
            for members in _groups([empty[kind] for kind in kinds])
        ]
        with torch.no_grad():
            stacked = torch.cat(groups).to(kinds[0][1])
            total: torch.Tensor = torch.linalg.vector_norm(stacked, float(self.norm_type))
        if self.error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"The total norm of order {float(self.norm_type)} for gradients from `parameters` "
                f"is non-finite, so it cannot be clipped. To disable this error and scale the "
                f"gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        return total

    def scale(self, parameters: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Scale the gradients of some parameters, given the norm of all."""
        clip_grads_with_norm_(parameters, self.max_norm, total)


@called("gs.clip.Value")
@dataclass(frozen=True)
class Value:
    """Clamp every element of every gradient to the range from ``-value`` to ``value``.

    Attributes:
        value: The largest magnitude.
    """

    value: float

    def __post_init__(self) -> None:
        _check_number("Value", "value", self.value)

    def in_one_process(self, parameters: Iterable[torch.Tensor]) -> None:
        """Clamp the gradients of some parameters, or of all."""
        with_gradient = [p for p in parameters if p.grad is not None]
        if with_gradient:
            clip_grad_value_(with_gradient, self.value)


Clip = GlobalNorm | Value


def _groups(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of tensors of one device and dtype, in the order in which PyTorch takes them."""
    if not tensors:
        return []
    grouped = grouped_tensors([list(tensors)], with_indices=True)
    return [list(indices) for _, indices in grouped.values()]


def _check_number(where: str, what: str, number: Any) -> None:
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or math.isnan(number) or number < 0:
        raise ConfigurationError(
            f"{where}: {what} is {number!r}; expected a number of 0 or more, as in 1.0"
        )
