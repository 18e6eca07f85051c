"""Training over a loader, with callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any

import torch

from graphsplit.checkpoint.states import States
from graphsplit.errors import (
    ConfigurationError,
    MembershipChangedError,
)
from graphsplit.feeding.loader_checks import compare_loaders, refuse_shares
from graphsplit.train.callbacks import Callback, RunContext
from graphsplit.train.engine import Engine
from graphsplit.train.epochs import Epochs


@dataclass(eq=False)
class TrainingLoop:
    """Trains over a loader, and calls callbacks.

    Args:
        engine: Runs the steps.
        states: Saves and loads the Model's state.
        context: What callbacks see.
        callbacks: Callbacks, in call order.
        after_step: Called after every step, callbacks included; what it raises ends training.
    """

    _engine: Engine
    _states: States
    _context: RunContext
    _callbacks: Sequence[Callback]
    _after_step: Callable[[], None]

    def __post_init__(self) -> None:
        self._stopping = Stopping(self._callbacks, self._engine)
        self._context.on_stop = self._stopping.ask

    def run(self, loader: Iterable[Any], *, resume: bool, steps: int | None = None) -> None:
        """Train; an epoch has at most ``steps``. See ``Epochs`` for ``resume``."""
        context, callbacks = self._context, self._callbacks
        try:
            with self._engine.guard():
                refuse_shares(loader, "train")
                self._engine.call_on_gradients(self._listener())
                goes_on = self._states.resumption is not None
                run = Epochs(self._states, context, loader, callbacks, resume=resume)
                asked = f"{context.num_epochs} epochs, each of {steps or 'all'} steps"
                stopping, group = self._stopping, self._engine.group()
                stopping.marks = compare_loaders(
                    loader, asked, group, with_states=not goes_on, marks=stopping.marks
                )
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
        context, stopping = self._context, self._stopping

        def is_last() -> bool:
            return stopping.is_stopped or (steps is not None and context.step >= steps)

        if not run.has_begun:
            self._tell("on_train_begin")
        for start in run:
            self._tell("on_epoch_begin")
            run.begin(start)
            # Under no name: an error, which holds the names, would keep it and its loader open.
            for loss in self._losses(loader, start, is_last):
                run.count(loss)
                context.has_updated = self._engine.progress.opens
                beside = self._engine.beside
                context.losses, context.outputs = beside.losses, beside.outputs
                for callback in self._callbacks:
                    callback.on_step_end(context)
                self._after_step()
                stopping.after_step()
            if stopping.is_stopped:  # in its middle: a run that goes on from here ends the epoch
                self._tell("on_stop")
                break
            run.end()
            self._tell("on_epoch_end")
            if stopping.after_epoch():
                break
        self._tell("on_train_end")

    def _losses(self, *epoch: Any) -> Iterator[torch.Tensor]:
        losses, witness = self._engine.train_epoch(*epoch), self._engine.witness
        return losses if witness is None else witness.of_epoch(losses)

    def _tell(self, method: str) -> None:
        """Call a method of every callback. Whoever makes a call there alone is found out."""
        for callback in self._callbacks:
            getattr(callback, method)(self._context)
        self._engine.pass_milestone()

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


_AT_LEAST_S = 2.0


class TrainingInWords:
    """``epoch 2 of 5, step 12 of 28, loss 0.3142, 12.3 steps/s``; the rate is that of late.

    Args:
        context: Where training stands; only read.
        now: The clock.
    """

    def __init__(self, context: RunContext, now: Callable[[], float] = time.monotonic) -> None:
        self._context, self._now = context, now
        self._since = now(), self._num_steps()
        self._rate = ""

    def __call__(self) -> str:
        """The words at this moment."""
        context, (since, before) = self._context, self._since
        now, num_steps = self._now(), self._num_steps()
        if now - since >= _AT_LEAST_S:
            self._since = now, num_steps
            self._rate = f", {max(0, num_steps - before) / (now - since):.3g} steps/s"
        loss = "" if context.loss is None else f", loss {float(context.loss):.4g}"
        of_all = "" if context.num_steps is None else f" of {context.num_steps}"
        epochs = f"epoch {context.epoch} of {context.num_epochs}"
        return f"{epochs}, step {context.step}{of_all}{loss}{self._rate}"

    def _num_steps(self) -> int:
        return self._context.model.position.num_steps


# How ``context.stop()`` of one worker ends training on all of them, after the same step.

_INSIDE_EPOCH = ("on_train_begin", "on_epoch_begin", "on_gradients", "on_step_end")


class Stopping:
    """Whether training ends early; agreed on by all workers.

    Workers tell each other at the end of each step, if some callback of any of them may stop there,
    and at the end of each epoch, if some callback may stop there. Without one nobody asks.

    Args:
        callbacks: The callbacks of this worker.
        engine: Gives all workers.

    Attributes:
        marks: Whether some may stop at a step's end, and at an epoch's: "0" or "1" for each. Of the
            callbacks here; of all workers', once they have told each other.
    """

    def __init__(self, callbacks: Sequence[Callback], engine: Engine) -> None:
        self._engine = engine
        self._may_stop = [callback for callback in callbacks if may_stop(callback)]
        self._is_asked = False
        ends_step = any(_is_called_inside(callback) for callback in self._may_stop)
        self.marks = f"{ends_step:d}{bool(self._may_stop):d}"
        self.is_stopped = False

    def ask(self) -> None:
        """A callback here asks for the end.

        Raises:
            ConfigurationError: No callback was known to do so.
        """
        if not self._may_stop:
            raise ConfigurationError(
                "context.stop() was called, but no callback's class names it, so that the workers "
                "do not ask each other\n  Fix: set may_stop = True on the callback's class."
            )
        self._is_asked = True

    def after_step(self) -> None:
        """Collective, if it has to be: whether the step was the last."""
        if self.marks[0] == "1":
            self.is_stopped = self._any(self._is_asked)

    def after_epoch(self) -> bool:
        """Collective, if it has to be: whether the epoch, which was not stopped, was the last."""
        return self.marks[1] == "1" and self._any(self._is_asked)

    def _any(self, mine: bool) -> bool:
        self._engine.pass_milestone()  # nobody waits here for one that is in a callback
        group = self._engine.group()
        told = group.gather("yes" if mine else "")
        return bool(group.share("yes" if any(told) else ""))


def may_stop(callback: Callback) -> bool:
    """Whether a callback may call ``context.stop()``: as it says, or as its code looks."""
    if callback.may_stop is not None:
        return callback.may_stop
    return any("stop" in code.co_names for code in _codes(type(callback)))


def _is_called_inside(callback: Callback) -> bool:
    kind = type(callback)
    return any(getattr(kind, name) is not getattr(Callback, name) for name in _INSIDE_EPOCH)


def _codes(kind: type) -> Iterator[CodeType]:
    """The code of a callback's class, and of the functions in it."""
    for one in kind.__mro__:
        if one in (Callback, object):
            continue
        for member in vars(one).values():
            if isinstance(member, FunctionType):
                yield from _with_inner(member.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
