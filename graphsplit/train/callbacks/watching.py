"""Callbacks that watch a number: they end training, or keep what was best."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from graphsplit.checkpoint.disk.series import check_path
from graphsplit.errors import ConfigurationError
from graphsplit.text import called, meant, need
from graphsplit.train.callbacks.base import Callback, RunContext
from graphsplit.train.callbacks.usual import print_line

Watched = str | Callable[[RunContext], float]


class _Best(Callback):
    """The best value of a number so far, looked at after each epoch."""

    def __init__(self, metric: Watched, mode: Literal["min", "max"], least_gain: float) -> None:
        if not isinstance(metric, str) and not callable(metric):
            raise ConfigurationError(
                f"metric={metric!r}; expected the name of a metric, or a function of the context"
            )
        if mode not in ("min", "max"):
            raise ConfigurationError(f"mode={mode!r}; expected 'min' or 'max'")
        if not isinstance(least_gain, int | float) or not least_gain >= 0:
            raise ConfigurationError(f"min_delta={least_gain!r}; expected a number of 0 or more")
        self._metric, self._sign = metric, 1.0 if mode == "max" else -1.0
        self._least_gain = least_gain
        self.best: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """The best value."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the best value; none before the first epoch."""
        self.best = state.get("best")

    def _improves(self, context: RunContext) -> bool:
        value = self._value(context)
        if math.isnan(value):
            return False
        if self.best is None or self._sign * (value - self.best) > self._least_gain:
            self.best = value
            return True
        return False

    def _value(self, context: RunContext) -> float:
        if not isinstance(self._metric, str):
            found: Any = self._metric(context)
            is_number = hasattr(found, "__float__")
            name = type(self).__name__
            need(name, "metric(context)", found, is_number, "a function that returns a number")
            return float(found)
        self.check_watched(context.metrics)
        return context.metrics[self._metric]

    def check_watched(self, names: Iterable[str]) -> None:
        """Raise ``ConfigurationError`` if the metric that it watches is not among these."""
        if isinstance(self._metric, str) and self._metric not in names:
            raise ConfigurationError(
                f"{type(self).__name__} watches {self._metric!r}, but there is "
                f"{', '.join(map(repr, names)) or 'no metric at all'}"
                f"{meant(self._metric, names, {})}\n"
                f"  Fix: name a metric of the Model, and pass train(..., validation=loader)."
            )


def check_watched(callbacks: Sequence[Callback], names: Iterable[str]) -> None:
    """Refuse what watches a metric that there will not be, before the first step.

    A callback of the user's own may put a metric there; then only the end of an epoch can tell.
    """
    if all(type(callback).__module__.startswith("graphsplit.") for callback in callbacks):
        for callback in callbacks:
            if isinstance(callback, _Best):
                callback.check_watched(names)


class EarlyStopping(_Best):
    """Ends training once a number has not improved for some epochs, and says so on worker 0.

    Args:
        metric: The name of a metric of ``train(..., validation=loader)``, or a function of the
            context that gives the number, the same on every worker. NaN is no improvement.
        patience: After how many epochs without improvement, one after the other, training ends;
            0 is as 1. Keras and Lightning count so, too.
        mode: Whether ``"min"`` or ``"max"`` is better.
        min_delta: What counts as an improvement: more than this.

    Raises:
        ConfigurationError: An argument is not as above.
    """

    @called("EarlyStopping")
    def __init__(
        self,
        metric: Watched,
        *,
        patience: int = 0,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(metric, mode, min_delta)
        if type(patience) is not int or patience < 0:
            raise ConfigurationError(f"patience={patience!r}; expected an int of 0 or more")
        self._patience, self._num_bad = patience, 0

    def on_epoch_end(self, context: RunContext) -> None:
        """Look at the number."""
        self._num_bad = 0 if self._improves(context) else self._num_bad + 1
        if self._num_bad >= max(1, self._patience):
            if context.rank == 0:
                name = repr(self._metric) if isinstance(self._metric, str) else "what is watched"
                best = "" if self.best is None else f" (best {self.best:.6g})"
                print_line(
                    f"epoch: {context.epoch}, {name} has not improved for {self._num_bad} "
                    f"epoch{'s' * (self._num_bad > 1)}{best}: training ends"
                )
            context.stop()

    def state_dict(self) -> dict[str, Any]:
        """The best value, and for how many epochs there was no better one."""
        return {**super().state_dict(), "num_bad": self._num_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what ``state_dict`` gave."""
        super().load_state_dict(state)
        self._num_bad = state.get("num_bad", 0)


class KeepBest(_Best):
    """Saves the training state after each epoch that is better than all before.

    It saves when all other callbacks have heard of the epoch's end, so that a run can go on from
    there with the learning rate that follows. A callback that changes what was validated (averaged
    weights) does so in ``on_epoch_begin``, or the save has what it left.

    Args:
        path: The folder for ``Model.save``; the save before is replaced.
        metric: As for ``EarlyStopping``.
        mode: Whether ``"min"`` or ``"max"`` is better.

    Raises:
        ConfigurationError: An argument is not as above.
    """

    runs_last = True

    @called("KeepBest")
    def __init__(
        self,
        path: str | os.PathLike[str],
        metric: Watched,
        *,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        super().__init__(metric, mode, 0.0)
        check_path("path", path)
        self._path = path

    def on_epoch_end(self, context: RunContext) -> None:
        """Save, if it is the best."""
        if self._improves(context):
            context.model.save(self._path)


class TerminateOnNaN(Callback):
    """Ends training after a step whose loss is infinite or NaN, and says so on worker 0."""

    def on_step_end(self, context: RunContext) -> None:
        """Look at the loss."""
        if context.loss is not None and not math.isfinite(float(context.loss)):
            if context.rank == 0:
                print_line(
                    f"epoch: {context.epoch} step: {context.step}, loss is {float(context.loss)}: "
                    f"training ends"
                )
            context.stop()


class Validation(Callback):
    """Evaluates after each epoch, before other callbacks hear of its end.

    Args:
        loader: For ``Model.eval``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def on_epoch_end(self, context: RunContext) -> None:
        """Evaluate."""
        context.metrics = context.model.eval(self._loader)
