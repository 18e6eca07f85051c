"""Metrics of ``Model.eval``.

Where they run: ``update`` is called on one worker only, the one that has the network's outputs
(every worker agrees which); it reads the targets there. ``compute`` is called there too, and its
result is sent to all workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from inspect import signature
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from graphsplit.errors import ConfigurationError
from graphsplit.text import called, need, no_attribute

_WHERE_SCORES_ARE = (
    "\n  Fix: return the scores, or a loss and then the scores, or call them 'logits' in a mapping "
    'or an object; or pass a function: {"Accuracy": lambda outputs, target: ...}.'
)


class Metric(ABC):
    """Base class of metrics.

    Attributes:
        needs_loss: Whether ``update`` needs the loss; it is computed only if some metric does.
        losses: The scalars that network or loss returned beside the loss of the batch that
            ``update`` sees, by name; empty unless some metric needs the loss.
    """

    needs_loss = False
    losses: Mapping[str, torch.Tensor] = MappingProxyType({})

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

    @called("gs.metrics.Accuracy")
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
        scores = _scores_of(outputs)
        if (
            not isinstance(scores, torch.Tensor)
            or not isinstance(target, torch.Tensor)
            or (scores.dim() != target.dim() + 1)
        ):
            raise ConfigurationError(
                "Accuracy expects scores [batch, classes, ...] and integer targets [batch, ...]; "
                f"found {_describe(outputs if scores is None else scores)} and {_describe(target)}"
                f"{'' if isinstance(scores, torch.Tensor) else _WHERE_SCORES_ARE}"
            )
        self._correct += int((scores.argmax(dim=1) == target).sum())
        self._total += target.numel()

    def compute(self) -> float:
        """Correct predictions over all; 0.0 before the first batch."""
        return self._correct / self._total if self._total else 0.0


class _Mean(Metric):
    """The mean of a number over the batches, weighted by their numbers of samples."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything seen."""
        self._sum = 0.0
        self._num_samples = 0

    def _add(self, value: Any, num_samples: int) -> None:
        self._sum += float(value) * num_samples
        self._num_samples += num_samples

    def compute(self) -> float:
        """The mean per sample; 0.0 before the first batch."""
        return self._sum / self._num_samples if self._num_samples else 0.0


class Loss(_Mean):
    """Mean of the batches' losses, weighted by their numbers of samples.

    Args:
        part: Instead of the loss, the scalar of this name that is returned beside it.
    """

    needs_loss = True

    @called("gs.metrics.Loss")
    def __init__(self, part: str | None = None) -> None:
        super().__init__()
        is_name = part is None or isinstance(part, str)
        need("gs.metrics.Loss", "part", part, is_name, "the name of what is returned beside it")
        self._part = part

    def update(
        self, *, outputs: Any, target: Any, loss: torch.Tensor | None, num_samples: int
    ) -> None:
        """Add one batch's loss.

        Raises:
            ConfigurationError: No such part of it was returned.
        """
        found = loss if self._part is None else self.losses.get(self._part)
        if found is None:
            raise ConfigurationError(
                f"Loss({self._part!r}): no scalar of this name is returned beside the loss; there "
                f"is {', '.join(self.losses) or 'none at all'}"
            )
        self._add(found, num_samples)


class BatchMean(_Mean):
    """A function's mean over the batches, weighted by their numbers of samples.

    Args:
        name: The metric's name, for errors.
        function: ``function(outputs, target)`` gives a number.
    """

    def __init__(self, name: str, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._name, self._function = name, function

    def update(
        self, *, outputs: Any, target: Any, loss: torch.Tensor | None, num_samples: int
    ) -> None:
        """Call the function for one batch.

        Raises:
            ConfigurationError: It gave no number.
        """
        self._add(_number(self._name, self._function(outputs, target)), num_samples)


class OfObject(Metric):
    """A metric as torchmetrics and torcheval have it.

    Args:
        counted: Has ``reset()``, ``update(outputs, target)`` and ``compute()``.
    """

    def __init__(self, counted: Any) -> None:
        self._counted = counted

    def reset(self) -> None:
        """Forget everything seen."""
        self._counted.reset()

    def update(
        self, *, outputs: Any, target: Any, loss: torch.Tensor | None, num_samples: int
    ) -> None:
        """Show the object one batch."""
        self._counted.update(outputs, target)

    def compute(self) -> Any:
        """One number: what the object makes of all batches."""
        return self._counted.compute()


def can_count(metric: Any) -> bool:
    """Whether something is a metric as other libraries have it."""
    methods = ("reset", "update", "compute")
    return all(callable(getattr(metric, name, None)) for name in methods)


def as_metrics(given: Mapping[str, Any] | None) -> dict[str, Metric]:
    """Metrics by name; a function becomes its mean over the batches."""
    found: dict[str, Metric] = {}
    for name, metric in (given or {}).items():
        if isinstance(metric, Metric) and _takes_all(metric):
            found[name] = metric
        else:
            found[name] = OfObject(metric) if can_count(metric) else BatchMean(name, metric)
    return found


def _takes_all(metric: Metric) -> bool:
    """Whether it is updated by keywords; else as metrics of other libraries are."""
    try:
        signature(metric.update).bind(outputs=None, target=None, loss=None, num_samples=0)
    except TypeError:
        return False
    return True


def computed(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The number that each metric makes of the batches that it has seen.

    Raises:
        ConfigurationError: One gives no number.
    """
    return {name: _number(name, metric.compute()) for name, metric in metrics.items()}


def _number(name: str, found: Any) -> float:
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigurationError(
            f"metric {name!r} gave {_describe(found)}; expected one number\n"
            f"  Fix: reduce it, as in .mean()."
        ) from None


def need_batches(num_batches: int) -> None:
    """Raise ``ConfigurationError`` if a loader gave nothing to evaluate."""
    if not num_batches:
        raise ConfigurationError(
            "eval: the loader gave no batch, so that the metrics have no value\n"
            "  Fix: pass a loader with batches; a generator is used up after the first call."
        )


def _scores_of(outputs: Any) -> Any:
    """The scores among outputs: themselves, ``logits``, or those beside a loss."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs.get("logits")
    if isinstance(outputs, (tuple, list)) and len(outputs) > 1 and not hasattr(outputs, "logits"):
        first = outputs[0]
        is_loss = isinstance(first, torch.Tensor) and first.dim() == 0
        return outputs[1] if is_loss else None
    return getattr(outputs, "logits", None)


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {', '.join(map(repr, value))}"
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def __getattr__(name: str) -> NoReturn:
    public = [
        one for one, found in globals().items() if getattr(found, "__module__", "") == __name__
    ]
    raise no_attribute("module 'graphsplit.metrics'", name, public, {})
