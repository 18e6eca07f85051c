"""Callbacks that most people use: they print, save, and step schedulers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from graphsplit.checkpoint.disk.series import Series
from graphsplit.errors import ConfigurationError
from graphsplit.text import called, described, need
from graphsplit.train.callbacks.base import Callback, RunContext


class LossMonitor(Callback):
    """Prints the loss on worker 0: the last, and the mean of those since it printed before.

    At the end of an epoch also what ``train(..., validation=loader)`` gave.

    Args:
        every: Print every so many steps; 0 prints at the end of an epoch only.

    Raises:
        ConfigurationError: ``every`` is no such number.
    """

    @called("LossMonitor")
    def __init__(self, every: int = 0) -> None:
        if type(every) is not int or every < 0:
            raise ConfigurationError(f"every={every!r}; expected an int of 0 or more")
        self._every = every
        self._sum: torch.Tensor | float = 0.0
        self._num_losses = 0

    def on_epoch_begin(self, context: RunContext) -> None:
        """A mean is over one epoch."""
        self._forget()

    def on_step_end(self, context: RunContext) -> None:
        """Print every ``every`` steps."""
        if context.rank == 0 and context.loss is not None:
            self._sum = context.loss.double() + self._sum  # stays where it is: nobody waits
            self._num_losses += 1
        if self._every and context.step % self._every == 0:
            self._print(context)

    def on_epoch_end(self, context: RunContext) -> None:
        """Print the last loss of the epoch, unless it was just printed, and the validation."""
        self.on_stop(context)
        if context.rank == 0 and context.metrics:
            found = ", ".join(f"{name} {value:.6g}" for name, value in context.metrics.items())
            print_line(f"epoch: {context.epoch} validation: {found}")

    def on_stop(self, context: RunContext) -> None:
        """Print the last loss, unless it was just printed."""
        if context.loss is not None and not (self._every and context.step % self._every == 0):
            self._print(context)

    def _print(self, context: RunContext) -> None:
        if context.rank != 0 or context.loss is None:
            return
        mean = f", mean {float(self._sum) / self._num_losses:.6g}" if self._num_losses else ""
        loss = float(context.loss)
        print_line(f"epoch: {context.epoch} step: {context.step}, loss is {loss}{mean}")
        self._forget()

    def _forget(self) -> None:
        self._sum = 0.0
        self._num_losses = 0


class TimeMonitor(Callback):
    """Prints the time of every epoch, and per step, in milliseconds, on worker 0."""

    def on_epoch_begin(self, context: RunContext) -> None:
        """Start the clock."""
        self._start, self._first_step = time.perf_counter(), context.step

    def on_epoch_end(self, context: RunContext) -> None:
        """Print the times."""
        spent_ms = (time.perf_counter() - self._start) * 1e3
        num_steps = context.step - self._first_step
        per_step = spent_ms / num_steps if num_steps else 0.0
        if context.rank == 0:
            print_line(
                f"epoch: {context.epoch} time: {spent_ms:.3f} ms, per step time: {per_step:.3f} ms"
            )

    def on_stop(self, context: RunContext) -> None:
        """Print the times."""
        self.on_epoch_end(context)


class LearningRateScheduler(Callback):
    """Steps a learning rate scheduler, on every worker alike.

    Args:
        scheduler: Any scheduler of ``torch.optim.lr_scheduler``.
        every: ``"epoch"``: at the end of every epoch; ``"step"``: after every step of the
            optimizer.
        metric: For schedulers that watch a number, as ``ReduceLROnPlateau``: gives it, from the
            context. It must be the same on every worker; by default it is the last loss.

    Raises:
        ConfigurationError: An argument is not as above.
    """

    @called("LearningRateScheduler")
    def __init__(
        self,
        scheduler: Any,
        every: Literal["epoch", "step"] = "epoch",
        *,
        metric: Callable[[RunContext], float] | None = None,
    ) -> None:
        if every not in ("epoch", "step"):
            raise ConfigurationError(f"every={every!r}; expected 'epoch' or 'step'")
        watches = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if not watches and not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise ConfigurationError(
                f"scheduler is {described(scheduler)}; expected one of torch.optim.lr_scheduler"
            )
        if metric is not None and not watches:
            raise ConfigurationError(
                f"metric is given, but {type(scheduler).__name__} watches no number"
            )
        self._scheduler = scheduler
        self._every = every
        self._metric = (metric or _last_loss) if watches else None

    def on_step_end(self, context: RunContext) -> None:
        """Step after a step of the optimizer."""
        if self._every == "step" and context.has_updated:
            self._step(context)

    def on_epoch_end(self, context: RunContext) -> None:
        """Step after an epoch, unless it had no batch."""
        if self._every == "epoch" and context.step:
            self._step(context)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state."""
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the scheduler's state."""
        self._scheduler.load_state_dict(state)

    def _step(self, context: RunContext) -> None:
        if self._metric is None:
            self._scheduler.step()
        else:
            self._scheduler.step(self._metric(context))


