"""A script that holds what stands for a kept tensor holds the value of its step, as in eager mode.

A step that leaves another tensor in a place writes its value into the same buffer. So if the script
holds what stands in the place (``saved = loss_fn.average``), that gets the value of before, and
something else stands in the place from then on. The script may put it back there later::

    loss_fn.average = saved         the next step goes on from the value that it has

Who holds it is told by the number of references to it, and to containers in which it stands: when a
step has begun, and before the next one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from graphsplit.capture.state.handed import labelled_leaves
from graphsplit.capture.state.kept_value import (
    KeptValue,
    Standing,
    follow,
    label_of,
    standing_of,
)
from graphsplit.errors import OwnershipError
from graphsplit.guards.changes import Change, leave_all
from graphsplit.guards.places import Place
from graphsplit.guards.values import freeze, paired
from graphsplit.torch_ext.attributes import buffers_of
from graphsplit.torch_ext.stand_ins import StandIn

# The places in which a network's code has left tensors, by identity: these are known beforehand.
kept_places: weakref.WeakKeyDictionary[nn.Module, dict[Any, Place]] = weakref.WeakKeyDictionary()

# What stands in the places for a network's buffers, by their names.
_stand_ins: weakref.WeakKeyDictionary[nn.Module, dict[str, KeptValue]] = weakref.WeakKeyDictionary()
# What did so before and is still held, by identity; each has its value where the buffer was.
_older: weakref.WeakValueDictionary[int, KeptValue] = weakref.WeakValueDictionary()
_counts: weakref.WeakKeyDictionary[nn.Module, _Counts] = weakref.WeakKeyDictionary()
_VALUE = "_graphsplit_value"
_IS_LOST = "_graphsplit_is_lost"


@dataclass(eq=False)
class _Counted:
    """A thing that the script may take: a stand-in for a kept tensor, or a container of such.

    Attributes:
        held: That.
        standing: Of what it would then hold.
        references: How many there were to it when the script had not run yet.
    """

    held: Any
    standing: tuple[Standing, ...]
    references: int = -1


class _Step(Protocol):
    """The part of a recorded step that is left in Python."""

    @property
    def changes(self) -> tuple[Change, ...]: ...
    @property
    def renewed(self) -> Renewed: ...


@dataclass(eq=False)
class _Counts:
    """The things of a network that the script may take, as it was when a step had begun.

    Attributes:
        things: That.
        latest: Gives the step.
    """

    things: Sequence[_Counted] = ()
    latest: Callable[[], _Step | None] = lambda: None


@dataclass(frozen=True)
class Renewed:
    """The kept tensors to which a step assigns.

    Attributes:
        names: The buffers to which it assigns.
        changes: The places of these, with what it leaves there.
    """

    names: frozenset[str] = frozenset()
    changes: tuple[Change, ...] = ()


NOTHING_RENEWED = Renewed()


def stand_ins_of(network: nn.Module) -> dict[str, KeptValue]:
    """The tensors that stand in Python places for a network's buffers, by their names."""
    return _stand_ins.setdefault(network, {})


def buffer_behind(value: KeptValue) -> torch.Tensor | None:
    """The buffer that holds what is kept in a place, for what stands there; None if none does."""
    for network, known in _stand_ins.items():
        for name, stand_in in known.items():
            if stand_in is value:
                return buffers_of(network).get(name)
    return None


def settle_older(network: nn.Module) -> None:
    """Go on from the values of what the script has put back into its place, if anything.

    Raises:
        OwnershipError: The buffer is needed for another value, too; or this one is not here.
    """
    if not _older:
        return
    known, found = stand_ins_of(network), list(_standing_in(network))
    places = {id(value): place for value, place in found}
    names = {id(value): name for name, value in known.items()}
    for value, place in found:
        standing, name = standing_of(value), names.get(id(value.latest()))
        if hasattr(value, _IS_LOST):
            raise _refusal(value, place, None)
        if standing.now is value or name is None:
            continue
        other = places.get(id(standing.now))
        buffer = buffers_of(network).get(name)
        kept = getattr(value, _VALUE, None)
        is_here = buffer is not None and not isinstance(buffer, StandIn)
        if other is not None or (is_here and kept is None):
            raise _refusal(value, place, other)
        _keep_value(standing.now, buffer)
        if buffer is not None and kept is not None:
            buffer.data.copy_(kept)
        vars(value).pop(_VALUE, None)
        standing.now, standing.is_held = value, True
        known[name] = value
        _older.pop(id(value), None)


