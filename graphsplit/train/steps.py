"""Single training steps: whole, or in parts for scripts that put them together themselves."""

from __future__ import annotations

import math
from typing import Any

import torch

from graphsplit.errors import ConfigurationError
from graphsplit.job.script import Script
from graphsplit.optimizers.own_step import guard_backward
from graphsplit.planning.task import Task
from graphsplit.train.engine import Engine
from graphsplit.train.training import Calls, stop_if_asked


class Steps:
    """The methods of a ``Model`` that make a training step: all of it, or one part."""

    _task: Task
    _engine: Engine
    _script: Script
    _calls: Calls

    def train_step(self, *batch: Any, **kwargs: Any) -> torch.Tensor:
        """Train on one batch, which every worker passes alike.

        Returns:
            The loss, a scalar tensor, the true one on every worker.

        Raises:
            LoaderMismatchError: Workers passed different batches.
            ConfigurationError, CaptureError, PlacementError, PlanMismatchError, JobFailedError:
                as ``train``.
        """
        need_optimizer(self._task, "train_step")
        loss = self._calls.train_step(batch, kwargs)
        stop_if_asked(self._engine, self._script)
        return guard_backward(loss)

    def forward_backward(self, *batch: Any, scale: float = 1.0, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one batch, which every worker passes alike.

        The gradients of ``loss * scale`` are added to those that are there; with ``microbatches``,
        in the order of the ``schedule``. Nothing is reset before, and no optimizer steps::

            model.zero_grad()
            for x, y in four_batches:
                model.forward_backward(x, y, scale=1 / 4)
            model.step()

        Args:
            batch: As for ``train_step``.
            scale: What the loss is multiplied by before backward.
            kwargs: As for ``train_step``.

        Returns:
            The loss, without ``scale``, a scalar tensor; the true one on every worker.

        Raises:
            ConfigurationError: ``scale`` is no finite number, or the Model has ``accumulate=``.
            LoaderMismatchError: Workers passed different batches, or another scale.
            CaptureError, PlacementError, PlanMismatchError, JobFailedError: as ``train``.
        """
        is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        if not is_number or not math.isfinite(scale):
            raise ConfigurationError(f"forward_backward: scale is {scale!r}; expected a number")
        if self._task.accumulate != 1:
            raise ConfigurationError(
                f"forward_backward was called, and the Model has accumulate="
                f"{self._task.accumulate}, which counts the batches of train and train_step\n"
                f"  Fix: leave accumulate out, and pass scale=1 / {self._task.accumulate}."
            )
        loss = self._calls.forward_backward(batch, kwargs, float(scale))
        stop_if_asked(self._engine, self._script)
        return guard_backward(loss)

    def zero_grad(self) -> None:
        """Reset the gradients, as ``train_step`` does first: to None, or to zeros."""
        self._calls.zero_grad()

    def step(self) -> None:
        """Use the gradients that ``forward_backward`` has added, as ``train_step`` does last.

        They are unscaled and clipped, where the Model has a ``scaler`` or ``clip``, and the
        optimizers step. Gradients stay until ``zero_grad``.

        Raises:
            ConfigurationError: The Model has no optimizer, or ``forward_backward`` has added
                nothing since ``zero_grad`` or ``train_step``.
        """
        need_optimizer(self._task, "step")
        self._calls.step()
        stop_if_asked(self._engine, self._script)


def need_optimizer(task: Task, method: str) -> None:
    """Raise ``ConfigurationError`` if there is nothing that trains."""
    if not task.optimizer:
        raise ConfigurationError(
            f"{method} needs an optimizer\n  Fix: Model(..., optimizer=torch.optim.SGD("
            f"net.parameters(), lr=0.01))."
        )
