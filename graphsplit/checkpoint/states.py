"""Saving and loading as a Model calls it; also the place to add more to its state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from graphsplit.checkpoint import by_worker
from graphsplit.checkpoint.by_worker import CALLBACKS, RESUMPTION, states_of
from graphsplit.checkpoint.contents import (
    KEPT,
    CheckpointContents,
    NetworkState,
    Ownership,
    optimizers_of,
    orders_of_sums,
    other_parts,
    say_other_order,
)
from graphsplit.checkpoint.disk.source import Source, TensorRequest
from graphsplit.checkpoint.forms import forms_put, kept_forms
from graphsplit.checkpoint.holder import StateHolder
from graphsplit.checkpoint.other_loaders import OtherLoaders
from graphsplit.checkpoint.own_state_code import own_saving, refuse_own_code
from graphsplit.checkpoint.position import (
    EpochStart,
    NoRun,
    Position,
    Resumption,
    TrainingRun,
    generator_state,
)
from graphsplit.checkpoint.restore import (
    NetworkLoader,
    OptimizerLoader,
    check_present,
    optimizer_loaders,
    shown,
)
from graphsplit.checkpoint.save import save_file, save_folder
from graphsplit.deferred.construction import is_deferred
from graphsplit.encoding.values import Fixed, decode, tensor_names
from graphsplit.errors import CheckpointError, StateError
from graphsplit.planning.plain_attributes import PlainState, together
from graphsplit.planning.task import Task, named_state, stateful_modules
from graphsplit.torch_ext.attributes import STATE_VERSIONS, scaler_findings

PathLike = str | os.PathLike[str]
WHOLE = "whole "  # and a rank: the section of attributes that code kept whole there can reach


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state of its own: a scheduler, a scaler, a sampler, a module."""

    def state_dict(self) -> Any:
        """Its state: tensors, plain Python values, and lists, tuples, sets or mappings of them."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state."""


@dataclass(frozen=True)
class Loaded:
    """The findings of ``Model.load``.

    Attributes:
        position: How far training had come.
        extra: The entries of ``extra`` as they were saved, those of objects by ``state_dict``.
    """

    position: Position
    extra: Mapping[str, Any]


