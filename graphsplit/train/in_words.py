"""How training goes, in words, for whoever asks meanwhile from another thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from graphsplit.train.callbacks import RunContext

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
