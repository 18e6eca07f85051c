"""The Python values that network and loss read and leave, kept over the loss of a worker."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from graphsplit.capture.reach.plain import PlainContents
from graphsplit.capture.state.kept_names import names_in, with_lost, with_names, with_stand_ins
from graphsplit.capture.state.kept_value import KeptValue, first_of
from graphsplit.capture.state.older_values import kept_places, settle_older
from graphsplit.encoding.exact import is_exact
from graphsplit.encoding.values import has_bits, is_known_member
from graphsplit.errors import StateError
from graphsplit.guards.changes import holds, latest
from graphsplit.guards.named_places import place_named
from graphsplit.guards.places import Place
from graphsplit.guards.values import (
    MISSING,
    MUTABLE,
    Frozen,
    freeze,
    is_mapping,
    is_plain,
    is_scalar,
    keys_of,
    number_of,
    put_back,
    put_into,
    reference_of,
    same,
    shown,
    thaw,
    values_of,
    with_leaves,
)
from graphsplit.planning.recordings import Recordings
from graphsplit.planning.task import Task
from graphsplit.tensor_meta import has_same_bits

_MAX_LOSSES = 64  # that the script has given, one after the other; as many as recordings are kept
Values = dict[Any, Any]  # by identity of a place
Numbers = Sequence[tuple[torch.Tensor, Any]]
_TENSOR = "\0tensor: "
_ROOTS = ("net", "loss_fn")


@dataclass(frozen=True)
class _Known:
    """A place that is watched, or was.

    Attributes:
        place: The place.
        first: The snapshot of what was there when it was first read.
        loss: The number of the loss that was given when it was read: another one's places have the
            same names.
        is_whole: Whether all of a container there counts; else only items of it, which are places
            of their own. It is kept all the same where it can be: else an item that was appended
            would come back in the place of another one.
    """

    place: Place
    first: Any
    loss: int
    is_whole: bool = True

    @property
    def name(self) -> tuple[str, int]:
        """Its name on all workers."""
        return self.place.label, self.loss


class PythonValues:
    """The values in snapshots of the places that recordings watch.

    Args:
        recordings: A Model's recordings.
        task: Its network and loss.

    Attributes:
        built: What they lead to, as the script has built it: before callbacks and data sets changed
            any. Of a place that is read later, this counts as what was there first.
        losses: Those that the script has given, by number.
    """

    def __init__(self, recordings: Recordings, task: Task) -> None:
        self._recordings = recordings
        self._task = task
        self._known: dict[Any, _Known] = {}
        self._changed: set[Any] = set()  # were ever other: a script that runs again sets them so
        self.losses: dict[int, Any] = {0: task.loss_fn}
        self._num_losses = 1
        self._shown: list[tuple[Place, Any, Any]] = []
        self.built: PlainContents | None = None
        self._of_call: Values = {}  # what ``before_call`` gave last

    def note_loss(self) -> None:
        """Note the loss that the script has given."""
        if not any(loss is self._task.loss_fn for loss in self.losses.values()):
            self.losses[self._num_losses] = self._task.loss_fn
            self._num_losses += 1
            if len(self.losses) > _MAX_LOSSES:
                del self.losses[next(iter(self.losses))]

    def note(self) -> None:
        """Note all places that are watched by now."""
        settle_older(self._task.network)
        numbers = {id(loss): number for number, loss in self.losses.items()}
        new: list[Any] = []
        for place, value, loss_fn, is_whole in self._recordings.places():
            known = self._known.get(place.identity)
            if known is None:
                new.append(place.identity)
                value = with_leaves(value, first_of)
                self._of_call[place.identity] = value
                self._known[place.identity] = _Known(
                    place, self._first(value, is_whole), numbers.get(id(loss_fn), -1), is_whole
                )
            elif is_whole and not known.is_whole:
                self._known[place.identity] = replace(known, is_whole=True)
        if new and self.built is not None:
            self._look_back(new, self.built)

    def _first(self, value: Any, is_whole: bool) -> Any:
        return value if is_whole or self._can_be_filled(value) else reference_of(value)

    def _look_back(self, keys: Iterable[Any], built: PlainContents) -> None:
        """Let what was changed before it was first read count as changed, where it can be kept."""
        now = {key: freeze(self._known[key].place.read()) for key in keys}
        with built.as_then():
            for key, value in now.items():
                known, then = self._known[key], self._known[key].place.read()
                if same(value, then) or not _is_kept(with_names(value, self._task.network)):
                    continue
                place = self._named(*known.name)
                if place is not None and place.identity == key:
                    first = self._first(freeze(then), known.is_whole)
                    self._known[key] = replace(known, first=first)

    def before_call(self, *, is_step: bool) -> tuple[Values, Numbers]:
        """As ``now``; what the call is the first to read is added later, with what it finds there.

        Args:
            is_step: Whether it is a call of one step: else callbacks may change something on the
                way, and nothing is added.
        """
        found = self.now()
        self._of_call = found[0] if is_step else {}
        return found

    def now(self) -> tuple[Values, Numbers]:
        """The snapshots of all places' present values, and the numbers of tensors in there."""
        self.note()
        values = {key: freeze(known.place.read()) for key, known in self._known.items()}
        for key, known in self._known.items():
            if not same(known.first, reference_of(values[key])):
                self._changed.add(key)
        tensors = (tensor for value in values.values() for tensor in _scalars_in(value))
        return values, [(tensor, tensor.item()) for tensor in tensors]

    def put(self, values: Mapping[Any, Any], numbers: Numbers = ()) -> None:
        """Let places, and tensors of one element, have the values of ``now`` again.

        In the containers of then: one that was in two places is so again.
        """
        for key, value in values.items():
            place, then = self._known[key].place, put_back(latest(value))
            there = place.read()
            if then is not there and (isinstance(value, Frozen) or not same(value, there)):
                place.write(then)
        self._put_numbers(numbers)

    def _put_written(self, values: Mapping[Any, Any], numbers: Numbers) -> None:
        """The same for values that were written, which do not tell what was one container.

        One that two places have in common holds one value: the other gets one of its own.
        """
        for is_shared in (False, True):
            for key, value in values.items():
                place = self._known[key].place
                there = place.read()
                if not same(value, there):
                    place.write(thaw(value) if is_shared else put_into(value, there))
        self._put_numbers(numbers)

    def _put_numbers(self, numbers: Numbers) -> None:
        with torch.no_grad():
            for tensor, number in numbers:
                if not same(number, tensor.item()):
                    tensor.fill_(number)

    def apart(self) -> Values:
        """The values of attributes of modules that hang nowhere in the network or a loss now.

        Their names may be those of others. A worker keeps them by itself: whoever comes back has
        none of these modules, and is told of another value where one hangs again.
        """
        roots = (self._task.network, *self.losses.values())
        modules = (m for root in roots if isinstance(root, nn.Module) for m in root.modules())
        there = {id(vars(module)) for module in modules}
        return {
            key: freeze(known.place.read())
            for key, known in self._known.items()
            if known.place.module is not None and id(known.place.holder) not in there
        }

    def containers(self) -> Values:
        """Which containers stand where, and all ``apart``: only this process can have it again."""
        now = {key: freeze(known.place.read()) for key, known in self._known.items()}
        return {k: v for k, v in now.items() if isinstance(v, Frozen)} | self.apart()

    def kept(self) -> list[list[Any]]:
        """Values that were ever other than when first read, in a form that can be written.

        Each with the name of the first place that holds the same container, which may be its own.
        Those ``apart`` are left out.

        Raises:
            StateError: One of them cannot be written; names it.
        """
        self.note()
        found, put, apart = [], self._put_by_script(), self.apart()
        now = {key: known.place.read() for key, known in self._known.items() if key not in apart}
        uses = Counter(id(value) for value in now.values() if isinstance(value, MUTABLE))
        first: dict[int, tuple[str, int]] = {}
        for key, value in now.items():
            known = self._known[key]
            place, is_shared = known.place, uses[id(value)] > 1
            frozen = with_names(freeze(value), self._task.network)
            is_as_read = same(known.first, value) and not _scalars_in(frozen)
            if is_as_read and not is_shared and key not in self._changed:
                continue
            frozen = with_leaves(frozen, partial(_written, _scalars_in(known.first), put))
            again = self._named(*known.name)
            if again is not None and again.identity != key and _is_below_root(place.label):
                continue  # of an object or container in whose place another one is by now
            if not _is_kept(frozen) or again is None or again.identity != key:
                if is_as_read or not known.is_whole:
                    continue
                if holds(value, lambda leaf: isinstance(leaf, KeptValue)):
                    continue  # an object that forward makes each time, with tensors nobody reads
                raise StateError(
                    f"{place.label} has changed from {shown(known.first)} to {shown(value)}, which "
                    f"a snapshot cannot hold\n  {place.source}\n"
                    f"  Fix: keep numbers, texts, lists and dictionaries of them in attributes of "
                    f"network or loss, or in globals, and tensors in buffers (register_buffer); or "
                    f"start the job with fail_fast."
                )
            is_there = value is not MISSING
            written = thaw(frozen) if is_there else None
            like = first.setdefault(id(value), known.name) if is_shared else known.name
            found.append([*known.name, is_there, written, list(like)])
        return found

    def put_back(self, kept: Sequence[Sequence[Any]]) -> None:
        """Let places be as when ``kept`` was called; others as when they were first read.

        Those ``apart`` stay as they are.
        """
        self.note()
        apart = self.apart()
        values = {
            key: latest(known.first)
            for key, known in self._known.items()
            if key not in apart and known.first is not _UNKNOWN
        }
        by_name = {known.name: known.place for known in self._known.values()}
        numbers: list[tuple[torch.Tensor, Any]] = []
        put: dict[str, torch.Tensor] = {}
        places: dict[Any, Place] = {}
        for label, loss, is_there, value, _ in kept:
            place = by_name.get((label, loss)) or self._named(label, loss)
            if place is None:
                raise StateError(f"{label} is in a snapshot, and was not found here")
            places[label, loss] = place
            # One that was not read here yet has no value that is known to be its first.
            self._known.setdefault(place.identity, _Known(place, _UNKNOWN, loss))
            first = values.get(place.identity, _UNKNOWN)
            there = _scalars_in(freeze(place.read()) if first is _UNKNOWN else first)
            known = _tensors_in(freeze(place.read()))
            frozen = with_leaves(freeze(value), partial(_read, there, known, put, numbers))
            frozen = with_stand_ins(frozen, self._task.network)
            values[place.identity] = frozen if is_there else MISSING
        self._put_written(values, numbers)
        for label, loss, *_, like in kept:
            if like != [label, loss]:
                places[label, loss].write(places[tuple(like)].read())

    # What the script may take between calls that are given again.

    def kept_tensors(self) -> list[list[Any]]:
        """The places in which code has left tensors, and what stands there, to be written."""
        found: list[list[Any]] = []
        for place in kept_places.get(self._task.network, {}).values():
            written = thaw(with_names(freeze(place.read()), self._task.network))
            named = self._named(place.label, self._number_of_loss())
            is_found = named is not None and named.identity == place.identity
            if is_found and any(names_in(written)) and can_be_written(written):
                found.append([place.label, self._number_of_loss(), written])
        return found

    def show(self, kept: Sequence[Sequence[Any]]) -> None:
        """Let something stand where ``kept_tensors`` found tensors: no step can go on from it.

        Else the script would take, and put back later, what it had built itself.
        """
        self.note_loss()
        for label, loss, written in kept:
            place = self._named(label, loss)
            if place is not None:
                before = freeze(place.read())
                place.write(put_into(with_lost(freeze(written)), place.read()))
                self._shown.append((place, before, freeze(place.read())))

    def hide(self) -> None:
        """Let places be as before ``show``, unless the script has put something else there."""
        for place, before, shown_there in self._shown:
            if same(shown_there, place.read()):
                place.write(put_back(before))
        self._shown = []

    def _number_of_loss(self) -> int:
        self.note_loss()
        return next(n for n, loss in self.losses.items() if loss is self._task.loss_fn)

    def note_put(self, labels: Iterable[str]) -> None:
        """Values were loaded there: a worker that comes back has others."""
        number = self._number_of_loss()
        for label in labels:
            place = self._named(label, number)
            if place is not None and not self._is_of_own_class(place):
                known = self._known.get(place.identity, _Known(place, _UNKNOWN, number))
                self._known[place.identity] = replace(known, first=_UNKNOWN)

    def _is_of_own_class(self, place: Place) -> bool:
        """Whether a plain value cannot be written as such; plain attributes have it besides."""
        frozen = with_leaves(with_names(freeze(place.read()), self._task.network), number_of)
        return is_plain(frozen) and not can_be_written(thaw(frozen))

    def _put_by_script(self) -> list[torch.Tensor]:
        """The tensors of one element that are not in all of their places since the first read."""
        return [
            tensor
            for known in self._known.values()
            for tensor in _scalars_in(freeze(known.place.read()))
            if not any(tensor is one for one in _scalars_in(known.first))
        ]

    def _can_be_filled(self, frozen: Any) -> bool:
        """Whether a container that stays can be given what it held."""
        there = reference_of(frozen)
        return isinstance(there, MUTABLE) and _is_kept(with_names(frozen, self._task.network))

    def _named(self, label: str, loss: int) -> Place | None:
        """The place that a worker which comes back finds by its name."""
        roots = dict(zip(_ROOTS, (self._task.network, self.losses.get(loss)), strict=True))
        return place_named(label, roots)


