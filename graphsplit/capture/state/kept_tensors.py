"""Tensors that code keeps in Python: an average in an attribute of a loss, features in a list.

A captured graph computes values; the Python that would put them where the next call looks for them
does not run again. So each tensor that is left in a place is given a buffer of the network, which
is not persistent: the graph copies the value into it, and what stands for it is in the place::

    self.average = 0.9 * self.average + 0.1 * loss.detach()     in a loss that is no module
    features["encoder"] = output                                in a hook
    self.past.append(loss.detach())                             None, [], or another number before:
                                                                the next step has another graph

A tensor that the user has put there is copied into the buffer first; one that code modifies in
place becomes the buffer itself. What else stands there has no value that the script could read: in
eager mode a reference to it would keep the value of its step, and the buffer moves on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from graphsplit.capture.numbers.lifted import computed
from graphsplit.capture.state.assigned_buffers import Assigned, AssignedBuffers
from graphsplit.capture.state.handed import (
    Handed,
    labelled_leaves,
    put_leaves,
    swap,
    tensors_in_objects,
)
from graphsplit.capture.state.kept_value import (
    KeptValue,
    may_be_a_buffer,
    note_first,
    refuse_moved,
    refuse_other,
    shares_memory,
)
from graphsplit.capture.state.older_values import Renewed, kept_places, stand_ins_of
from graphsplit.capture.state.own_buffers import is_own, note_own, own_buffer
from graphsplit.errors import CaptureError
from graphsplit.guards.changes import Change, change_of, latest, put_all_back
from graphsplit.guards.places import Place, PlaceKind
from graphsplit.guards.values import MISSING, any_leaf, freeze, put_back, with_leaves
from graphsplit.guards.visitor import Noted
from graphsplit.torch_ext.attributes import (
    BufferForm,
    add_form,
    buffers_of,
    named_tensors,
    shown_form,
    storage_of,
)
from graphsplit.torch_ext.private import FakeTensor
from graphsplit.torch_ext.stand_ins import StandIn

KEPT = "kept "
_LAST = "is that of the latest call"


class KeepsTensorsError(CaptureError):
    """Code leaves tensors in places that have no buffers for them yet, or not their values.

    Attributes:
        wanted: What the buffers must be.
        places: Places that hold parameters or buffers and were not known to.
        shared: Buffers, by module and name, to which something is assigned, and of which the script
            may hold the present tensor: that must stay as it is.
        forms: Buffers that get another form, for which no tensor waits.
    """

    def __init__(
        self,
        wanted: Mapping[str, _Wanted],
        places: Iterable[Place] = (),
        shared: Iterable[tuple[nn.Module, str]] = (),
        forms: Iterable[Assigned] = (),
    ) -> None:
        super().__init__("tensors are kept in Python")
        self.wanted = wanted
        self.places = tuple(places)
        self.shared = tuple(shared)
        self.forms = tuple(forms)

    @property
    def subjects(self) -> frozenset[Any]:
        """All that it is about."""
        places = {place.identity for place in self.places}
        buffers = [*self.shared, *((one.module, one.waiting) for one in self.forms)]
        return frozenset((*self.wanted, *places, *((id(m), name) for m, name in buffers)))

    def refusal(self) -> CaptureError:
        """The error where buffers do not help."""
        places = [*(one.place for one in self.wanted.values()), *self.places]
        buffers = [*(name for _, name in self.shared), *(one.name for one in self.forms)]
        labels = [place.label for place in places] or buffers
        return CaptureError(
            f"network or loss keeps tensors in {', '.join(labels)}, which cannot be followed from "
            f"step to step\n  {places[0].source if places else ''}\n"
            f"  Fix: keep them in buffers of a module (register_buffer), each in one of its own; "
            f"or keep the code around it whole with gs.opaque."
        )


@dataclass(frozen=True)
class _Wanted:
    """A buffer that is to hold what a place keeps.

    Attributes:
        like: The form of what is kept.
        place: Where it is kept.
        label: The same with where it is in there.
        old: The tensor that the user has put there; None if there is none of this form.
        is_itself: Whether that very tensor becomes the buffer: code modifies it in place.
    """

    like: torch.Tensor
    place: Place
    label: str
    old: torch.Tensor | None = None
    is_itself: bool = False


@dataclass(frozen=True)
class _Left:
    """A tensor without values that code has left.

    Attributes:
        value: The tensor.
        label: Its place, for people, and where it is in there.
        old: What was in the same position before.
        place: The place.
    """

    value: torch.Tensor
    label: str
    old: Any
    place: Place


class KeptTensors:
    """The tensors that are kept in Python while a step is recorded once.

    Args:
        root: Holds the network and the loss.

    Attributes:
        has_made: Whether the code has made an object.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._network: nn.Module = getattr(root, "network", root)
        self.has_made: Callable[[Any], bool] = lambda one: False
        self._state = named_tensors(root)
        self._buffers = [
            (module, name, buffer)
            for module in root.modules()
            for name, buffer in buffers_of(module).items()
        ]
        self._places = kept_places.get(self._network, {})
        self._stand_ins = stand_ins_of(self._network)
        self._held = {id(t) for t in (*self._state.values(), *self._stand_ins.values())}
        self._before: list[tuple[Place, Any]] = []
        self._real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what stands for state
        self._reforms: list[Assigned] = []
        self.handed: list[Handed] = []
        self.renewed = Renewed()

    def bring_in(self) -> None:
        """Put what stands for parameters and buffers into the places that hold them."""
        standing = {}
        for name, now in named_tensors(self._root).items():
            real, stand_in = self._state[name], self._stand_in(name)
            standing.update({id(real): now, id(stand_in): now})
            self._real[id(now)] = (now, stand_in)
        for place in self._places.values():
            value = freeze(place.read())
            if any_leaf(value, lambda leaf: id(leaf) in standing):
                self._before.append((place, value))
                put_leaves(place, with_leaves(value, lambda leaf: standing.get(id(leaf), leaf)))

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take tensors without values that stand in places for none that code has left."""
        self._real.update((id(tensor), (tensor, tensor)) for tensor in tensors)

    def put_back(self) -> None:
        """Let places hold what they held before ``bring_in``."""
        for place, value in self._before:
            there = put_back(value)
            if place.read() is not there:
                place.write(there)
        self._before = []

    def _may_be_left(self, leaf: Any) -> bool:
        return (
            isinstance(leaf, FakeTensor) and self._real.get(id(leaf), (leaf, None))[1] is not leaf
        )

    def real_of(self, leaf: Any) -> Any:
        """The tensor that a place holds while nothing is recorded; anything else as it is."""
        return self._real[id(leaf)][1] if id(leaf) in self._real else leaf

    def settle(
        self, noted: Mapping[Any, Noted], assigned: AssignedBuffers, *, hands_out: bool
    ) -> None:
        """Have what was left copied into buffers, and put these where it was left.

        Args:
            noted: The places that code has read or written.
            assigned: Told of the copies.
            hands_out: Whether the script is handed what was left.

        Raises:
            KeepsTensorsError: Buffers are missing, or have not the values that the user has put
                into the places.
            CaptureError: Something is left that a buffer cannot stand for.
        """
        reforms = assigned.reforms()
        places = {
            identity: one
            for identity, one in noted.items()
            if any_leaf(freeze(one.place.read()), self._may_be_left)
            and (identity in self._places or not may_be_a_buffer(one.first, one.place))
        }
        left = [item for one in places.values() for item in _left_in(one)]
        to_hand = [item for item in left if hands_out and id(item.value) not in self._real]
        if hands_out:
            left = _read_again(left, places.values())
        not_kept = self._not_kept(left)
        taken = self._held_elsewhere(noted)
        names = self._named([item for item in left if id(item.value) not in not_kept], taken)
        wanted, unknown = self._wanted(left, names), self.unknown(noted)
        shared = [one for one in assigned.assigned() if not self._is_own(*one)]
        forms = [r for r in reforms if r.is_tensor and r.waiting not in buffers_of(r.module)]
        if wanted or unknown or shared or forms:
            put_all_back(noted.values())
            raise KeepsTensorsError(wanted, unknown, shared, forms)
        self._reforms = reforms
        buffers = buffers_of(self._network)
        final: dict[int, Any] = {id(i.value): self._without_buffer(i.label, _LAST) for i in to_hand}
        for item in left:
            name = names.get(id(item.value))
            if name is not None:
                if item.value is not buffers[name]:
                    assigned.assign(self._network, name, item.value, item.place.source)
                final[id(item.value)] = self._stand_in(f"{self._prefix}{name}")
            elif id(item.value) in not_kept:
                why = not_kept[id(item.value)]
                final[id(item.value)] = self._without_buffer(item.label, why)
            else:
                final[id(item.value)] = self.real_of(item.value)
        self.handed = [Handed(i.place, final[id(i.value)], i.value) for i in to_hand]
        self.handed += self._in_objects(noted.values(), hands_out=hands_out)
        known = kept_places.setdefault(self._network, {}) if places else {}
        for identity, one in places.items():
            if not one.place.is_inside:
                known[identity] = one.place
            value = freeze(one.place.read())
            put_leaves(one.place, with_leaves(value, lambda leaf: final.get(id(leaf), leaf)))
        if not hands_out:
            self.renewed = self._renewed(places, left, names)

    def _in_objects(self, noted: Iterable[Noted], *, hands_out: bool) -> list[Handed]:
        why = _LAST if hands_out else "stands in an object that forward makes"
        stand_in = partial(self._without_buffer, why=why)
        found = tensors_in_objects(noted, self.has_made, self.real_of, stand_in)
        return found if hands_out else []

    def _renewed(
        self, places: Mapping[Any, Noted], left: list[_Left], names: Mapping[int, str]
    ) -> Renewed:
        """The buffers that get new tensors, with what is left in the places of these."""
        own, named = buffers_of(self._network), [(names.get(id(item.value)), item) for item in left]
        new = [(name, item.place) for name, item in named if name and item.value is not own[name]]
        changes = {p.identity: change_of(places[p.identity], computed) for _, p in new}
        return Renewed(frozenset(dict(new)), tuple(changes.values()))

    def _is_own(self, module: nn.Module, name: str) -> bool:
        """Whether a buffer is a copy that nobody else holds."""
        real = next(b for m, n, b in self._buffers if m is module and n == name)
        return is_own(real) or isinstance(real, StandIn)

    def changes(self, label_of: Callable[[str], str]) -> tuple[Change, ...]:
        """The buffers that a step leaves in another form, once the recording is over."""
        paths = {id(module): path for path, module in self._root.named_modules()}
        real = {(id(module), name): buffer for module, name, buffer in self._buffers}
        found = []
        for one in self._reforms:
            path, number = paths[id(one.module)], id(one.module)
            label = f"{label_of(path)}.{one.name}"
            place = Place(PlaceKind.BUFFER, vars(one.module), one.name, label, one.line, path)
            new, old = one.new, real.get((number, one.name), MISSING)
            if one.is_tensor:
                new = BufferForm(real[number, one.waiting], new.is_saved)
            found.append(Change(place, old, new, is_read=True))
        return tuple(found)

    def unknown(self, noted: Mapping[Any, Noted]) -> list[Place]:
        """Places that hold parameters or buffers, and were not known to."""
        return [
            one.place
            for identity, one in noted.items()
            if identity not in self._places
            and not one.place.is_inside
            and any_leaf(latest(one.first), lambda leaf: id(leaf) in self._held)
            and not any_leaf(freeze(one.place.read()), lambda leaf: id(leaf) in self._real)
        ]

    def refuse_others(self, noted: Mapping[Any, Noted]) -> None:
        """Refuse what another network keeps: its loss is that of another Model, too.

        Raises:
            OwnershipError: Code has read such a value.
        """
        for one in noted.values():
            for leaf, label in labelled_leaves(latest(one.first), one.place.label):
                if isinstance(leaf, KeptValue) and id(leaf) not in self._held:
                    refuse_other(leaf, label)

    @property
    def _prefix(self) -> str:
        return "" if self._network is self._root else "network."

    def _stand_in(self, name: str) -> torch.Tensor:
        """The tensor in places that hold a parameter or buffer, by its name below the root."""
        return self._stand_ins.get(name.removeprefix(self._prefix), self._state[name])

    def _without_buffer(self, label: str, why: str) -> KeptValue:
        """The stand-in of a tensor that is not kept."""
        known = stand_ins_of(self._network)
        return known.setdefault(f"{KEPT}{label}", KeptValue.of(torch.empty(0), label, why))

    def _held_elsewhere(self, noted: Container[Any]) -> set[str]:
        """The buffers of places that this code does not use, as those of another loss."""
        kept = [name for name in self._state if name.startswith(f"{self._prefix}{KEPT}")]
        names = {id(self._stand_in(name)): name.removeprefix(self._prefix) for name in kept}
        places = (p for identity, p in self._places.items() if identity not in noted)
        leaves = (leaf for place in places for leaf, _ in labelled_leaves(freeze(place.read()), ""))
        held = {id(self.real_of(leaf)) for leaf in leaves}
        return {name for number, name in names.items() if number in held}

    def _named(self, left: list[_Left], taken: Collection[str]) -> dict[int, str]:
        """The buffer of each tensor that is left and is not itself state: one for each object."""
        own = {id(buffer): name for name, buffer in buffers_of(self._network).items()}
        names: dict[int, str] = {}
        for item in left:
            number = id(item.value)
            held = own.get(number, "")
            is_state = number in self._real and not held.startswith(KEPT)
            if number in names or is_state:
                continue
            name = base = _name_of(item.label, item.value)
            count = 1
            while name in taken or name in names.values():
                count += 1
                name = f"{base} {count}"
            names[number] = name
        return names

    def _not_kept(self, left: list[_Left]) -> dict[int, str]:
        """The tensors that no buffer can hold, each with why: nobody may read them later.

        A copy of a view would not follow what it is a view of.
        """
        owners = {
            storage_of(now): name.removeprefix(self._prefix)
            for name, now in named_tensors(self._root).items()
            if not name.startswith(f"{self._prefix}{KEPT}")
        }
        first: dict[int, int] = {}
        found: dict[int, str] = {}
        for item in left:
            number = id(item.value)
            if number in self._real:
                continue
            if item.value.layout is not torch.strided:
                found[number] = "is not dense"
            elif any(isinstance(size, torch.SymInt) for size in item.value.shape):
                found[number] = "has another size in other batches"
            else:
                storage = storage_of(item.value)
                if storage in owners or first.setdefault(storage, number) != number:
                    base = owners.get(storage, "another tensor that is kept")
                    found[number] = f"is a view of {base}: keep a copy (clone)"
        return found

    def _wanted(self, left: list[_Left], names: Mapping[int, str]) -> dict[str, _Wanted]:
        """The buffers that are missing, or that must first get a value of the user's."""
        found: dict[str, _Wanted] = {}
        for item in left:
            name = names.get(id(item.value))
            if name is None or name in found:
                continue
            is_kept = isinstance(item.old, KeptValue) or id(item.old) in self._held
            is_made = isinstance(item.old, FakeTensor)  # by this code, in a container of its own
            is_users = isinstance(item.old, torch.Tensor) and not is_kept and not is_made
            old = item.old if is_users and shown_form(item.old) == shown_form(item.value) else None
            if old is not None or buffers_of(self._network).get(name) is None:
                found[name] = _Wanted(item.value, item.place, item.label, old)
        return found