def _last_loss(context: RunContext) -> float:
    assert context.loss is not None
    return float(context.loss)


class Checkpoint(Callback):
    """Saves the training state while it trains, so that a run can go on after it was ended.

    Also where ``context.stop()`` ends training in the middle of an epoch.
    Runs after all other callbacks, so that what they change is saved as well.

    Args:
        path: Where to: a folder per save, as in ``"runs/lenet/step-{num_steps:06d}"``. Fields in
            its last part: ``{epoch}``, ``{step}`` within the epoch, ``{num_steps}`` in all.
            Without any, each save replaces the one before.
        every_steps: Save after every so many steps, counted in all; None: not after steps.
        every_epochs: Save at the end of every so many epochs; None: not there.
        keep: How many complete saves to keep; older ones are removed. None: all.
        gather: Let worker 0 write everything; see ``Model.save``.
        extra: What else to save, by name; see ``Model.save``.

    Raises:
        ConfigurationError: An argument is not as above.
    """

    runs_last = True

    @called("Checkpoint")
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_epochs: int | None = 1,
        keep: int | None = 3,
        gather: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        for name, every in (("every_steps", every_steps), ("every_epochs", every_epochs)):
            if every is not None and (type(every) is not int or every < 1):
                raise ConfigurationError(f"{name}={every!r}; expected an int of 1 or more, or None")
        need("Checkpoint", "gather", gather, isinstance(gather, bool), "True or False")
        is_named = extra is None or isinstance(extra, Mapping)
        need("Checkpoint", "extra", extra, is_named, "a dictionary, as in {'scheduler': scheduler}")
        self._series = Series(path, keep)
        self._every_steps, self._every_epochs = every_steps, every_epochs
        self._gather, self._extra = gather, extra

    def on_step_end(self, context: RunContext) -> None:
        """Save every ``every_steps`` steps."""
        if self._every_steps and context.model.position.num_steps % self._every_steps == 0:
            self._save(context)

    def on_epoch_end(self, context: RunContext) -> None:
        """Save every ``every_epochs`` epochs."""
        if self._every_epochs and context.epoch % self._every_epochs == 0:
            self._save(context)

    def on_stop(self, context: RunContext) -> None:
        """Save, so that a run that goes on ends the epoch."""
        self._save(context)

    def _save(self, context: RunContext) -> None:
        num_steps = context.model.position.num_steps
        path = self._series.path(epoch=context.epoch, step=context.step, num_steps=num_steps)
        context.model.save(path, gather=self._gather, extra=self._extra)
        self._series.prune()


class ProgressBar(Callback):
    """A progress bar over the steps of each epoch, on worker 0."""

    @called("ProgressBar")
    def __init__(self) -> None:
        self._bar: Any = None

    def on_epoch_begin(self, context: RunContext) -> None:
        """Open the bar."""
        if context.rank == 0:
            from tqdm import tqdm  # only where it shows

            self._bar = tqdm(
                total=context.num_steps,
                initial=context.step,
                unit="step",
                mininterval=0.5,
                desc=f"epoch {context.epoch}/{context.num_epochs}",
            )

    def on_step_end(self, context: RunContext) -> None:
        """Advance the bar; the loss is refreshed with the drawing, not at every step."""
        if self._bar is not None and self._bar.update(1):
            self._bar.set_postfix_str(f"loss {float(context.loss or 0.0):.4f}", refresh=False)

    def on_epoch_end(self, context: RunContext) -> None:
        """Close the bar."""
        if self._bar is not None:
            if context.loss is not None:
                self._bar.set_postfix_str(f"loss {float(context.loss):.4f}", refresh=True)
            self._bar.close()
            self._bar = None

    def on_stop(self, context: RunContext) -> None:
        """Close the bar."""
        self.on_epoch_end(context)

    def on_rollback(self, context: RunContext) -> None:
        """Close the bar."""
        self.on_epoch_end(context)

    def on_failure(self, context: RunContext) -> None:
        """Close the bar."""
        self.on_epoch_end(context)


def print_line(line: str) -> None:
    """Print a line; a progress bar makes room for it."""
    try:
        from tqdm import tqdm
    except ImportError:
        print(line, flush=True)
    else:
        tqdm.write(line)
        sys.stdout.flush()
