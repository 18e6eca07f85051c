"""The loss and the optimizer that a Model was given since the last step."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

from graphsplit.guards.check import Failure, named_failure
from graphsplit.guards.values import shown
from graphsplit.planning.task import Task

LOSS, OPTIMIZER, AGAIN = "model.loss_fn", "model.optimizer", "model.loss_fn and model.optimizer"


class _Text(str):
    """A text that is shown without quotation marks."""

    def __repr__(self) -> str:
        return str(self)


class Swaps:
    """The loss and the optimizer that a Model was given since the last step.

    With another one, no plan holds. Channels stay open until the next step, before which workers
    compare: one that alone has another must not close what others use.

    Args:
        task: Its task.

    Attributes:
        plans: The plans that nothing runs any more; empty if there is nothing to compare.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self.plans: list[int] = []
        self._then = self._now()

    def note(self, plans: Iterable[int]) -> None:
        """Note that the task has another loss or optimizer, for which no open plan holds."""
        self.plans += plans
        if not self.plans:
            self._then = self._now()

    def changed(self) -> list[Failure]:
        """The swaps that other workers must have made too; none if there were no plans."""
        if not self.plans:
            return []
        now, then = self._now(), self._then
        found = [
            _failure(label, then[label], now[label])
            for label in now
            if not _is_same(now[label], then[label])
        ]
        return found or [named_failure(AGAIN, _Text("as before"), _Text("assigned again"))]

    def given(self, label: str) -> str | None:
        """The present loss or optimizers in words, for their label; None for others."""
        now = self._now()
        return _text(now[label]) if label in now else None

    def settle(self) -> list[int]:
        """All workers have been given the same: the plans to close."""
        plans, self.plans = self.plans, []
        self._then = self._now()
        return plans

    def _now(self) -> dict[str, Any]:
        return {LOSS: self._task.loss_fn, OPTIMIZER: self._task.optimizers}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(is_, one, other))
    return one is other


def _failure(label: str, old: Any, new: Any) -> Failure:
    was, is_now = _text(old), _text(new)
    return named_failure(label, was, is_now if is_now != was else _Text(f"{is_now}, a new one"))


def _text(given: Any) -> _Text:
    if not isinstance(given, tuple):
        return _Text(shown(given))
    rates = [(type(o).__name__, o.param_groups[0].get("lr")) for o in given]
    return _Text(", ".join(f"{name}(lr={shown(rate)})" for name, rate in rates) or "None")
