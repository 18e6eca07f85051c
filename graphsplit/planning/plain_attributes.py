"""Plain attributes and marks of parameters, as saves and snapshots keep them of a run.

Attributes of the network's modules and of the loss (numbers, texts, tensors, containers of them),
and ``requires_grad``, decide what a step computes. The script makes them as they are before the
first call; a save holds those that have changed since, and a load puts the others back to that.

A snapshot leaves tensors out: those that count are kept by what watches them. What code kept whole
can reach is saved by the worker that runs it: not all that it leaves can be sent to the others
after a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from inspect import getattr_static
from typing import Any

import torch
from torch import nn

from graphsplit.capture.opaque.marks import marked_ones
from graphsplit.capture.state.kept_names import with_names, with_stand_ins
from graphsplit.guards.changes import latest
from graphsplit.guards.classes import own_dictionary
from graphsplit.guards.values import (
    MISSING,
    Frozen,
    any_leaf,
    freeze,
    is_plain,
    put_back,
    put_into,
    reference_of,
    same,
    thaw,
    with_leaves,
)
from graphsplit.planning.python_values import OF_VALUES, can_be_written
from graphsplit.planning.task import Task, stateful_modules
from graphsplit.planning.trainable import put_requires_grad
from graphsplit.torch_ext.attributes import BUFFERS, writes_of

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_OTHERS = ("__", "_graphsplit")  # of Python, and marks that the script gives

# Attributes that were ever other than when a Model began, by their dictionary: of modules that have
# several Models each has another beginning, and so has a process that comes back.
_changed: set[tuple[int, str]] = set()
Own = list[tuple[dict[str, Any], str, Any]]  # attributes, with their dictionaries
_SCALARS = frozenset((int, float, bool, str, bytes, complex, type(None)))


class PlainState:
    """The changed attributes and marks of one task.

    Args:
        task: Its network and loss.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._first: dict[str, Any] | None = None  # frozen values, by name
        self._first_marks: dict[str, bool] = {}
        self._writes: dict[int, int] = {}  # by the identity of a tensor in there
        self._copies: dict[int, torch.Tensor] = {}  # of those that code kept whole may write to
        self._whole: dict[str, Any] = {}  # attributes of modules kept whole, by path

    def begin(self) -> None:
        """The first call of the Model: what changes from now on belongs to the run."""
        if self._first is None:
            marked = (one for root in stateful_modules(self._task) for one in marked_ones(root))
            inside = {id(vars(module)) for one in marked for module in one.modules()}
            self._whole = {path: held for path, held, _ in self._holders() if id(held) in inside}
            self._first, self._first_marks = self._attributes()[0], self._marks()
            for name, value in self._first.items():
                note = self._copy if _holder_of(name) in self._whole else self._note_writes
                any_leaf(value, note)

    def _note_writes(self, leaf: Any) -> bool:
        if _is_tensor(leaf):
            self._writes[id(leaf)] = writes_of(leaf)
        return False

    def _copy(self, leaf: Any) -> bool:
        if _is_tensor(leaf):
            self._copies[id(leaf)] = leaf.detach().clone()
        return self._note_writes(leaf)

    def saved(
        self, of: Collection[int] | None = None, *, with_tensors: bool = True
    ) -> dict[str, Any]:
        """All that has ever changed since ``begin``: plain values and tensors, by name.

        Args:
            of: Whose attributes alone, by the identities of their dictionaries; None: all.
            with_tensors: Whether also tensors, and what holds some.

        Returns:
            Them, with the paths of ``of``, the names of those gone, and of those that cannot be
            written; and the marks of parameters that have changed.
        """
        self.begin()
        first, (now, unsaved) = self._first or {}, self._attributes(of, with_tensors)
        there = {path: held for path, held, _ in self._holders(of)}
        places = {name: (id(there[_holder_of(name)]), _key(name)) for name in now}
        _changed.update(
            places[name]
            for name, value in now.items()
            if not same(first.get(name, MISSING), reference_of(value)) or self._is_written_to(value)
        )
        marks = self._marks()
        return {
            "paths": [] if of is None else list(there),
            "attributes": {
                name: thaw(_as_written(value))
                for name, value in now.items()
                if places[name] in _changed
            },
            "gone": [n for n in first if _is_gone(_key(n), there.get(_holder_of(n)))],
            "unsaved": unsaved,
            "requires_grad": {n: m for n, m in marks.items() if self._first_marks.get(n) != m},
        }

    def put(self, saved: Mapping[str, Any]) -> list[str]:
        """Let all be as it was saved, or as before the first call; returns what was changed.

        A value is put where there is none, or a plain one: no save replaces code.
        """
        self.begin()
        given, gone = saved.get("attributes") or {}, saved.get("gone") or ()
        apart = {*gone, *saved.get("unsaved", ())}
        values = {name: value for name, value in (self._first or {}).items() if name not in apart}
        network = self._task.network
        found = {name: freeze(value) for name, value in given.items()}
        written = {n: v for n, v in found.items() if _can_be_written(v)}
        values = {n: with_leaves(v, self._as_first) for n, v in values.items() if n not in written}
        values = {n: with_stand_ins(v, network) for n, v in {**values, **written}.items()}
        changed = self._delete({*values, *apart}, gone, saved)
        below = _by_holder(values)
        for path, held, kind in self._holders():
            for name, value in below.get(path, ()):
                there = held.get(name, MISSING)
                hidden = getattr_static(kind, name, None) if there is MISSING else there
                is_buffer = name in held.get(BUFFERS, ())  # which is kept as such
                if self._is_saved(name, hidden) and not (is_buffer or same(value, there)):
                    held[name] = put_into(value, there, as_written=True)
                    changed.append(f"{path}.{name}")
        marks = {**self._first_marks, **(saved.get("requires_grad") or {})}
        named = dict(self._parameters())
        known = [name for name in named if type(marks.get(name)) is bool]
        put_requires_grad([named[name] for name in known], [marks[name] for name in known])
        return changed

    def own(self, *, with_tensors: bool) -> Own:
        """Attributes that only this process can have again: containers themselves, and contents.

        And values that cannot be saved.

        Args:
            with_tensors: Whether ``saved`` holds tensors.
        """
        found = []
        for _, held, _ in self._holders():
            for key, value in held.items():
                if _is_users(key) and not _is_atom(value):
                    frozen = freeze(value)
                    if isinstance(frozen, Frozen) or not self._is_saved(key, value, with_tensors):
                        found.append((held, key, frozen))
        return found

    def _delete(
        self, known: Collection[str], gone: Collection[str], saved: Mapping[str, Any]
    ) -> list[str]:
        """Delete what is gone, and what modules kept whole have made since; returns the names."""
        found = []
        for path, held, _ in self._holders():
            is_whole = "unsaved" in saved and self._whole.get(path) is held
            for name in [one for one in held if _is_users(one)]:
                is_gone = f"{path}.{name}" in gone and self._is_saved(name, held[name])
                if is_gone or (is_whole and f"{path}.{name}" not in known):
                    del held[name]
                    found.append(f"{path}.{name}")
        return found

    def _as_first(self, leaf: Any) -> Any:
        """A tensor that was there first, with the value that it had."""
        if id(leaf) in self._copies and self._is_written_to(leaf):
            leaf.detach().copy_(self._copies[id(leaf)])
            self._note_writes(leaf)
        return leaf

    def _attributes(
        self, of: Collection[int] | None = None, with_tensors: bool = True
    ) -> tuple[dict[str, Any], list[str]]:
        """The values that can be saved and are not the very first ones; the names of others."""
        first = self._first or {}
        found, others = {}, []
        for path, held, _ in self._holders(of):
            for key, value in held.items():
                if key in _OF_TORCH:  # most are
                    continue
                name, is_atom = f"{path}.{key}", _is_atom(value)
                is_first = is_atom and reference_of(first.get(name, MISSING)) is value
                if (is_first and (id(held), key) not in _changed) or not _is_users(key):
                    continue
                if is_atom:
                    found[name] = freeze(value)
                elif self._is_saved(key, value, with_tensors):
                    found[name] = self._written(value)
                else:
                    others.append(name)
        return found, others

    def _written(self, value: Any) -> Any:
        return with_names(freeze(value), self._task.network)

    def _is_saved(self, name: Any, value: Any, with_tensors: bool = True) -> bool:
        written = self._written(value) if with_tensors else freeze(value)
        return _is_users(name) and value is not MISSING and _can_be_written(written, with_tensors)

    def _is_written_to(self, value: Any) -> bool:
        """Whether a tensor in a snapshot is new, or was modified since the first call."""
        return any_leaf(
            value,
            lambda leaf: (
                type(leaf) is torch.Tensor and self._writes.get(id(leaf)) != writes_of(leaf)
            ),
        )

    def _holders(
        self, of: Collection[int] | None = None
    ) -> Iterator[tuple[str, dict[str, Any], type]]:
        """The dictionaries of attributes, each with its name and the class of its object."""
        for root, one in (("net", self._task.network), ("loss_fn", self._task.loss_fn)):
            whole = one.named_modules() if isinstance(one, nn.Module) else [("", one)]
            for path, holder in whole:
                held = own_dictionary(holder)
                if held is not None and (of is None or id(held) in of):
                    yield (f"{root}.{path}" if path else root), held, type(holder)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for root, one in (("net", self._task.network), ("loss_fn", self._task.loss_fn)):
            if isinstance(one, nn.Module):
                for name, parameter in one.named_parameters():
                    yield f"{root}.{name}", parameter

    def _marks(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._parameters()}