def register(network: nn.Module, name: str, buffer: torch.Tensor) -> None:
    """Register a buffer for what is kept."""
    network.register_buffer(name, buffer, persistent=False)
    put_kept_last(network)


def put_kept_last(network: nn.Module) -> None:
    """Order a network's buffers whenever they were registered: workers record the same graphs."""
    buffers = buffers_of(network)
    for kept in sorted(name for name in buffers if name.startswith(KEPT)):
        buffers[kept] = buffers.pop(kept)


def keep(root: nn.Module, found: KeepsTensorsError) -> None:
    """Give the network the buffers that are wanted, with the values that they must have."""
    network: nn.Module = getattr(root, "network", root)
    places, stand_ins = kept_places.setdefault(network, {}), stand_ins_of(network)
    refuse_moved(found.places, places.values())
    places.update({place.identity: place for place in found.places})
    for module, name in found.shared:
        own_buffer(module, name)
    for form in found.forms:
        tensor = _like(form.new.tensor)
        add_form(form.module, form.name, tensor)
        note_own(tensor)
    for name, one in found.wanted.items():
        if not one.place.is_inside:
            places[one.place.identity] = one.place
        while one.is_itself and buffers_of(network).get(name, one.old) is not one.old:
            name = f"{name} 2"
        buffer = buffers_of(network).get(name)
        if buffer is None:
            buffer = one.old if one.is_itself and one.old is not None else _like(one.like)
            register(network, name, buffer)
            if not one.is_itself:
                stand_ins.setdefault(name, KeptValue.of(buffer, one.label))
        if one.old is None or buffer is one.old:
            continue
        if not isinstance(buffer, StandIn):  # its value lives on another worker
            with torch.no_grad():
                buffer.copy_(one.old)
        stand_in = stand_ins.get(name, buffer)
        note_first(stand_in, one.old)
        swap(one.place, {id(one.old): stand_in})