def _is_below_root(label: str) -> bool:
    """Whether steps from network or loss lead to a place: they name one at a time."""
    return label.startswith(tuple(f"{root}{step}" for root in _ROOTS for step in ".["))


def _is_kept(frozen: Any) -> bool:
    frozen = with_leaves(frozen, lambda leaf: None if _is_own_tensor(leaf) else number_of(leaf))
    return is_plain(frozen) and can_be_written(thaw(frozen))


def _is_own_tensor(leaf: Any) -> bool:
    """Whether this is a tensor of the script's, with a value here."""
    is_dense = type(leaf) is torch.Tensor and leaf.layout is torch.strided
    return is_dense and not (leaf.is_quantized or leaf.is_meta or leaf.requires_grad)


def _tensors_in(frozen: Any) -> list[torch.Tensor]:
    if isinstance(frozen, Frozen):
        return [tensor for item in frozen.items for tensor in _tensors_in(item)]
    return [frozen] if _is_own_tensor(frozen) else []


# Tensors of one element: the script replaces them, or writes to those that there were.


def _scalars_in(frozen: Any) -> list[torch.Tensor]:
    if isinstance(frozen, Frozen):
        return [tensor for item in frozen.items for tensor in _scalars_in(item)]
    return [frozen] if is_scalar(frozen) else []


