"""The epochs of one call of ``Model.train``: from the first, or from where a loaded state stood."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from graphsplit.checkpoint.generators import named_parts
from graphsplit.checkpoint.position import (
    FROM_THE_START,
    EpochStart,
    LoaderWatch,
    NoRun,
    Resumption,
)
from graphsplit.checkpoint.states import States
from graphsplit.errors import ConfigurationError
from graphsplit.logs import say
from graphsplit.train.callbacks import Callback, RunContext

_NAMES = ("epoch", "_epoch")  # of the attribute in which a part shows its number


class Epochs:
    """Counts epochs and steps in the context that callbacks see; a save in the middle reads them.

    Use as a context: what is saved outside of it belongs to no running ``train``.

    Args:
        states: Saves and loads the Model's state.
        context: What callbacks see; epoch and step are kept here.
        loader: The loader.
        callbacks: The callbacks, in the order in which they are called.
        resume: Whether to go on where a loaded state stood, if one was loaded.

    Raises:
        ConfigurationError: The loaded state stands behind the last epoch that is asked for.
    """

    def __init__(
        self,
        states: States,
        context: RunContext,
        loader: Iterable[Any],
        callbacks: Sequence[Callback],
        *,
        resume: bool,
    ) -> None:
        self._states = states
        self._context = context
        self._loader = loader
        self._loss = states.run.loss  # until this run has one
        self._is_between = True  # behind the context's epoch, before the next
        self._has_told_of_nothing = False
        self.callbacks = callbacks
        self.watch = LoaderWatch(loader)
        self._numbers = EpochNumbers(loader)
        pending = states.resumption
        goes_back = pending is not None and pending.is_rollback
        self._resumption = pending if resume or goes_back else None
        if self._resumption is not None and self._first > context.num_epochs + 1:
            raise ConfigurationError(
                f"the loaded state stands in epoch {self._first}, but train({context.num_epochs}, "
                f"...) ends before it\n  Fix: pass the whole number of epochs, as in the run that "
                f"was saved, or train(..., resume=False) to count from 1 again."
            )
        states.resumption = None
        if self._first > context.num_epochs and context.rank == 0 and not self.has_begun:
            why = "train was asked for 0 epochs"
            if self._resumption is not None:
                why = (
                    f"the loaded run has done all of {context.num_epochs} epoch(s); pass more "
                    f"epochs to go on, or resume=False to count from 1 again"
                )
            say(
                f"nothing is trained: {why}",
                event="nothing_to_train",
                level="warning",
            )

    @property
    def has_begun(self) -> bool:
        """Whether callbacks were told already that training begins: it was rolled back."""
        return self._resumption is not None and self._resumption.is_rollback

    @property
    def _first(self) -> int:
        return 1 if self._resumption is None else self._resumption.position.epoch

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, from 1, and the steps done in it; at the end of an epoch those of the next."""
        context = self._context
        return (context.epoch + 1, 0) if self._is_between else (context.epoch, context.step)

    @property
    def loss(self) -> torch.Tensor | None:
        """Loss of the last step; None before."""
        return self._loss if self._context.loss is None else self._context.loss

    def __enter__(self) -> Epochs:
        context = self._context
        if self._resumption is not None:
            context.epoch, context.step = self._first, self._resumption.position.step
            context.loss = self._loss = self._resumption.loss
            self._is_between = False
        self._states.run = self
        return self

    def __exit__(self, *exception: object) -> None:
        self._states.run = NoRun(self.loss)

    def __iter__(self) -> Iterator[EpochStart]:
        """Each epoch, once callbacks may be told that it begins."""
        start = FROM_THE_START
        if self._resumption is not None:
            start = self._go_on(self._resumption)
        for epoch in range(self._first, self._context.num_epochs + 1):
            self._context.epoch, self._context.step = epoch, start.step
            self._is_between = False
            if start.step == 0:
                self._numbers.tell(self._states.num_epochs)
            yield start
            start = FROM_THE_START

    def _go_on(self, resumption: Resumption) -> EpochStart:
        self._put_back(resumption)
        load = put_callbacks_back if resumption.is_rollback else load_callbacks
        load(self.callbacks, resumption.callbacks)
        self._states.check_callbacks(resumption)
        start = resumption.start
        if start.step == 0 and start.now is not None:
            # Between two epochs: what callbacks draw now belongs to the epoch that begins.
            start = start.put_between_epochs(self._loader)
        self._numbers.go_on(self._states.num_epochs, resumption.start)
        return start

    def _put_back(self, resumption: Resumption) -> None:
        if resumption.put_back is not None:
            resumption.put_back()
            self._states.run, self._states.resumption = self, None

    def begin(self, start: EpochStart) -> None:
        """The loader will be asked for a batch next."""
        resumption = self._resumption
        if start.step and resumption is not None and resumption.put_back is not None:
            self._put_back(resumption)  # callbacks did then what they were told just now
            load_callbacks(self.callbacks, resumption.callbacks)
        self.watch.begin_epoch(self._loader, start)
        self._numbers.begins(self._states.num_epochs, self.watch.remembered or {})

    def count(self, loss: torch.Tensor) -> None:
        """A step is done."""
        self._context.step += 1
        self._context.loss = loss

    def end(self) -> None:
        """The loader has no more batches; what is saved from now on stands before the next."""
        self.watch.end_epoch()
        self._numbers.end()
        self._states.num_epochs += 1
        self._is_between = True
        if not self._context.step and not self._context.rank and not self._has_told_of_nothing:
            self._has_told_of_nothing = True
            say(
                f"epoch {self._context.epoch} trained nothing: the loader gave no batch; pass a "
                f"loader with batches (a generator is used up after one epoch)",
                event="no_batch",
                level="warning",
            )