def kept_in(noted: Iterable[Noted], tensor: torch.Tensor) -> dict[str, _Wanted]:
    """The buffer for a tensor that code modifies in place; nothing if no place holds just that."""
    storage = storage_of(tensor)
    found: dict[int, tuple[torch.Tensor, str, Place]] = {}
    for one in noted:
        for leaf, label in labelled_leaves(one.first, one.place.label):
            if shares_memory(leaf, storage):
                found.setdefault(id(leaf), (leaf, label, one.place))
    if len(found) != 1:
        return {}
    leaf, label, place = next(iter(found.values()))
    return {_name_of(label, leaf): _Wanted(leaf, place, label, leaf, is_itself=True)}


def _read_again(left: Iterable[_Left], places: Iterable[Noted]) -> list[_Left]:
    """Those that are left where code may look for them at the next call."""
    read = {id(one.place) for one in places if one.is_read}
    values = {id(item.value) for item in left if id(item.place) in read}
    return [item for item in left if id(item.value) in values]


def _left_in(one: Noted) -> Iterator[_Left]:
    before = {label: leaf for leaf, label in labelled_leaves(one.first, one.place.label)}
    for leaf, label in labelled_leaves(freeze(one.place.read()), one.place.label):
        if isinstance(leaf, FakeTensor):
            yield _Left(leaf, label, before.get(label), one.place)


def _name_of(label: str, tensor: torch.Tensor) -> str:
    """The name of a buffer: the place, and the form, which may change from step to step."""
    return f"{KEPT}{label} {shown_form(tensor)}".replace(".", "·")


def _like(tensor: torch.Tensor) -> torch.Tensor:
    form = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    return torch.empty_strided(*form, dtype=tensor.dtype, device=tensor.device).zero_()