def put_own(own: Own) -> None:
    """Let attributes be as ``PlainState.own`` found them."""
    for held, key, frozen in own:
        held[key] = put_back(latest(frozen))


def together(saved: Mapping[str, Any], apart: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All that worker 0 has saved, but of code kept whole as the workers have it that run it.

    Args:
        saved: All, as worker 0 had it.
        apart: What each worker had of the modules whose attributes such code can reach there.
    """
    found: dict[str, Any] = {"attributes": {}, "gone": [], **saved}
    for own in map(_of_any_version, apart):
        at, names = {*own["paths"]}, ("gone", "unsaved")
        others = {n: v for n, v in found["attributes"].items() if _holder_of(n) not in at}
        found["attributes"] = {**others, **own["attributes"]}
        for key in names:
            found[key] = [n for n in found.get(key, ()) if _holder_of(n) not in at] + own[key]
    return found


def _of_any_version(own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Earlier versions saved the attributes of each module under its path."""
    if "paths" in own:
        return own
    roots = {"network": "net", "loss": "loss_fn"}
    tops = {path: path.partition(".") for path in own}
    paths = {path: ".".join(filter(None, (roots[t], rest))) for path, (t, _, rest) in tops.items()}
    here = {f"{paths[path]}.{n}": v for path, one in own.items() for n, v in one["here"].items()}
    return {"paths": [], "attributes": here, "gone": [], "unsaved": []}


def _as_written(frozen: Any) -> Any:
    """A snapshot with containers of Python's own classes: a ``defaultdict`` as a ``dict``.

    One with attributes besides stays: they belong to what it holds.
    """
    if not isinstance(frozen, Frozen) or frozen.content is not None:
        return frozen
    held, items = frozen.container, tuple(map(_as_written, frozen.items))
    if type(held) not in OF_VALUES and not getattr(held, "__dict__", None):
        held = next(kind() for kind in OF_VALUES if isinstance(held, kind))
    return Frozen(held, items, frozen.keys)


def _is_atom(value: Any) -> bool:
    """Whether this is a plain value, or a tuple of such: most attributes are."""
    is_tuple = type(value) is tuple
    return _SCALARS.issuperset(map(type, value)) if is_tuple else type(value) in _SCALARS


def _can_be_written(frozen: Any, with_tensors: bool = True) -> bool:
    """Whether a save can hold it: plain values, and tensors with values here."""
    written = _as_written(frozen)
    if with_tensors:
        written = with_leaves(written, lambda leaf: None if _is_tensor(leaf) else leaf)
    return is_plain(written) and can_be_written(thaw(written))


def _is_tensor(leaf: Any) -> bool:
    """Whether this is a dense tensor with a value here, and no parameter."""
    is_plain_one = type(leaf) is torch.Tensor and leaf.layout is torch.strided
    return is_plain_one and not (leaf.is_quantized or leaf.is_meta)


def _holder_of(name: str) -> str:
    return name.rpartition(".")[0]


def _is_gone(key: str, held: Mapping[str, Any] | None) -> bool:
    """Whether an object has no such attribute any more; a buffer may have taken its place."""
    return held is not None and key not in held and key not in held.get(BUFFERS, ())


def _key(name: str) -> str:
    return name.rpartition(".")[2]


def _is_users(name: Any) -> bool:
    is_name = type(name) is str and name.isidentifier() and not name.startswith(_OTHERS)
    return is_name and name not in _OF_TORCH


def _by_holder(values: Mapping[str, Any]) -> dict[str, list[tuple[str, Any]]]:
    found: dict[str, list[tuple[str, Any]]] = {}
    for name, value in values.items():
        if _is_users(_key(name)):
            found.setdefault(_holder_of(name), []).append((_key(name), value))
    return found
