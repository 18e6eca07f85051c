"""Steps of a Model: the methods that make them, and the calls of all workers behind those.

A Model's method checks its arguments and makes the call of the same name, which leads to the
engine. A call is what all workers do between two lines of a script; where lost workers may come
back, the script stands in between (``Script.around``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphsplit.batches.microbatches import Division
from graphsplit.check.record import What
from graphsplit.checkpoint.other_loaders import length_of
from graphsplit.checkpoint.states import States
from graphsplit.errors import ConfigurationError, EnoughSteps, StoppedInOrder
from graphsplit.feeding.loader_checks import refuse_shares
from graphsplit.job import joined
from graphsplit.job.script import Script
from graphsplit.optimizers.own_step import guard_backward
from graphsplit.planning.task import Task
from graphsplit.text import called
from graphsplit.train.callbacks import Callback, RunContext, TrainedModel
from graphsplit.train.engine import Engine
from graphsplit.train.metrics import Metric
from graphsplit.train.outputs import predicted_loader
from graphsplit.train.training import TrainingLoop


@dataclass(eq=False)
class Calls:
    """Trains, evaluates and predicts; see the methods of ``Model``.

    Args:
        task: What is run.
        engine: Runs the steps.
        states: Saves and loads the state.
        metrics: What ``eval`` computes, by name.
        script: Told when a training step is over.
    """

    _task: Task
    _engine: Engine
    _states: States
    _metrics: Mapping[str, Metric]
    _script: Script
    _has_begun: bool = False

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._states.begin()

    def train(
        self,
        epochs: int,
        loader: Iterable[Any],
        callbacks: Sequence[Callback],
        resume: bool,
        steps: int | None,
        model: TrainedModel,
    ) -> None:
        """Train over a loader; callbacks see the Model."""
        self._begin()
        lengths = [length for length in (length_of(loader), steps) if length is not None]
        context = RunContext(model, joined.get_rank(), epochs, min(lengths, default=None))
        run = TrainingLoop(self._engine, self._states, context, callbacks, self._after_step)
        run.run(loader, resume=resume, steps=steps)

    def _after_step(self) -> None:
        self._script.step_done()
        stop_if_asked(self._engine, self._script, ends_step=True)

    def train_step(self, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Train on one batch; returns the loss."""
        return self._one_step(batch, kwargs, self._engine.train_step, What.STEP)

    def forward_backward(
        self, batch: tuple[Any, ...], kwargs: dict[str, Any], scale: float
    ) -> torch.Tensor:
        """Add the gradients of one batch; returns the loss."""
        run = partial(self._engine.forward_backward, scale=scale)
        return self._one_step(batch, kwargs, run, What.BATCH)

    def _one_step(
        self,
        batch: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[Division], torch.Tensor],
        what: What,
    ) -> torch.Tensor:
        self._begin()
        task, engine = self._task, self._engine
        with engine.guard():
            division = task.divider.divide_call(batch, kwargs, has_loss_fn=task.loss_fn is not None)
            if engine.witness is not None:
                engine.witness.begins(what)
            loss = run(division)
            if engine.witness is not None:
                engine.witness.trained(loss, what)
            return loss

    def zero_grad(self) -> None:
        """Reset the gradients."""
        with self._engine.guard():
            self._engine.zero_gradients()

    def step(self) -> None:
        """Use the gradients that were added."""
        with self._engine.guard():
            if not self._engine.progress.adds_up:
                raise ConfigurationError(
                    "step was called, and there are no gradients that forward_backward has added\n"
                    "  Fix: call forward_backward before, and zero_grad after step; train_step "
                    "does all three."
                )
            self._engine.step()
            if self._engine.witness is not None:
                self._engine.witness.stepped()

    def eval(self, loader: Iterable[Any]) -> dict[str, float]:
        """Compute the metrics over a loader."""
        self._begin()
        with self._engine.guard():
            refuse_shares(loader, "eval")
            self._states.others.begin(loader)
            found = self._engine.eval_epoch(loader, self._metrics)
            self._states.others.end(loader)
            if self._engine.witness is not None:
                self._engine.witness.evaluated(found)
            return found

    def predict(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs for one batch, or for each batch of a loader."""
        self._begin()
        with self._engine.guard():
            loader = predicted_loader((args, kwargs))
            if loader is None:
                outputs = self._engine.predict((args, kwargs))
            else:
                refuse_shares(loader, "predict")
                self._states.others.begin(loader)
                outputs = self._engine.predict_loader(loader)
                self._states.others.end(loader)
            if self._engine.witness is not None:
                self._engine.witness.predicted(outputs)
            return outputs


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

    @called("model.zero_grad")
    def zero_grad(self) -> None:
        """Reset the gradients, as ``train_step`` does first: to None, or to zeros."""
        self._calls.zero_grad()

    @called("model.step")
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


def need_metrics(metrics: Mapping[str, Metric]) -> None:
    """Raise ``ConfigurationError`` if there is nothing to evaluate."""
    if not metrics:
        raise ConfigurationError(
            "eval needs metrics\n  Fix: Model(..., metrics={'Accuracy': gs.metrics.Accuracy()})."
        )


def stop_if_asked(engine: Engine, script: Script, *, ends_step: bool = False) -> None:
    """Leave the script, together with all workers, if the job was asked to end.

    What a callback calls is part of a training step, which has an end of its own.

    Args:
        engine: Runs the steps.
        script: The script that is left.
        ends_step: Whether this is the end of a step of ``train``, or else of a call.

    Raises:
        EnoughSteps: The check that runs the script has seen what it needs.
        StoppedInOrder: The job was asked to end.
    """
    if engine.is_inside_call and not ends_step:
        return
    if engine.witness is not None and engine.witness.has_enough:
        raise EnoughSteps
    if engine.stops_here:
        script.stop()
        raise StoppedInOrder
