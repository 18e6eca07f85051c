"""The plain eager loop that everything is compared with. It uses nothing of graphsplit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class EagerLoop:
    """A network trained by the loop that anybody would write.

    The generator that it draws from is its own; the default one is left as it was found.

    Args:
        make: Makes network, loss function (or None), optimizer and scheduler (or None).
    """

    def __init__(self, make: Callable[[], tuple[nn.Module, Any, Any, Any]]) -> None:
        self.generator = torch.default_generator.get_state()
        with self._own_generator():
            self.network, self.loss_fn, self.optimizer, self.scheduler = make()

    def train_step(self, batch: Any) -> torch.Tensor:
        """One step of training; returns the loss."""
        with self._own_generator():
            self.network.train()
            self.optimizer.zero_grad()
            loss = self._loss(self._forward(batch), batch)
            loss.backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            return loss.detach()

    def evaluate(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Loss and outputs in eval mode."""
        with self._own_generator(), torch.no_grad():
            self.network.eval()
            outputs = self._forward(batch)
            return self._loss(outputs, batch), outputs

    def predict(self, batch: Any) -> Any:
        """Outputs in eval mode."""
        with self._own_generator(), torch.no_grad():
            self.network.eval()
            return self._forward(batch)

    def _forward(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self.network(**batch)
        return self.network(*(batch if self.loss_fn is None else batch[:-1]))

    def _loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        if self.loss_fn is not None:
            loss = self.loss_fn(outputs, batch[-1])
        elif isinstance(outputs, torch.Tensor):
            loss = outputs
        else:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss
        assert isinstance(loss, torch.Tensor)
        return loss

    @contextmanager
    def _own_generator(self) -> Iterator[None]:
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generator)
        try:
            yield
        finally:
            self.generator = torch.default_generator.get_state()
            torch.default_generator.set_state(before)
