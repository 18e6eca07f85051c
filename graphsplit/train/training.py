"""The calls of a Model that run steps. Each is what all workers do between two lines of a script.

A Model's method checks its arguments and makes the call of the same name here, which leads to the
engine. Where lost workers may come back, the script stands in between (``Script.around``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from graphsplit.batches.microbatches import Division
from graphsplit.checkpoint.other_loaders import length_of
from graphsplit.checkpoint.states import States
from graphsplit.errors import (
    ConfigurationError,
    EnoughSteps,
    MembershipChangedError,
    StoppedInOrder,
)
from graphsplit.feeding.loader_checks import compare_loaders, refuse_shares
from graphsplit.job import joined
from graphsplit.job.script import Script
from graphsplit.planning.task import Task
from graphsplit.train.callbacks import Callback, RunContext, TrainedModel
from graphsplit.train.callbacks.stop import Stopping
from graphsplit.train.engine import Engine
from graphsplit.train.epochs import Epochs
from graphsplit.train.in_words import TrainingInWords
from graphsplit.train.metrics import Metric
from graphsplit.train.outputs import Predicting
from graphsplit.witness import What


class Calls:
    """Trains, evaluates and predicts; see the methods of ``Model``.

    Args:
        task: What is run.
        engine: Runs the steps.
        states: Saves and loads the state.
        metrics: What ``eval`` computes, by name.
        script: Told when a training step is over.
    """

    def __init__(
        self,
        task: Task,
        engine: Engine,
        states: States,
        metrics: Mapping[str, Metric],
        script: Script,
    ) -> None:
        self._task = task
        self._engine = engine
        self._states = states
        self._metrics = metrics
        self._script = script
        self._has_begun = False

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._states.python.begin()

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
            has_loss_fn = self._task.loss_fn is not None
            predicting = Predicting(self._engine.predict, self._states.others, has_loss_fn)
            outputs = predicting.outputs((args, kwargs))
            if self._engine.witness is not None:
                self._engine.witness.predicted(outputs)
            return outputs


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


class TrainingLoop:
    """Trains over a loader, and calls callbacks.

    Args:
        engine: Runs the steps.
        states: Saves and loads the Model's state.
        context: What callbacks see.
        callbacks: Callbacks, in call order.
        after_step: Called after every step, callbacks included; what it raises ends training.
    """

    def __init__(
        self,
        engine: Engine,
        states: States,
        context: RunContext,
        callbacks: Sequence[Callback],
        after_step: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._states = states
        self._context = context
        self._callbacks = callbacks
        self._after_step = after_step
        self._stopping = Stopping(callbacks, engine.group)
        context.on_stop = self._stopping.ask

    def run(self, loader: Iterable[Any], *, resume: bool, steps: int | None = None) -> None:
        """Train; an epoch has at most ``steps``. See ``Epochs`` for ``resume``."""
        context, callbacks = self._context, self._callbacks
        try:
            with self._engine.guard():
                refuse_shares(loader, "train")
                self._engine.call_on_gradients(self._listener())
                goes_on = self._states.resumption is not None
                run = Epochs(self._states, context, loader, callbacks, resume=resume)
                compare_loaders(loader, self._engine.group(), with_states=not goes_on)
                self._engine.show_training(TrainingInWords(context))
                with run:
                    self._go_through(run, loader, steps)
        except MembershipChangedError:
            for callback in callbacks:
                callback.on_rollback(context)
            raise
        except BaseException:
            for callback in callbacks:
                callback.on_failure(context)
            raise
        finally:
            self._engine.call_on_gradients(None)
            self._engine.show_training(str)
            context.on_stop = None

    def _go_through(self, run: Epochs, loader: Iterable[Any], steps: int | None) -> None:
        context, callbacks, stopping = self._context, self._callbacks, self._stopping
        stopping.begin()

        def is_last() -> bool:
            return stopping.is_stopped or (steps is not None and context.step >= steps)

        if not run.has_begun:
            for callback in callbacks:
                callback.on_train_begin(context)
        for start in run:
            for callback in callbacks:
                callback.on_epoch_begin(context)
            run.begin(start)
            losses, witness = self._engine.train_epoch(loader, start, is_last), self._engine.witness
            for loss in losses if witness is None else witness.of_epoch(losses):
                run.count(loss)
                context.has_updated = self._engine.progress.opens
                beside = self._engine.beside
                context.losses, context.outputs = beside.losses, beside.outputs
                for callback in callbacks:
                    callback.on_step_end(context)
                self._after_step()
                stopping.after_step()
            if stopping.is_stopped:  # in its middle: a run that goes on from here ends the epoch
                for callback in callbacks:
                    callback.on_stop(context)
                break
            run.end()
            for callback in callbacks:
                callback.on_epoch_end(context)
            if stopping.after_epoch():
                break
        for callback in callbacks:
            callback.on_train_end(context)

    def _listener(self) -> Callable[[], None] | None:
        """The function that shows gradients to callbacks; None if none of them looks."""
        context = self._context
        looking = [c for c in self._callbacks if type(c).on_gradients is not Callback.on_gradients]
        if not looking:
            return None

        def show() -> None:
            under_way = replace(context, step=context.step + 1)
            for callback in looking:
                callback.on_gradients(under_way)

        return show
