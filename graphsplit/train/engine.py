"""Where a Model's steps run: in this process alone, or as one worker of a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from graphsplit.train import batch as batches
from graphsplit.train.batch import Arguments, split_batch
from graphsplit.train.metrics import Metric
from graphsplit.train.planner import Task, materialize_all


class Engine(ABC):
    """Runs the steps of a Model."""

    def guard(self) -> AbstractContextManager[None]:
        """What a Model does with this engine, user code included, happens inside this."""
        return nullcontext()

    @abstractmethod
    def train_epoch(self, loader: Iterable[Any]) -> Iterator[torch.Tensor]:
        """Train on every batch of a loader; yields each step's loss."""

    @abstractmethod
    def train_step(self, arguments: Arguments) -> torch.Tensor:
        """Train on one batch; returns its loss."""

    @abstractmethod
    def eval_epoch(self, loader: Iterable[Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Evaluate every batch of a loader."""

    @abstractmethod
    def predict(self, arguments: Arguments) -> Any:
        """The network's outputs."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The network's full state."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the network's full state."""

    @abstractmethod
    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's full state."""

    @abstractmethod
    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the optimizer's full state."""


class EagerEngine(Engine):
    """Ordinary PyTorch in one process: the reference for all others."""

    def __init__(self, task: Task) -> None:
        self._task = task
        materialize_all(task)

    def train_epoch(self, loader: Iterable[Any]) -> Iterator[torch.Tensor]:
        """Train on every batch; yields each loss."""
        self._task.network.train()
        has_loss_fn = self._task.loss_fn is not None
        for batch in loader:
            yield self.train_step(split_batch(batch, has_loss_fn=has_loss_fn))

    def train_step(self, arguments: Arguments) -> torch.Tensor:
        """One step of the plain loop."""
        task = self._task
        assert task.optimizer is not None
        args, kwargs = arguments
        if not task.network.training:  # a callback may have evaluated in the middle of an epoch
            task.network.train()
        task.optimizer.zero_grad()
        loss = batches.run_train(task.network, task.loss_fn, *args, **kwargs)
        torch.autograd.backward(loss)
        task.optimizer.step()
        return loss.detach()

    def eval_epoch(self, loader: Iterable[Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Evaluate in eval mode, without gradients."""
        task = self._task
        for metric in metrics.values():
            metric.reset()
        has_loss_fn = task.loss_fn is not None
        task.network.eval()
        with torch.no_grad():
            for batch in loader:
                arguments = split_batch(batch, has_loss_fn=has_loss_fn)
                args, kwargs = arguments
                loss = None
                if task.with_loss:
                    loss, outputs = batches.run_eval_with_loss(
                        task.network, task.loss_fn, *args, **kwargs
                    )
                else:
                    outputs = batches.run_eval(task.network, task.loss_fn, *args, **kwargs)
                update_metrics(metrics, arguments, outputs, loss, has_loss_fn=has_loss_fn)
        return {name: metric.compute() for name, metric in metrics.items()}

    def predict(self, arguments: Arguments) -> Any:
        """Run the network in eval mode, without gradients."""
        self._task.network.eval()
        args, kwargs = arguments
        with torch.no_grad():
            return self._task.network(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The network's own state dictionary."""
        return dict(self._task.network.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load into the network."""
        self._task.network.load_state_dict(state)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's own state dictionary."""
        assert self._task.optimizer is not None
        return self._task.optimizer.state_dict()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load into the optimizer."""
        assert self._task.optimizer is not None
        self._task.optimizer.load_state_dict(dict(state))


def update_metrics(
    metrics: Mapping[str, Metric],
    arguments: Arguments,
    outputs: Any,
    loss: torch.Tensor | None,
    *,
    has_loss_fn: bool,
) -> None:
    """Show one batch to all metrics."""
    args, kwargs = arguments
    target = args[-1] if has_loss_fn else kwargs.get("labels", kwargs.get("target"))
    count = batches.num_samples(arguments)
    for metric in metrics.values():
        metric.update(outputs=outputs, target=target, loss=loss, num_samples=count)
