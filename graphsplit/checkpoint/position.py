"""How far training has come, and how it goes on from there in the middle of an epoch.

What a resumed epoch does, so that it goes on as if nothing had been in between::

    generator := as it was when the epoch began
    iterate over the loader anew, and drop as many batches as were trained on
    generator := as it was when the state was saved

A loader with ``state_dict`` and ``load_state_dict`` is put into its saved state instead, and drops
nothing. Only workers that read the loader do any of this; all others only set the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import torch

from graphsplit.checkpoint.generators import put_remembered, remembered_by
from graphsplit.encoding import records
from graphsplit.encoding.fields import MessageError, integer
from graphsplit.encoding.values import Fixed
from graphsplit.errors import CheckpointError, ConfigurationError

Count = Annotated[int, integer(0, 1 << 62)]
_GENERATORS = (
    "generator",
    "sampler.generator",
    "batch_sampler.generator",
    "batch_sampler.sampler.generator",
)


@dataclass
class Position:
    """How far training has come.

    Attributes:
        num_steps: Training steps so far, of all calls of ``train`` and ``train_step``, those before
            a state was loaded included.
        num_epochs: Complete epochs so far, counted likewise.
        epoch: Epoch that the running ``train`` is in, from 1, as callbacks see it; 0 outside of
            ``train``. At the end of an epoch it is the next one.
        step: Steps done in that epoch.
    """

    num_steps: Count = 0
    num_epochs: Count = 0
    epoch: Count = 0
    step: Count = 0

    @classmethod
    def read(cls, node: Any) -> Position:
        """Read what ``vars`` gave, from a save.

        Raises:
            CheckpointError: It is something else.
        """
        try:
            return records.from_node(cls, node, what="the place where the save stands")
        except MessageError as error:
            raise CheckpointError(str(error)) from None


@dataclass(frozen=True)
class EpochStart:
    """How the iteration over a loader begins.

    Attributes:
        step: Batches that were trained on before the state was saved; 0 for a new epoch.
        generator: State of the default generator when the epoch began; None: as it is.
        now: State of the default generator to go on with; None: as it is.
        loader: What ``LoaderWatch.state`` gave; None for a loader that starts anew.
    """

    step: int = 0
    generator: torch.Tensor | None = None
    now: torch.Tensor | None = None
    loader: Mapping[str, Any] | None = None

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a loader from where this says, and bring the generator there as well.

        Raises:
            ConfigurationError: as ``open``.
        """
        if self.generator is not None:
            torch.default_generator.set_state(self.generator)
        iterator = self.open(loader)
        self._set_default_generator()
        return iterator

    def open(
        self, loader: Iterable[Any], read: Callable[[Any], Iterator[Any]] = iter
    ) -> Iterator[Any]:
        """Iterate over a loader from where this says.

        The default generator is left wherever that brings it; ``go_on`` sets it.

        Args:
            loader: The loader.
            read: Begins to iterate over a loader that keeps no state of its own.

        Raises:
            ConfigurationError: The loader ends before that, or cannot take its saved state.
        """
        saved = self.loader or {}
        own = saved.get("own")
        states: Mapping[str, Any] = saved.get("generators", {})
        generators = generators_of(loader)
        self._check(loader, own, generators)
        before, after = saved.get("remembered") or ({}, {})
        if own is not None:
            put_remembered(loader, after)
            return self._open_stateful(loader, own, generators, states)
        for path, (start, now) in states.items():
            generators[path].set_state(start if self.step else now)
        put_remembered(loader, before if self.step else after)
        iterator = read(loader)
        for index in range(self.step):
            try:
                next(iterator)
            except StopIteration:
                raise ConfigurationError(
                    f"the saved state has trained on {self.step} batches of the epoch, but the "
                    f"loader has only {index}\n  Fix: pass the loader that was saved, or "
                    f"train(..., resume=False)."
                ) from None
        if self.step:
            set_now(generators, states)
            put_remembered(loader, after)
        return iterator

    def _open_stateful(
        self,
        loader: Any,
        own: Any,
        generators: Mapping[str, torch.Generator],
        states: Mapping[str, Any],
    ) -> Iterator[Any]:
        """Let a loader with a state of its own take it.

        A StatefulDataLoader takes it in ``iter``, draws from its generators there, and puts some of
        them back to where the saved epoch began: those are set afterwards.
        """
        loader.load_state_dict(own)
        if self.step or not generators:
            iterator: Iterator[Any] = iter(loader)
            set_now(generators, states)
            return iterator
        before = torch.default_generator.get_state()
        iter(loader)  # ends the saved epoch; the next one starts from the generators
        torch.default_generator.set_state(before)
        set_now(generators, states)
        iterator = iter(loader)
        return iterator

    def put_between_epochs(self, loader: Iterable[Any]) -> EpochStart:
        """Bring generators and loader at once to where they stood, between two epochs.

        Returns:
            How the epoch starts now: what is changed before it, by a callback or by telling the
            loader the epoch's number, belongs to it.

        Raises:
            ConfigurationError: as ``open``.
        """
        own = (self.loader or {}).get("own")
        self._check(loader, own, generators_of(loader))
        self.go_on(loader)
        if own is None:
            return FROM_THE_START
        return EpochStart(loader={**(self.loader or {}), "remembered": None})

    def go_on(self, loader: Iterable[Any]) -> None:
        """Set the generators to the states that training goes on with.

        Those of the loader too: a worker that has no batch left to read in this epoch does not
        open it before the next one.
        """
        self._set_default_generator()
        saved = self.loader or {}
        set_now(generators_of(loader), saved.get("generators", {}))
        put_remembered(loader, (saved.get("remembered") or ({}, {}))[1])

    def _set_default_generator(self) -> None:
        if self.now is not None:
            torch.default_generator.set_state(self.now)

    def _check(self, loader: Any, own: Any, generators: Mapping[str, torch.Generator]) -> None:
        expected = set((self.loader or {}).get("generators", {}))
        if own is not None and not hasattr(loader, "load_state_dict"):
            problem = "its state was saved, but it has no load_state_dict"
        elif own is None and self.loader is not None and expected != set(generators):
            problem = f"it has generators {sorted(generators)}; {sorted(expected)} were saved"
        else:
            return
        raise ConfigurationError(
            f"the loader cannot go on where it was saved: {problem}\n  Fix: pass the loader that "
            f"was saved, or train(..., resume=False)."
        )