def _index(tensors: Sequence[torch.Tensor], leaf: Any) -> int | None:
    return next((index for index, tensor in enumerate(tensors) if tensor is leaf), None)


def _written(first: Sequence[torch.Tensor], put: Sequence[torch.Tensor], leaf: Any) -> Any:
    """The text for a leaf: of such a tensor which one it is, and its number."""
    if not is_scalar(leaf):
        return leaf
    index = _index(put, leaf)
    form = f"{leaf.dtype} {leaf.dim()} {leaf.item()!r}"
    if index is None:
        return f"{_TENSOR}first {_index(first, leaf)} {form}"
    return f"{_TENSOR}put {index} {form}"


def _read(
    first: Sequence[torch.Tensor],
    known: Sequence[torch.Tensor],
    put: dict[str, torch.Tensor],
    numbers: list[tuple[torch.Tensor, Any]],
    leaf: Any,
) -> Any:
    """The leaf again; a number that a tensor is to have is added to others.

    Of tensors the one that is there, if its value is that one: the script may hold it.
    """
    if isinstance(leaf, torch.Tensor):
        alike = (one for one in known if one.stride() == leaf.stride())
        return next((one for one in alike if has_same_bits(one, leaf)), leaf)
    if not (isinstance(leaf, str) and leaf.startswith(_TENSOR)):
        return leaf
    whose, index, dtype, dim, number = leaf.removeprefix(_TENSOR).split()
    if whose == "first":
        tensor = first[int(index)]
    else:
        made = torch.zeros((1,) * int(dim), dtype=getattr(torch, dtype.removeprefix("torch.")))
        tensor = put.setdefault(index, made)
    numbers.append((tensor, float(number) if tensor.is_floating_point() else int(number)))
    return tensor


def can_be_written(value: Any, _inside: tuple[int, ...] = ()) -> bool:
    """Whether a value that was written comes back as it was, classes of containers included."""
    kind = type(value)
    if is_exact(value):
        return True
    if isinstance(value, (SimpleNamespace, dict, list, tuple, set, frozenset, deque)):
        parts = [*keys_of(value), *values_of(value)] if is_mapping(value) else [*value]
        inside = (*_inside, id(value))
        is_plain_kind = kind in OF_VALUES and id(value) not in _inside
        return is_plain_kind and all(can_be_written(part, inside) for part in parts)
    if isinstance(value, Enum):
        return is_known_member(value)
    return value is MISSING or has_bits(value) or kind in _WRITTEN


OF_VALUES = (SimpleNamespace, Counter, OrderedDict, dict, list, tuple, set, frozenset, deque)
_WRITTEN = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, array),
    *(torch.dtype, torch.device),
)
_UNKNOWN = object()  # no value is the same