def put_callbacks_back(callbacks: Sequence[Callback], saved: Sequence[Any]) -> None:
    """Give callbacks the states of an earlier moment; to those that had none then, an empty one."""
    for callback in load_callbacks(callbacks, saved):
        if callback.state_dict():  # what it has learned since is of a past undone
            callback.load_state_dict({})


def load_callbacks(callbacks: Sequence[Callback], saved: Sequence[Any]) -> list[Callback]:
    """Give every saved state to the next callback of its class; returns those without one.

    Each is a copy: what the callback makes of it is not what a rollback gives once more.
    """
    left = list(callbacks)
    for name, state in saved:
        found = next((c for c in left if type(c).__qualname__ == name), None)
        if found is None:
            raise ConfigurationError(
                f"the loaded state has that of a {name}, but train was given no such callback "
                f"({', '.join(type(c).__qualname__ for c in callbacks) or 'none at all'})\n"
                f"  Fix: pass the callbacks of the run that was saved, or train(..., "
                f"resume=False)."
            )
        left.remove(found)
        found.load_state_dict(copy.deepcopy(state))
    return left


class EpochNumbers:
    """Tells a loader's parts the numbers of epochs: samplers, batch samplers and data sets.

    A plain loop writes ``sampler.set_epoch(epoch)`` in front of each epoch, and forgets it: then
    all epochs have one order. ``Model.train`` does it, on all workers. Epochs count from 0 through
    all calls of ``train``. A number that the script or a callback has set itself stands, and later
    epochs count on from it; that shows in the attribute ``epoch``, which all that torch has keep.

    Args:
        loader: The loader of a call of ``train``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._offsets: dict[str, int] = {}  # of a part's numbers against ours
        self._left: dict[str, int | None] = {}  # what an epoch has left

    def tell(self, num_epochs: int) -> None:
        """An epoch begins; so many were run before, by all calls of ``train``."""
        for path, part in self._told():
            shown, number = _shown(part), num_epochs + self._offsets.get(path, 0)
            usual = (0, num_epochs - 1) if path not in self._left else (self._left[path],)
            if shown is not None and shown not in usual:
                number = shown  # set since by somebody else
            part.set_epoch(number)

    def go_on(self, num_epochs: int, start: EpochStart) -> None:
        """Training goes on where a loaded state stood, between two epochs or in one.

        A part that shows a number got its own back with the loader's state; any other is told it.
        """
        last = num_epochs if start.step else num_epochs - 1
        _, remembered = (start.loader or {}).get("remembered") or ({}, {})
        for path, part in self._told():
            number = _remembered(remembered, path)
            if number is not None:
                self._offsets[path] = number - last
            if start.step and _shown(part) is None:
                part.set_epoch(last + self._offsets.get(path, 0))
            self._left[path] = _shown(part)

    def begins(self, num_epochs: int, remembered: Mapping[str, Any]) -> None:
        """The loader is read next, or goes on.

        Args:
            num_epochs: How many epochs were run before.
            remembered: What decided the loader's batches when the epoch began.
        """
        for path, _ in self._told():
            number = _remembered(remembered, path)
            if number is not None:
                self._offsets[path] = number - num_epochs

    def end(self) -> None:
        """The epoch is over."""
        self._left = {path: _shown(part) for path, part in self._told()}

    def _told(self) -> Iterator[tuple[str, Any]]:
        parts = [("loader", self._loader), *named_parts(self._loader)]
        return ((path, one) for path, one in parts if callable(getattr(one, "set_epoch", None)))


def _remembered(states: Mapping[str, Any], path: str) -> int | None:
    """The number that a part showed."""
    found = (states.get(f"{path}:{name}") for name in _NAMES)
    return next((one for one in found if type(one) is int), None)


def _shown(part: Any) -> int | None:
    """The number that a part shows; None if it shows none."""
    found = (getattr(part, name, None) for name in _NAMES)
    return next((one for one in found if type(one) is int), None)