FROM_THE_START = EpochStart()


@dataclass
class LoaderWatch:
    """Remembers what is needed to resume the epoch that runs now.

    Attributes:
        loader: The loader of the running ``train``; None outside.
        epoch_generator: State of the default generator when the epoch began.
        generator_starts: States of the loader's own generators when the epoch began.
        remembered: What else decided the loader's batches when the epoch began.
    """

    loader: Any = None
    epoch_generator: torch.Tensor | None = None
    generator_starts: dict[str, torch.Tensor] = field(default_factory=dict)
    remembered: dict[str, Any] | None = None

    def begin_epoch(self, loader: Any, start: EpochStart) -> None:
        """An epoch begins, or goes on from where it was saved."""
        self.loader = loader
        self.epoch_generator = start.generator
        if start.generator is None:
            self.epoch_generator = torch.default_generator.get_state()
        resumed = (start.loader or {}).get("generators", {})
        which = 0 if start.step else 1
        self.generator_starts = {
            path: resumed[path][which] if path in resumed else generator.get_state()
            for path, generator in generators_of(loader).items()
        }
        saved = (start.loader or {}).get("remembered")
        self.remembered = remembered_by(loader) if saved is None else saved[which]

    def end_epoch(self) -> None:
        """The epoch is over; another one starts from the states of that moment."""
        self.epoch_generator = None
        self.generator_starts = {}
        self.remembered = None

    def state(self, process: Fixed | None = None) -> dict[str, Any] | None:
        """The loader's part of a save: its own state if it has one, else its generators'.

        Args:
            process: What ``process_generators`` gave just now, if the caller knows.
        """
        loader = self.loader
        if loader is None:
            return None
        has_own = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        own = loader.state_dict() if has_own else None
        found = {}
        for path, generator in generators_of(loader).items():
            state = generator.get_state()
            found[path] = [self.generator_starts.get(path, state), state]
        now = remembered_by(loader, process)
        began = now if self.remembered is None else self.remembered
        return {"own": own, "generators": found, "remembered": [began, now]}


