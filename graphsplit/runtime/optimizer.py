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
        optimizer: The user's optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._owned: list[list[torch.Tensor]] = []
        self._counted: list[int] = []

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Step the owned parameters, or have the scaler do it where all gradients are finite."""
        with self._only_owned():
            if scaler is None:
                self._optimizer.step()
            else:
                scaler.step(self._optimizer)

    def zero_gradients(self, *, set_to_none: bool = True) -> None:
        """Set the gradients of the owned parameters to None, or to zeros."""
        if not set_to_none:
            with self._only_owned():
                self._optimizer.zero_grad(set_to_none=False)
            return
        for parameters in self._refreshed():
            for parameter in parameters:
                parameter.grad = None

    def unscale(self, scaler: torch.amp.GradScaler) -> dict[torch.device, torch.Tensor]:
        """Unscale the owned gradients.

        Returns:
            For each device, 1 if an infinite or NaN gradient was found there, else 0; empty if
            there is no gradient.
        """
        with self._only_owned():
            scaler.unscale_(self._optimizer)
        return self.checks(scaler)

    def checks(self, scaler: torch.amp.GradScaler) -> dict[torch.device, torch.Tensor]:
        """What the scaler has found in this optimizer's gradients; it decides by this alone."""
        found: dict[torch.device, torch.Tensor]
        found = scaler._per_optimizer_states[id(self._optimizer)]["found_inf_per_device"]
        return found

    @contextmanager
    def _only_owned(self) -> Iterator[None]:
        """What is not here has no gradient and would be skipped, but slowly."""
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
        counted = [len(group["params"]) for group in self._optimizer.param_groups]
        if counted != self._counted:
            self._counted = counted
            self._owned = [
                [p for p in group["params"] if not is_elsewhere(p)]
                for group in self._optimizer.param_groups
            ]
        return self._owned
