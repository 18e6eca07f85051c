"""How ``context.stop()`` of one worker ends training on all of them, after the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType

from graphsplit.errors import ConfigurationError
from graphsplit.job.group import WorkerGroup
from graphsplit.train.callbacks.base import Callback

_INSIDE_EPOCH = ("on_train_begin", "on_epoch_begin", "on_gradients", "on_step_end")


class Stopping:
    """Whether training ends early; agreed on by all workers.

    Workers tell each other at the end of each step, if some callback of any of them may stop there,
    and at the end of each epoch, if some callback may stop there. Without one nobody asks.

    Args:
        callbacks: The callbacks of this worker.
        group: Gives all workers.
    """

    def __init__(self, callbacks: Sequence[Callback], group: Callable[[], WorkerGroup]) -> None:
        self._group = group
        self._may_stop = [callback for callback in callbacks if may_stop(callback)]
        self._is_asked = False
        self._ends_step = any(_is_called_inside(callback) for callback in self._may_stop)
        self._ends_epoch = bool(self._may_stop)
        self.is_stopped = False

    def begin(self) -> None:
        """Collective: learn whether any worker may stop."""
        group = self._group()
        told = group.gather(f"{self._ends_step:d}{self._ends_epoch:d}")
        any_of = group.share("".join(map(max, zip(*told, strict=True))))
        self._ends_step, self._ends_epoch = (one == "1" for one in any_of)

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
        if self._ends_step:
            self.is_stopped = self._any(self._is_asked)

    def after_epoch(self) -> bool:
        """Collective, if it has to be: whether the epoch, which was not stopped, was the last."""
        return self._ends_epoch and self._any(self._is_asked)

    def _any(self, mine: bool) -> bool:
        group = self._group()
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