class States:
    """Saves and loads the state of one Model.

    Args:
        task: What is trained.
        holder: Where its state is.

    Attributes:
        more: Further objects whose state belongs to the training state, by name. Each is saved by
            worker 0 and loaded on all; one that is missing in a save is an error.
        num_epochs: Complete epochs so far.
        run: The ``train`` that runs, which counts its epochs and steps.
        others: Remembers the loaders that ``eval`` was given.
        python: Plain attributes, and which parameters are trained.
        resumption: Set by ``load``, for the next ``train``.
    """

    def __init__(self, task: Task, holder: StateHolder) -> None:
        self._task = task
        self._holder = holder
        self.more: dict[str, Stateful] = {}
        if task.scaler is not None:
            self.more["scaler"] = task.scaler
        self.num_epochs = 0
        self.run: TrainingRun = NoRun()
        self.others = OtherLoaders()
        self.python = PlainState(task)
        self.resumption: Resumption | None = None
        self._unchecked: str | None = None  # owners when callbacks' states were saved

    @property
    def position(self) -> Position:
        """How far training has come."""
        steps = self._holder.progress.num_steps
        return Position(steps, self.num_epochs, *self.run.position)

    def begin(self) -> None:
        """The first call of the Model: what changes from now on belongs to the run."""
        self.python.begin()

    # One file.

    def save_weights(self, path: PathLike) -> None:
        """Stream the network's state dictionary into one file. Collective.

        A network with code of its own for this makes all of the dictionary on every worker.
        """
        self._holder.settle_now()
        group, ownership = self._holder.group(), self._ownership()
        has_own_code = own_saving(self._task.network, with_extra=False)
        whole: Any = self._holder.state_dict() if has_own_code else None

        def make() -> CheckpointContents:
            contents = CheckpointContents()
            if whole is None:
                contents.add_network(NetworkState.of(self._task), ownership, group.rank)
            elif group.rank == 0:
                contents.add_whole(whole, getattr(whole, STATE_VERSIONS, None))
            return contents

        save_file(Path(path), make, group, holds="weights")

    def save_optimizers(self, path: PathLike) -> None:
        """Stream the optimizers' state into one file. Collective."""
        refuse_own_code(self._task.optimizers)
        self._holder.settle_now()
        group, ownership = self._holder.group(), self._ownership()

        def make() -> CheckpointContents:
            contents = CheckpointContents()
            for name, optimizer in optimizers_of(self._task).items():
                contents.add_optimizer(name, optimizer, ownership, group.rank)
            return contents

        save_file(Path(path), make, group, holds="tensors")

    def load_weights(self, path: PathLike, **options: Any) -> Any:
        """Load a file of weights, ours or another's; returns what ``load_state_dict`` does.

        Collective.

        Args:
            path: The file.
            options: Those of ``load_state_dict``, as ``strict``.
        """
        source = Source.open_file(Path(path), self._holder.group(), holds="weights")
        network = NetworkLoader(self._task, source, self._holder, options, with_others=False)
        self._agree_none(network.problems, path, "the network")
        source.verify(self._requests(network, []))
        self._load_network(network)
        return network.told

    def load_optimizers(self, path: PathLike) -> None:
        """Load a file that ``save_optimizers`` made. Collective."""
        source = Source.open_file(Path(path), self._holder.group(), holds="training")
        problems: list[str] = []
        loaders = optimizer_loaders(self._task, source, self._ownership(), problems=problems)
        self._agree_none(problems, path, "the optimizer")
        source.verify(self._requests(None, loaders))
        self._load_optimizers(loaders)

    # A folder.

    def save(
        self,
        folder: PathLike,
        *,
        gather: bool,
        extra: Mapping[str, Any],
    ) -> None:
        """Save the whole training state. Collective.

        Args:
            folder: Where to.
            gather: Whether worker 0 writes all of it.
            extra: What else to save, by name: objects with ``state_dict``, or plain values.

        Raises:
            CheckpointError: Some worker could not save its part; the same on all workers.
            StateError: An optimizer's own code expects to see all of its state.
        """
        refuse_own_code(self._task.optimizers)
        self._holder.settle_now()
        group, ownership = self._holder.group(), self._ownership()

        def make() -> CheckpointContents:
            contents, state = CheckpointContents(), NetworkState.of(self._task)
            contents.add_network(state, ownership, group.rank)
            contents.add_others(state, ownership, group.rank)
            if self._task.optimizers:
                between = self._holder.progress.keeps_gradients
                contents.add_gradients(self._task, ownership, group.rank, between_updates=between)
            for name, optimizer in optimizers_of(self._task).items():
                contents.add_optimizer(name, optimizer, ownership, group.rank)
            if group.rank == self._holder.loader_rank:
                contents.add_section("loader", self._loader_section())
            if group.rank == 0:
                for section, value in self._sections(extra, ownership).items():
                    contents.add_section(section, value)
                contents.add_section("python", self.python.saved())
                contents.add_section("forms", kept_forms(self._task))
            mine = by_worker.name_of(CALLBACKS, group.rank)
            contents.add_section(mine, states_of(self.run.callbacks))
            own = self.python.saved(self._holder.reached_here())
            contents.add_section(f"{WHOLE}{group.rank}", own)
            if self._task.num_kept:
                contents.add_section(*self._kept())
            return contents

        save_folder(Path(folder), make, group, gather=gather)

    def _kept(self) -> tuple[str, dict[str, Any]]:
        """The section of the parts of gradients that this worker keeps until the step ends."""
        found = self._holder.sums.kept(self._ownership().name)
        return f"{KEPT}{self._holder.group().rank}", {"of": self._task.num_kept, **found}

    def _put_kept(self, sections: Iterable[Mapping[str, Any]], *, is_own: bool) -> None:
        named = named_state(self._task.network, self._task.loss_fn)
        self._holder.sums.put_back(list(sections), named, is_own=is_own)

    def _loader_section(self, process: Fixed | None = None) -> dict[str, Any]:
        return {
            "state": self.run.watch.state(process),
            "epoch_generator": self.run.watch.epoch_generator,
            "others": self.others.state(),
        }

    def _sections(self, extra: Mapping[str, Any], ownership: Ownership) -> dict[str, Any]:
        return {
            "owners": self._unchecked or ownership.digest,
            "position": vars(self.position),
            "seed": self._holder.progress.seed,
            "adds_up": self._holder.progress.adds_up,
            **orders_of_sums(self._task),
            "generator": torch.default_generator.get_state(),
            "loss": self.run.loss,
            "more": {name: value.state_dict() for name, value in self.more.items()},
            "extra": {
                name: value.state_dict() if isinstance(value, Stateful) else value
                for name, value in extra.items()
            },
        }

    def load(self, folder: PathLike, *, extra: Mapping[str, Any]) -> Loaded:
        """Load a whole training state. Collective.

        Args:
            folder: Where from.
            extra: Objects with ``load_state_dict``, by the names they were saved under.

        Raises:
            CheckpointError: There is no complete save there, or it is damaged.
            StateError: It does not fit; nothing was loaded.
        """
        values = self.load_all(folder, extra=extra)
        if isinstance(values.get("python"), dict):  # not in those of earlier versions
            apart = (one for name, one in values.items() if name.startswith(WHOLE))
            self._holder.note_put(self.python.put(together(values["python"], apart)))
        return Loaded(Position.read(values["position"]), values.get("extra") or {})

    def load_all(self, folder: PathLike, *, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        """As ``load``, but for plain attributes; returns all sections for this worker."""
        source = Source.open_folder(Path(folder), self._holder.group())
        return self.load_from(source, folder, extra=extra)

    def load_from(
        self, source: Source, folder: PathLike, *, extra: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """As ``load_all``, from what was opened."""
        group = self._holder.group()
        with forms_put(self._task, source.values.get("forms", []), self._holder):
            network = NetworkLoader(self._task, source, self._holder, with_others=True)
            problems = list(network.problems)
            optimizers = optimizer_loaders(self._task, source, self._ownership(), problems=problems)
            for kind, own in (("extra", extra), ("more", self.more)):
                saved = source.values.get(kind)
                saved = saved if isinstance(saved, dict) else {}
                problems += [f"missing: {kind} entry {name!r}" for name in own if name not in saved]
            problems += other_parts(self._task, source.values)
            self._agree_none(problems, folder, "this Model")
            sections = self._shared_requests(source)
            source.verify([*self._requests(network, optimizers), *sections])
            values = self._read_sections(source, sections)
            found = _Training.read(values)
            say_other_order(self._task, values, group.rank)
            self._load_network(network)
            self._load_optimizers(optimizers)
            saved = values.get("extra") or {}
            for name, value in extra.items():
                if isinstance(value, Stateful):
                    value.load_state_dict(saved[name])
            for name, value in self.more.items():
                value.load_state_dict(values["more"][name])
            self._take_over(found, values)
            self._holder.progress.checksums.clear()  # other batches may follow
            self._put_kept([v for n, v in values.items() if n.startswith(KEPT)], is_own=False)
            return values

    def _shared_requests(self, source: Source) -> list[TensorRequest]:
        """The values that every worker needs beside the network and the optimizers."""
        num_workers = self._holder.group().num_workers
        found = [
            TensorRequest(name, "training", by_worker.takers(section, source.values, num_workers))
            for section, value in source.values.items()
            if section not in ("optimizers", "network")
            for name in tensor_names(value)
        ]
        check_present(found, source)
        return found

    def _read_sections(self, source: Source, requests: list[TensorRequest]) -> dict[str, Any]:
        group, sections = self._holder.group(), source.values
        tensors = source.fetch(requests)
        values = {
            section: decode(value, tensors.__getitem__)
            for section, value in sections.items()
            if section not in ("optimizers", "network")
            and group.rank in by_worker.takers(section, sections, group.num_workers)
        }
        is_same_number = by_worker.is_same_number(sections, group.num_workers)
        return by_worker.own(values, group.rank, is_same_number=is_same_number)

    def _take_over(self, found: _Training, values: Mapping[str, Any]) -> None:
        """Go on from where the save stood."""
        position, progress = found.position, self._holder.progress
        self.others.put_back((values.get("loader") or {}).get("others") or ())
        if found.start.now is not None:
            torch.default_generator.set_state(found.start.now)
        progress.num_steps, progress.seed = position.num_steps, found.seed
        progress.adds_up = values.get("adds_up") is True
        self.num_epochs = position.num_epochs
        self.resumption = None
        if position.epoch:
            callbacks = values.get(CALLBACKS) or []
            self.resumption = Resumption(
                position, found.start, values.get("loss"), callbacks, values.get("owners")
            )

    def check_callbacks(self, resumption: Resumption) -> None:
        """Once there is a plan: refuse what callbacks keep of parameters that others own now."""

        def check() -> None:
            self._unchecked = None
            by_worker.check_owners(self._holder.group(), resumption, self._ownership().digest)

        self._unchecked = resumption.owners
        self._holder.when_planned(check)

    # A snapshot.

    def sections(self, ownership: Ownership, process: Fixed | None = None) -> dict[str, Any]:
        """All that belongs to the training state beside network and optimizers.

        Args:
            ownership: Who owns what.
            process: What ``process_generators`` gave just now, if the caller knows.
        """
        rank = self._holder.group().rank
        resumption = None if self.resumption is None else self.resumption.to_values()
        return {
            **self._sections({}, ownership),
            "loader": self._loader_section(process),
            by_worker.name_of(CALLBACKS, rank): states_of(self.run.callbacks),
            by_worker.name_of(RESUMPTION, rank): resumption,
            **dict([self._kept()] if self._task.num_kept else []),
        }

    def go_back(self, values: Mapping[str, Any], *, inside: bool) -> None:
        """Go on from where ``sections`` was called.

        Args:
            values: What it gave.
            inside: Whether that was inside ``train``, which then goes on from there.
        """
        rank = self._holder.group().rank
        values = by_worker.own(values, rank, is_same_number=True)
        found = _Training.read(values)
        for name, value in self.more.items():
            value.load_state_dict(values["more"][name])
        self._take_over(found, values)
        self._put_kept([values.get(f"{KEPT}{rank}", {})], is_own=True)
        self.end_run(values, inside=inside)

    def end_run(self, values: Mapping[str, Any], *, inside: bool) -> None:
        """Forget the run that was broken off: ``values`` were put back; as ``go_back``."""
        if self._task.scaler is not None:
            scaler_findings(self._task.scaler).clear()  # of a step that was broken off
        self.run = NoRun(values.get("loss"))
        if not inside:
            kept = values.get(RESUMPTION)
            self.resumption = None if kept is None else Resumption.from_values(kept)

    # Both.

    def _ownership(self) -> Ownership:
        return Ownership(self._task, self._holder.owners())

    def _agree_none(self, problems: list[str], path: PathLike, what: str) -> None:
        """Raise the same error everywhere if a save does not fit on some worker."""
        told = self._holder.group().exchange("\n".join(problems))
        found = list(dict.fromkeys(line for text in told for line in text.splitlines()))
        if found:
            raise StateError(
                f"{os.fspath(path)} does not fit {what}; nothing was loaded\n  {shown(found)}"
            )

    def _requests(
        self, network: NetworkLoader | None, optimizers: list[OptimizerLoader]
    ) -> list[TensorRequest]:
        """The tensors to verify; what nobody owns yet is shared out, so that all is read once."""
        group, ownership = self._holder.group(), self._ownership()
        found = network.requests(ownership, group.num_workers) if network is not None else []
        for optimizer in optimizers:
            found += optimizer.requests(ownership, group.num_workers)
        if ownership.is_settled:
            return found
        return [
            TensorRequest(request.name, request.holds, [index % group.num_workers])
            for index, request in enumerate(found)
        ]

    def _load_network(self, network: NetworkLoader) -> None:
        num_workers = self._holder.group().num_workers

        def load() -> None:
            network.load(self._ownership(), num_workers)

        # Loading into one now would take the memory that deferring is to save.
        if any(map(is_deferred, stateful_modules(self._task))):
            self._holder.when_settled("network", load)
        else:
            load()

    def _load_optimizers(self, optimizers: list[OptimizerLoader]) -> None:
        group = self._holder.group()
        for optimizer in optimizers:
            optimizer.load_settings(group.num_workers)

        def load() -> None:
            for optimizer in optimizers:
                optimizer.load_state(self._ownership(), group.num_workers, group.rank)

        if optimizers:
            self._holder.when_settled("optimizers", load)


@dataclass(frozen=True)
class _Training:
    """Where training stood, read and checked before anything is loaded.

    Attributes:
        position: How far it had come.
        seed: What microbatches' random numbers follow from; None before the first step.
        start: How the epoch goes on.
    """

    position: Position
    seed: int | None
    start: EpochStart

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> _Training:
        """Read it from the sections of a save.

        Raises:
            CheckpointError: They are not what ``States.save`` writes.
        """
        position = Position.read(values.get("position"))
        seed = values.get("seed")
        if not (seed is None or type(seed) is int):
            raise CheckpointError(f"the save's seed is {str(seed)[:50]!r}; expected a number")
        loader = values.get("loader") or {}
        start = EpochStart(
            step=position.step,
            generator=generator_state(loader.get("epoch_generator"), "epoch_generator"),
            now=generator_state(values.get("generator"), "generator"),
            loader=loader.get("state"),
        )
        return cls(position, seed, start)
