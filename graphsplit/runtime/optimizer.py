"""The user's optimizer, stepped over the parameters that live here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graphsplit.runtime.ownership import is_elsewhere


class OwnedOptimizer:
    """Steps an optimizer on one worker.

    An optimizer of ``torch.optim`` treats every parameter by itself, so each worker may step those
    it owns: the results are those of one process. Settings, hooks and schedulers work on the
    user's own object, whose groups hold all parameters before and after.

    Args:
        optimizer: The user's optimizer, or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._owned: list[list[torch.Tensor]] = []
        self._counted: list[int] = []

    def step(self) -> None:
        """Step the owned parameters."""
        if self._optimizer is not None:
            with self._only_owned():
                self._optimizer.step()

    def zero_gradients(self) -> None:
        """Set the gradients of the owned parameters to None."""
        for parameters in self._refreshed():
            for parameter in parameters:
                parameter.grad = None

    @contextmanager
    def _only_owned(self) -> Iterator[None]:
        """What is not here has no gradient and would be skipped, but slowly."""
        assert self._optimizer is not None
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        for group, parameters in zip(groups, self._refreshed(), strict=True):
            group["params"] = parameters
        try:
            yield
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def _refreshed(self) -> list[list[torch.Tensor]]:
        """The owned parameters of each group; looked up anew when groups have grown."""
        if self._optimizer is None:
            return []
        counted = [len(group["params"]) for group in self._optimizer.param_groups]
        if counted != self._counted:
            self._counted = counted
            self._owned = [
                [p for p in group["params"] if not is_elsewhere(p)]
                for group in self._optimizer.param_groups
            ]
        return self._owned
