"""Hugging Face's ``Trainer`` and ``Seq2SeqTrainer``, over the workers of a job.

Two lines of a script change::

    from graphsplit.integrations.transformers import Trainer
    gs.apply_placement(model, {"transformer.h.{0..5}": 0, "transformer.h.{6..11}": 1})
"""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers

from graphsplit.collectives.calls import broadcast_object
from graphsplit.integrations.accelerate import save_on_main, take_over
from graphsplit.integrations.workers import workers

# What saving changes in the state of a Trainer, on the main process alone.
_CHANGED = ("best_model_checkpoint", "stateful_callbacks", "total_flos")


class Trainer(transformers.Trainer):
    """``transformers.Trainer``, whose ``train()`` runs over the workers.

    Every worker runs it whole, on all batches; worker 0 is the process that logs and writes files.
    Without ``graphsplit run`` it is ``transformers.Trainer``.

    Args:
        args: As for ``transformers.Trainer``.
        kwargs: As for ``transformers.Trainer``.

    Raises:
        ConfigurationError: It would share out batches, or compile the network.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._graphsplit_job = workers()
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """As in ``transformers``; the ``Accelerator`` is that of ``graphsplit.integrations``."""
        super().create_accelerator_and_postprocess()
        take_over(self.accelerator, self._graphsplit_job)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in ``transformers``; called on all workers, it writes one copy of each file."""
        save = partial(super().save_model, output_dir, _internal_call)
        save_on_main(self._graphsplit_job, save, self._networks(), [])

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        job = self._graphsplit_job
        save = partial(super()._save_checkpoint, model, trial)
        save_on_main(job, save, self._networks(), [self.optimizer])
        if job is not None:
            found = broadcast_object([getattr(self.state, name) for name in _CHANGED])
            for name, value in zip(_CHANGED, found, strict=True):
                setattr(self.state, name, value)
            self.current_flos = 0

    def _networks(self) -> list[Any]:
        return [self.model]


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer``, over the workers as ``Trainer`` is.

    Args:
        args: As for ``transformers.Seq2SeqTrainer``.
        kwargs: As for ``transformers.Seq2SeqTrainer``.

    Raises:
        ConfigurationError: It would share out batches, or compile the network.
    """
