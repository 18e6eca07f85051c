"""Scripts change the gradients of all parameters: each worker those that it has.

``for p in net.parameters(): p.grad.add_(noise)`` runs on all workers. Where the parameter lives
elsewhere its gradient is a stand-in, as the parameter is: writes to it are left out.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphsplit.errors import OwnershipError
from graphsplit.optimizers.ownership import GRADIENT, OF_GRADIENT, WHOSE, Elsewhere, stand_in
from graphsplit.torch_ext.stand_ins import in_form


@contextmanager
def gradients_everywhere(
    parameters: Iterable[torch.Tensor], names: Container[str]
) -> Iterator[None]:
    """Inside, parameters that live elsewhere have stand-ins for their gradients.

    Args:
        parameters: Parameters.
        names: The names of those that have a gradient.
    """
    away = [p for p in parameters if isinstance(p, Elsewhere)]
    for parameter in away:
        setattr(parameter, GRADIENT, _Gradient(parameter, names))
    try:
        yield
    finally:
        for parameter in away:
            vars(parameter).pop(GRADIENT)


class _Gradient:
    """The stand-in for the gradient of a parameter, or None; the parameter has it read and set."""

    def __init__(self, parameter: Elsewhere, names: Container[str]) -> None:
        self._name, self._owner, _ = getattr(parameter, WHOSE)
        form = in_form(parameter, device="meta")
        is_one = self._name in names
        self._held = stand_in(form, self._told(), self._owner) if is_one else None

    def __call__(self, _: torch.Tensor, *given: Any) -> torch.Tensor | None:
        for value in given:  # one, where it is set
            if value is not None and getattr(value, WHOSE, ("", -1))[1] != self._owner:
                raise OwnershipError(
                    f"{self._told()} is set to a value that does not live there\n"
                    f"  Fix: write into it: parameter.grad.copy_(value)."
                )
            self._held = value
        return self._held

    def _told(self) -> str:
        return f"{OF_GRADIENT}{self._name!r}"
