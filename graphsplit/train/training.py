"""Training over a loader, with callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from graphsplit.checkpoint.states import States
from graphsplit.errors import (
    MembershipChangedError,
)
from graphsplit.feeding.loader_checks import compare_loaders, refuse_shares
from graphsplit.train.callbacks import Callback, RunContext
from graphsplit.train.callbacks.stop import Stopping
from graphsplit.train.engine import Engine
from graphsplit.train.epochs import Epochs
from graphsplit.train.in_words import TrainingInWords


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
