"""Plain attributes and marks of parameters, as a save keeps them of a run.

Attributes of the network's modules and of the loss (numbers, texts, tensors, containers of them),
and ``requires_grad``, decide what a step computes. The script makes them as they are before the
first call; a save holds those that have changed since, and a load puts the others back to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphsplit.capture.state.kept_names import with_names, with_stand_ins
from graphsplit.guards.classes import own_dictionary
from graphsplit.guards.values import (
    MISSING,
    any_leaf,
    freeze,
    is_plain,
    put_into,
    reference_of,
    same,
    thaw,
    with_leaves,
)
from graphsplit.planning.python_values import can_be_written
from graphsplit.planning.task import Task
from graphsplit.planning.trainable import put_requires_grad
from graphsplit.torch_ext.attributes import writes_of

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_OTHERS = ("__", "_graphsplit")  # of Python, and marks that the script gives

_SCALARS = frozenset((int, float, bool, str, bytes, complex, type(None)))


def scalars_in(held: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of an object that are plain values, and no containers."""
    return {n: v for n, v in held.items() if type(v) in _SCALARS and not n.startswith(_OTHERS)}


class Scalars:
    """The plain values in attributes of some objects, as the script has built them.

    A process that takes the place of another builds them alike; what is other now it must be told.

    Args:
        objects: Gives the objects, in an order that is the same on all workers.
    """

    def __init__(self, objects: Callable[[], Iterable[Any]]) -> None:
        self._objects = objects
        self._built = [scalars_in(held) for held in self._all()]

    def _all(self) -> list[dict[str, Any]]:
        return [own_dictionary(one) or {} for one in self._objects()]

    def changed(self) -> dict[str, dict[str, Any]]:
        """Those that are other now, by the object's number; none if objects have come or gone."""
        now = [scalars_in(held) for held in self._all()]
        if len(now) != len(self._built):
            return {}
        found = {
            str(at): {n: v for n, v in after.items() if not same(before.get(n, MISSING), v)}
            for at, (before, after) in enumerate(zip(self._built, now, strict=True))
        }
        return {at: changed for at, changed in found.items() if changed}

    def put(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Let them have what ``changed`` gave."""
        held = self._all()
        for at, values in changed.items():
            held[int(at)].update(values)


class PlainState:
    """The changed attributes and marks of one task.

    Args:
        task: Whose network and loss.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._first: dict[str, Any] | None = None  # frozen values, by name
        self._first_marks: dict[str, bool] = {}
        self._writes: dict[int, int] = {}  # by the identity of a tensor in there

    def begin(self) -> None:
        """The first call of the Model: what changes from now on belongs to the run."""
        if self._first is None:
            self._first, self._first_marks = self._attributes(), self._marks()
            for value in self._first.values():
                any_leaf(value, self._note_writes)

    def _note_writes(self, leaf: Any) -> bool:
        if _is_tensor(leaf):
            self._writes[id(leaf)] = writes_of(leaf)
        return False

    def saved(self) -> dict[str, Any]:
        """All that has changed since ``begin``: plain values and tensors, by name."""
        self.begin()
        first, now = self._first or {}, self._attributes()
        changed = {
            name: thaw(value)
            for name, value in now.items()
            if not same(first.get(name, MISSING), reference_of(value)) or self._is_written_to(value)
        }
        marks = self._marks()
        return {
            "attributes": changed,
            "gone": [name for name in first if name not in now and self._is_gone(name)],
            "requires_grad": {n: m for n, m in marks.items() if self._first_marks.get(n) != m},
        }

    def put(self, saved: Mapping[str, Any]) -> list[str]:
        """Let all be as it was saved, or as before the first call; returns what was changed.

        A value is put where there is none, or a plain one: no save replaces code.
        """
        self.begin()
        given, gone = saved.get("attributes") or {}, saved.get("gone") or ()
        values = {name: value for name, value in (self._first or {}).items() if name not in gone}
        network = self._task.network
        found = {name: freeze(value) for name, value in given.items()}
        written = {n: v for n, v in found.items() if can_be_written(thaw(_without_tensors(v)))}
        values = {n: with_stand_ins(v, network) for n, v in {**values, **written}.items()}
        changed: list[str] = []
        for path, held, kind in self._holders():
            for name in [n for n in held if f"{path}.{n}" in gone and self._is_saved(n, held[n])]:
                del held[name]
                changed.append(f"{path}.{name}")
            for name, value in _below(path, values):
                there = held.get(name, MISSING)
                is_free = there is MISSING and not hasattr(kind, name)
                if (is_free or self._is_saved(name, there)) and not same(value, there):
                    held[name] = put_into(value, there)
                    changed.append(f"{path}.{name}")
        marks = {**self._first_marks, **(saved.get("requires_grad") or {})}
        named = dict(self._parameters())
        known = [name for name in named if type(marks.get(name)) is bool]
        put_requires_grad([named[name] for name in known], [marks[name] for name in known])
        return changed

    def _is_gone(self, name: str) -> bool:
        path, _, key = name.rpartition(".")
        return any(path == holder and key not in held for holder, held, _ in self._holders())

    def _attributes(self) -> dict[str, Any]:
        return {
            f"{path}.{name}": self._written(value)
            for path, held, _ in self._holders()
            for name, value in held.items()
            if self._is_saved(name, value)
        }

    def _written(self, value: Any) -> Any:
        return with_names(freeze(value), self._task.network)

    def _is_saved(self, name: Any, value: Any) -> bool:
        if not _is_users(name) or value is MISSING:
            return False
        written = _without_tensors(self._written(value))
        return is_plain(written) and can_be_written(thaw(written))

    def _is_written_to(self, value: Any) -> bool:
        """Whether a tensor in a snapshot is new, or was modified since the first call."""
        return any_leaf(
            value,
            lambda leaf: (
                type(leaf) is torch.Tensor and self._writes.get(id(leaf)) != writes_of(leaf)
            ),
        )

    def _holders(self) -> Iterator[tuple[str, dict[str, Any], type]]:
        """The dictionaries of attributes, each with its name and the class of its object."""
        for root, one in (("net", self._task.network), ("loss_fn", self._task.loss_fn)):
            whole = one.named_modules() if isinstance(one, nn.Module) else [("", one)]
            for path, holder in whole:
                held = own_dictionary(holder)
                if held is not None:
                    yield (f"{root}.{path}" if path else root), held, type(holder)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for root, one in (("net", self._task.network), ("loss_fn", self._task.loss_fn)):
            if isinstance(one, nn.Module):
                for name, parameter in one.named_parameters():
                    yield f"{root}.{name}", parameter

    def _marks(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._parameters()}


def _without_tensors(frozen: Any) -> Any:
    return with_leaves(frozen, lambda leaf: None if _is_tensor(leaf) else leaf)


def _is_tensor(leaf: Any) -> bool:
    """Whether this is a tensor with a value here, and no parameter."""
    return type(leaf) is torch.Tensor


def _is_users(name: Any) -> bool:
    is_name = type(name) is str and name.isidentifier() and not name.startswith(_OTHERS)
    return is_name and name not in _OF_TORCH


def _below(path: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        holder, _, key = name.rpartition(".")
        if holder == path and _is_users(key):
            yield key, value
