"""A plain training loop with the calls of ``gs.Model``: no part of it is graphsplit's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class PlainModel:
    """One process, eager mode, microbatches as the documentation's loop has them."""

    def __init__(
        self,
        net: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        microbatches: int = 1,
    ) -> None:
        self.network, self.loss_fn, self.optimizer = net, loss_fn, optimizer
        self._microbatches = microbatches

    def train_step(self, *batch: Any) -> torch.Tensor:
        assert self.optimizer is not None
        self.network.train()
        losses = self._backward(batch)
        self.optimizer.step()
        return sum(losses[1:], losses[0])

    def _backward(self, batch: Any) -> list[torch.Tensor]:
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        losses = []
        for part, weight in self._parts(batch):
            loss = self._loss(part) if weight is None else self._loss(part) * weight
            loss.backward()
            losses.append(loss.detach())
        return losses

    def train(self, epochs: int, loader: Any) -> None:
        for _ in range(epochs):
            for batch in loader:
                self.train_step(*batch)

    def predict(self, *args: Any) -> Any:
        modes = {module: module.training for module in self.network.modules()}
        self.network.eval()
        with torch.no_grad():
            outputs = self.network(*args)
        for module, mode in modes.items():
            if module.training is not mode:
                module.train(mode)
        return outputs

    def state_dict(self) -> Any:
        return copy.deepcopy(self.network.state_dict())

    def _loss(self, batch: Any) -> torch.Tensor:
        if self.loss_fn is None:
            loss: torch.Tensor = self.network(*batch)
            return loss
        made: torch.Tensor = self.loss_fn(self.network(*batch[:-1]), batch[-1])
        return made

    def _parts(self, batch: Any) -> Iterator[tuple[Any, float | None]]:
        if self._microbatches == 1:
            yield batch, None
            return
        columns = [torch.tensor_split(tensor, self._microbatches) for tensor in batch]
        for part in zip(*columns, strict=True):
            yield part, len(part[0]) / len(batch[0])
