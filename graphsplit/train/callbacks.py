"""Callbacks of ``Model.train``.

Where they run: every callback runs on every worker, at the same points, with the same true loss.
What is shown once for all (a progress bar) shows itself on worker 0 alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from graphsplit.train.model import Model


@dataclass
class RunContext:
    """Where training stands.

    Attributes:
        model: The model that is trained.
        rank: This worker; 0 in one process.
        num_epochs: Epochs of this call of ``train``.
        num_steps: Steps of an epoch, or None if the loader has no length.
        epoch: Current epoch, from 1.
        step: Step within the epoch, from 1; 0 before the first.
        loss: Loss of the last step, a scalar tensor; None before the first.
    """

    model: Model
    rank: int
    num_epochs: int
    num_steps: int | None
    epoch: int = 0
    step: int = 0
    loss: torch.Tensor | None = None


class Callback:
    """Base class of callbacks; override what you need."""

    def on_train_begin(self, context: RunContext) -> None:
        """Before the first epoch."""

    def on_epoch_begin(self, context: RunContext) -> None:
        """Before an epoch's first step."""

    def on_step_end(self, context: RunContext) -> None:
        """After every step."""

    def on_epoch_end(self, context: RunContext) -> None:
        """After an epoch's last step."""

    def on_train_end(self, context: RunContext) -> None:
        """After the last epoch; not called after a failure."""

    def on_failure(self, context: RunContext) -> None:
        """After a failure ended training: give back what was taken, raise nothing."""


class LossMonitor(Callback):
    """Prints the loss.

    Args:
        every: Print every so many steps; 0 prints at the end of an epoch only.
    """

    def __init__(self, every: int = 0) -> None:
        self._every = every

    def on_step_end(self, context: RunContext) -> None:
        """Print every ``every`` steps."""
        if self._every and context.step % self._every == 0:
            self._print(context)

    def on_epoch_end(self, context: RunContext) -> None:
        """Print the last loss of the epoch, unless it was just printed."""
        if context.loss is not None and not (self._every and context.step % self._every == 0):
            self._print(context)

    def _print(self, context: RunContext) -> None:
        assert context.loss is not None
        _print(f"epoch: {context.epoch} step: {context.step}, loss is {float(context.loss)}")


class TimeMonitor(Callback):
    """Prints the time of every epoch, and per step, in milliseconds."""

    def on_epoch_begin(self, context: RunContext) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_epoch_end(self, context: RunContext) -> None:
        """Print the times."""
        spent_ms = (time.perf_counter() - self._start) * 1e3
        per_step = spent_ms / context.step if context.step else 0.0
        _print(f"epoch: {context.epoch} time: {spent_ms:.3f} ms, per step time: {per_step:.3f} ms")


class ProgressBar(Callback):
    """A progress bar over the steps of each epoch, on worker 0."""

    def __init__(self) -> None:
        self._bar: Any = None

    def on_epoch_begin(self, context: RunContext) -> None:
        """Open the bar."""
        if context.rank == 0:
            from tqdm import tqdm  # only where it shows

            self._bar = tqdm(
                total=context.num_steps,
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
            self._bar.close()
            self._bar = None

    def on_failure(self, context: RunContext) -> None:
        """Close the bar."""
        self.on_epoch_end(context)


def _print(line: str) -> None:
    try:
        from tqdm import tqdm
    except ImportError:
        print(line, flush=True)
    else:
        tqdm.write(line)
