"""Calls since the last snapshot: what it takes to run them again on a worker that is past them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from graphsplit.capture.reach.plain import PlainContents
from graphsplit.checkpoint.by_worker import states_of
from graphsplit.checkpoint.generators import all_generators, set_all_generators
from graphsplit.checkpoint.other_loaders import put_loader
from graphsplit.checkpoint.position import LoaderWatch, Resumption
from graphsplit.checkpoint.states import Stateful
from graphsplit.guards.changes import containers_in
from graphsplit.guards.values import freeze, with_leaves
from graphsplit.job.script import ModelCall
from graphsplit.optimizers.ownership import Elsewhere
from graphsplit.planning.python_values import Numbers, Values
from graphsplit.recovery.snapshot.optimizers import members_of, put_settings, settings_of
from graphsplit.recovery.snapshot.share import Changed, ModelSnapshot
from graphsplit.recovery.snapshot.tables import Given
from graphsplit.tensor_meta import span_elements
from graphsplit.torch_ext.private import pytree
from graphsplit.train.epochs import put_callbacks_back
from graphsplit.train.outputs import predicted_loader

_TAKES_TENSORS = frozenset(
    (
        *("train_step", "forward_backward", "predict"),
        *("load_state_dict", "load_optimizer_state_dict"),
        *("all_reduce", "reduce", "broadcast", "broadcast_object"),
        *("all_gather", "gather", "scatter"),
    )
)


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with the same strides, whatever they are."""
    strides, plain = tuple(tensor.stride()), tensor.detach()
    span = span_elements(tensor.shape, strides)
    if span == tensor.numel():
        return plain.clone(memory_format=torch.preserve_format)
    flat = plain.as_strided((span,), (1,)).clone()
    return flat.as_strided(tensor.shape, strides)


def kept_call(call: ModelCall) -> ModelCall:
    """A call whose arguments stay as they are now, whatever the script does with them."""
    if call.name in _TAKES_TENSORS:
        return replace(call, arguments=pytree.tree_map_only(torch.Tensor, kept, call.arguments))
    if call.name == "save":
        path, gather, extra = call.arguments
        now = {
            name: value.state_dict() if isinstance(value, Stateful) else value
            for name, value in extra.items()
        }
        now = pytree.tree_map_only(torch.Tensor, kept, now)
        return replace(call, arguments=(path, gather, now))
    return call


@dataclass(frozen=True)
class ModelBefore:
    """The state of a Model that the script may have changed before a call.

    Attributes:
        share: The Model.
        before: Its loss, its optimizer, and what hung where in its network, after the call before.
        given: The same, as the script has made it since.
        states: Of every optimizer, where it was given since the call before; else None.
        settings: Of every optimizer.
        members: The parameters of every group of every optimizer.
        python_values: Of every place that network and loss read.
        changed: Tensors that the script has written to, or made, since the call before.
        resumption: What the next ``train`` is to do first.
        left_out: Tensors that live elsewhere, to which it has written: workers compare that.
        attributes: Plain attributes of the network and its loss that are other than before the
            first call, and which parameters are trained.
        contents: What other objects, containers and closures hold that these lead to, where data
            sets and callbacks may change any in the call; else None.
        left: What code kept whole can change.
    """

    share: ModelSnapshot
    before: Given
    given: Given
    states: list[dict[Any, Any]] | None
    settings: list[list[dict[str, Any]]]
    members: list[list[list[torch.Tensor]]]
    python_values: tuple[Values, Numbers]
    changed: Changed
    resumption: Resumption | None
    left: dict[str, Any]
    left_out: tuple[torch.Tensor, ...]
    attributes: dict[str, Any]
    contents: PlainContents | None = None

    @classmethod
    def of(cls, share: ModelSnapshot, *, is_step: bool) -> ModelBefore:
        """Look at a Model, before a call: of one step, or of steps between which values change."""
        given, changed = share.given(), share.changed_by_script()
        is_new = not given.is_same(share.given_before)
        contents = None if share.is_settled and is_step else share.built()
        return cls(
            share,
            share.given_before,
            given,
            [_copied(dict(o.state)) for o in share.task.optimizers] if is_new else None,
            [settings_of(optimizer) for optimizer in share.task.optimizers],
            [members_of(optimizer) for optimizer in share.task.optimizers],
            share.engine.planner.python_values.before_call(is_step=is_step),
            changed,
            share.states.resumption,
            share.left.kept((share.engine.planner,), share.engine.group().rank),
            tuple(share.left_out()),
            share.states.python.saved(with_tensors=not share.is_settled),
            None if is_step else contents,
        )

    @property
    def needs_owners(self) -> bool:
        """Whether it can be put back only where the same workers own the same tensors."""
        return bool(self.changed or self.left_out) or any(self.states or ())

    def containers(self) -> Iterator[Any]:
        """All containers that network and loss lead to."""
        yield from self.given.containers()
        for value in self.python_values[0].values():
            yield from containers_in(value)

    def put_back(self) -> None:
        """Let it be like that again."""
        given, moved = self.given.done_again(self.before)
        self.share.go_on_with(given)
        optimizers = self.share.task.optimizers
        for optimizer, state in zip(optimizers, self.states or (), strict=False):
            optimizer.state.clear()
            optimizer.state.update(_copied(state))
        for of_one in zip(optimizers, self.settings, self.members, strict=True):
            put_settings(*of_one)
        if self.contents is not None:
            self.contents.put_back()
        self.share.states.python.put(self.attributes)
        values, numbers = self.python_values
        self.share.engine.planner.python_values.put(
            {key: with_leaves(v, partial(_present, moved)) for key, v in values.items()},
            [(_present(moved, tensor), number) for tensor, number in numbers],
        )
        self.share.left.put_back([self.left])
        self.share.change_again([(_present(moved, t), value) for t, value in self.changed])
        for tensor in map(partial(_present, moved), self.left_out):
            if isinstance(tensor, Elsewhere):
                tensor.note_write()
        self.share.states.resumption = self.resumption


