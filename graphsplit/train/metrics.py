"""Metrics of ``Model.eval``.

Where they run: ``update`` is called on one worker only, the one that has the network's outputs
(every worker agrees which); it reads the targets there. ``compute`` is called there too, and its
result is sent to all workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from graphsplit.errors import ConfigurationError


class Metric(ABC):
    """Base class of metrics.

    Attributes:
        needs_loss: Whether ``update`` needs the loss; it is computed only if some metric does.
    """

    needs_loss = False

    @abstractmethod
    def reset(self) -> None:
        """Forget everything seen."""

    @abstractmethod
    def update(
        self, *, outputs: Any, target: Any, loss: torch.Tensor | None, num_samples: int
    ) -> None:
        """See one batch.

        Args:
            outputs: What the network returned, in its own structure.
            target: The target of the batch; None when the batch has none.
            loss: The batch's scalar loss, if ``needs_loss``.
            num_samples: Number of samples in the batch.
        """

    @abstractmethod
    def compute(self) -> float:
        """The metric over all batches seen since ``reset``."""


class Accuracy(Metric):
    """Share of samples whose largest score is at the target class.

    Scores have shape ``[batch, classes, ...]``, integer targets ``[batch, ...]``.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything seen."""
        self._correct = 0
        self._total = 0

    def update(
        self, *, outputs: Any, target: Any, loss: torch.Tensor | None, num_samples: int
    ) -> None:
        """Count correct predictions.

        Raises:
            ConfigurationError: Outputs or targets are no tensors of fitting shapes.
        """
        scores = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "logits", None)
        if (
            not isinstance(scores, torch.Tensor)
            or not isinstance(target, torch.Tensor)
            or (scores.dim() != target.dim() + 1)
        ):
            raise ConfigurationError(
                "Accuracy expects scores [batch, classes, ...] and integer targets [batch, ...]; "
                f"found {_describe(scores)} and {_describe(target)}"
            )
        self._correct += int((scores.argmax(dim=1) == target).sum())
        self._total += target.numel()

    def compute(self) -> float:
        """Correct predictions over all; 0.0 before the first batch."""
        return self._correct / self._total if self._total else 0.0


class Loss(Metric):
    """Mean of the batches' losses, weighted by their numbers of samples."""

    needs_loss = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything seen."""
        self._sum = 0.0
        self._num_samples = 0

    def update(
        self, *, outputs: Any, target: Any, loss: torch.Tensor | None, num_samples: int
    ) -> None:
        """Add one batch's loss."""
        assert loss is not None
        self._sum += float(loss) * num_samples
        self._num_samples += num_samples

    def compute(self) -> float:
        """Mean loss per sample; 0.0 before the first batch."""
        return self._sum / self._num_samples if self._num_samples else 0.0


def _describe(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