def note_held(network: nn.Module) -> None:
    """Note whether the script has taken what stands in a place, since ``count_references``."""
    settle_older(network)
    for counted in _counts_of(network).things:
        if sys.getrefcount(counted.held) != counted.references:
            for standing in counted.standing:
                standing.is_held = True


def count_references(network: nn.Module) -> None:
    """Count who holds what stands in places, and the containers there."""
    for counted in _counts_of(network).things:
        counted.references = sys.getrefcount(counted.held)


def leave_and_count(network: nn.Module, step: _Step, lifted: Sequence[Any]) -> None:
    """Leave what a step leaves, before it computes.

    Args:
        network: The network.
        step: The step.
        lifted: Its lifted numbers.
    """
    counts, changes = _counts_of(network), (*step.changes, *_renewed_in(network, step.renewed))
    if changes:
        leave_all(changes, lifted)
    if changes or counts.latest() is not step:
        of_values = ((v, (standing_of(v),)) for v in _stand_ins.get(network, {}).values())
        counts.things = [_Counted(*one) for one in (*of_values, *_containers_in(network))]
        counts.latest = weakref.ref(step)
    count_references(network)


def _counts_of(network: nn.Module) -> _Counts:
    return _counts.get(network) or _counts.setdefault(network, _Counts())


def _renewed_in(network: nn.Module, renewed: Renewed) -> tuple[Change, ...]:
    """Begin with something new for what a step assigns, where the script may hold the old one.

    Returns:
        What the step is to leave, because places are to hold what is new.
    """
    known = stand_ins_of(network) if renewed.names else {}
    held = [name for name in renewed.names if standing_of(known[name]).is_held]
    for name in held:
        _keep_value(known[name], buffers_of(network).get(name))
        known[name] = follow(known[name])
    return renewed.changes if held else ()


def forget_older(network: nn.Module) -> None:
    """A worker comes back: its script may hold something else in place of these."""
    names = {id(value) for value in stand_ins_of(network).values()}
    for value in list(_older.values()):
        if id(value.latest()) in names:
            setattr(value, _IS_LOST, True)


def lost(like: torch.Tensor, label: str) -> KeptValue:
    """Make what stands for the tensor of a step that ran before the script began anew here."""
    made = KeptValue.of(like, label, "is of a step that ran before the script began anew here")
    setattr(made, _IS_LOST, True)
    _older[id(made)] = made
    return made


def _keep_value(older: KeptValue, buffer: torch.Tensor | None) -> None:
    if buffer is not None and not isinstance(buffer, StandIn):
        setattr(older, _VALUE, buffer.detach().clone())
    _older[id(older)] = older


def _containers_in(network: nn.Module) -> Iterator[tuple[Any, tuple[Standing, ...]]]:
    for place in kept_places.get(network, {}).values():
        value = place.read()
        for container, _ in paired(frozen := freeze(value), value):
            leaves = (leaf for leaf, _ in labelled_leaves(frozen, ""))
            yield container, tuple([standing_of(v) for v in leaves if isinstance(v, KeptValue)])


def _standing_in(network: nn.Module) -> Iterator[tuple[KeptValue, Place]]:
    for place in kept_places.get(network, {}).values():
        for leaf, _ in labelled_leaves(freeze(place.read()), ""):
            if isinstance(leaf, KeptValue):
                yield leaf, place


def _refusal(value: KeptValue, place: Place, other: Place | None) -> OwnershipError:
    why = f"{other.label} has the value of a later one" if other is not None else "it is not here"
    return OwnershipError(
        f"the script has put into {place.label} what it had taken from {label_of(value)} after an "
        f"earlier step; its value is that of this step, and {why}\n"
        f"  Fix: keep it in a buffer (register_buffer), and take a copy of that."
    )