def _present(moved: Mapping[int, torch.Tensor], leaf: Any) -> Any:
    """The tensor that hangs where another one hung then; anything else as it is."""
    return moved.get(id(leaf), leaf)


@dataclass
class Entry:
    """One call that may have to be run again.

    Attributes:
        ordinal: Number of the call in the script.
        call: The call, its arguments kept.
        generators: States of all generators before it.
        models: What the script had made of every Model before it.
        loader: State of the loader that it was given, before it.
        callbacks: States of the callbacks that it was given, before it.
    """

    ordinal: int
    call: ModelCall
    generators: tuple[torch.Tensor, Mapping[str, Any]]
    models: list[ModelBefore]
    loader: dict[str, Any] | None = None
    callbacks: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, ordinal: int, call: ModelCall, shares: Sequence[ModelSnapshot]) -> Entry:
        """A call that is about to run."""
        entry = cls(
            ordinal,
            kept_call(call),
            all_generators(),
            [ModelBefore.of(share, is_step=_loader_of(call) is None) for share in shares],
        )
        entry.loader = LoaderWatch(_loader_of(call)).state()
        if call.name == "train":
            entry.callbacks = _copied(states_of(call.arguments[2]))
        return entry

    def put_back(self) -> None:
        """Before the call is run again from its beginning: all is as it was when it began."""
        for before in self.models:
            before.put_back()
        if self.call.name == "train":
            put_callbacks_back(self.call.arguments[2], _copied(self.callbacks))
        put_loader(_loader_of(self.call), _copied(self.loader))
        set_all_generators(self.generators)


def left_to_the_script(now: Entry, earlier: Iterable[Entry]) -> list[Any]:
    """The contents of containers that network and loss led to, and before the latest call do not.

    Nobody but the script changes them: calls that run again leave there what these did then.

    Args:
        now: The latest call.
        earlier: The calls that may be run again.
    """
    there = {id(one) for before in now.models for one in before.containers()}
    models = [before for entry in earlier for before in entry.models]
    chains = ((*before.before.containers(), *before.containers()) for before in models)
    held = {id(one): one for containers in chains for one in containers}
    apart = there | held.keys()
    return [
        freeze(one, apart=apart - {number}) for number, one in held.items() if number not in there
    ]


def _loader_of(call: ModelCall) -> Any:
    """The loader that a call goes through; None if it goes through none."""
    if call.name == "predict":
        return predicted_loader((call.arguments[0], call.arguments[1]))
    place = {"train": 1, "eval": 0}.get(call.name)
    return None if place is None else call.arguments[place]


def _copied(value: Any) -> Any:
    """A nested value of which nothing is shared with its owner."""
    # Of others, such as the Counter in which MultiStepLR keeps its milestones, a shallow copy.
    return pytree.tree_map(
        lambda leaf: kept(leaf) if isinstance(leaf, torch.Tensor) else copy.copy(leaf), value
    )


def refuse_what_ends(call: ModelCall, refuse: Callable[[str], None]) -> None:
    """Refuse a loader that can be gone through only once: its call could not be run again."""
    given = _loader_of(call)
    if given is not None and getattr(given, "__next__", None) is not None:
        refuse(
            f"{call.name} was given a {type(given).__name__}, which can be gone through only "
            f"once; where a lost worker is waited for, batches may be needed again\n"
            f"  Fix: pass a DataLoader or a list, or start the job with fail_fast."
        )