def set_now(generators: Mapping[str, torch.Generator], states: Mapping[str, Any]) -> None:
    """Let generators go on from their saved states, those that are there."""
    for path, (_, now) in states.items():
        if path in generators:
            generators[path].set_state(now)


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """The generators that a loader was given, each by the first way to it."""
    found: dict[str, torch.Generator] = {}
    for path in _GENERATORS:
        value = loader
        for name in path.split("."):
            value = getattr(value, name, None)
        if isinstance(value, torch.Generator) and all(value is not g for g in found.values()):
            found[path] = value
    return found


class TrainingRun(Protocol):
    """A ``train`` that runs: how far it is, and what a save in its middle needs."""

    @property
    def position(self) -> tuple[int, int]:
        """Its epoch, from 1, and the steps done in it; at the end of an epoch those of the next."""

    @property
    def loss(self) -> torch.Tensor | None:
        """Loss of the last step; None before."""

    @property
    def callbacks(self) -> Sequence[Any]:
        """Its callbacks."""

    @property
    def watch(self) -> LoaderWatch:
        """Remembers what is needed to resume the epoch that runs now."""


@dataclass(frozen=True)
class NoRun:
    """As a ``TrainingRun``: no ``train`` runs; the loss is that of the last step so far."""

    loss: torch.Tensor | None = None
    position: tuple[int, int] = (0, 0)
    callbacks: Sequence[Any] = ()
    watch: LoaderWatch = field(default_factory=LoaderWatch)


def generator_state(value: Any, name: str) -> torch.Tensor | None:
    """A generator's state as a save holds it; None if it holds none.

    Raises:
        CheckpointError: It is something else.
    """
    if value is None:
        return None
    size = torch.default_generator.get_state().numel()
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.numel() != size:
        raise CheckpointError(f"the save's {name} is no state of a generator")
    return value


@dataclass
class Resumption:
    """The first things that the next ``train`` does after a state was loaded.

    Attributes:
        position: Where it goes on.
        start: How its first epoch begins.
        loss: Loss of the last step; None before.
        callbacks: Class and state of every callback that has one.
        owners: Who owned which parameter then, in short; None if that is not known.
        is_rollback: Whether this process has been beyond it before: callbacks know already that
            training has begun.
        put_back: Puts back once more what a lost worker's job went back to: callbacks that are told
            again of what has begun already may change it. None where the script has loaded a state.
    """

    position: Position
    start: EpochStart
    loss: torch.Tensor | None = None
    callbacks: list[Any] = field(default_factory=list)
    owners: str | None = None
    is_rollback: bool = False
    put_back: Callable[[], None] | None = None

    def to_values(self) -> dict[str, Any]:
        """The values from which it can be made again."""
        start = {k: v for k, v in vars(self.start).items() if k != "step"}
        return {
            "position": vars(self.position),
            "start": start,
            "loss": self.loss,
            "callbacks": self.callbacks,
            "owners": self.owners,
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Resumption:
        """Make it again.

        Raises:
            CheckpointError: The values are not what ``to_values`` gives.
        """
        position = Position.read(values.get("position"))
        start = values["start"]
        return cls(
            position,
            EpochStart(
                step=position.step,
                generator=generator_state(start.get("generator"), "epoch_generator"),
                now=generator_state(start.get("now"), "generator"),
                loader=start.get("loader"),
            ),
            values.get("loss"),
            list(values.get("callbacks") or []),
            values.get("owners"),
        )
