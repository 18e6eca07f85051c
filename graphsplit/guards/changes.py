"""Changes that forward and loss leave in Python state, made again at every step.

A captured graph computes values; it does not run the Python code again. So what the code leaves is
found out when it is captured, taken away, and left at each step on every worker::

    self.length = x.shape[1]      a plain value: left again at every step
    self.calls += 1               a number made of what was there: computed again
    self.seen.append(epoch)       a container: gets the same contents
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from graphsplit.errors import CaptureError
from graphsplit.guards.classes import attributes_of, is_plain_class, put_attributes
from graphsplit.guards.places import Place, PlaceKind, inside
from graphsplit.guards.values import (
    MISSING,
    MUTABLE,
    SYMBOLIC,
    Frozen,
    ValueDifference,
    any_leaf,
    differences,
    freeze,
    holder_of,
    is_plain,
    items_of,
    paired,
    put_back,
    reference_of,
    same,
    shown,
    thaw,
    with_leaves,
)
from graphsplit.guards.visitor import Noted
from graphsplit.torch_ext.attributes import BufferForm
from graphsplit.torch_ext.private import FakeTensor
from graphsplit.torch_ext.replaced import real_function
from graphsplit.torch_ext.stand_ins import StandIn


@dataclass(frozen=True, eq=False)
class Computed:
    """A number that is made of lifted ones.

    Attributes:
        function: What makes it; None for a lifted number itself.
        arguments: Its arguments, computed ones among them; the position of the lifted number.
    """

    function: Callable[..., Any] | None
    arguments: tuple[Any, ...]

    def value(self, lifted: Sequence[Any], known: dict[int, Any] | None = None) -> Any:
        """The number, for some values of the lifted ones; ``known`` holds what was computed."""
        if self.function is None:
            return lifted[self.arguments[0]]
        known = {} if known is None else known
        if id(self) not in known:
            known[id(self)] = self.function(*(value_of(a, lifted, known) for a in self.arguments))
        return known[id(self)]

    def __str__(self) -> str:
        return self.of("lifted {}".format)

    def of(self, name: Callable[[int], str]) -> str:
        """How it is made, with a name for each lifted number by its position."""
        if self.function is None:
            return name(self.arguments[0])
        made = (a.of(name) if isinstance(a, Computed) else str(a) for a in self.arguments)
        return f"{getattr(self.function, '__name__', self.function)}({', '.join(made)})"


def value_of(value: Any, lifted: Sequence[Any], known: dict[int, Any] | None = None) -> Any:
    """A value that may be computed."""
    return value.value(lifted, known) if isinstance(value, Computed) else value


@dataclass(frozen=True, eq=False)
class Change:
    """A place in which forward leaves another value.

    Attributes:
        place: The place.
        old: The snapshot of what was there; ``MISSING`` where there was nothing.
        new: The snapshot of what is left, with ``Computed`` numbers; ``MISSING`` if deleted.
        is_read: Whether the code read it before: then the next step may have another graph.
        held_at: Other places, with what was there, whose containers are in what is left here.
        made: Objects that forward has made and that are in what is left here, each with the
            snapshot of its attributes.
        behind: What was changed in containers that no place holds any more: the script may.
    """

    place: Place
    old: Any
    new: Any
    is_read: bool
    held_at: tuple[tuple[Place, Any], ...] = ()
    made: tuple[tuple[Any, Frozen], ...] = ()
    behind: tuple[Frozen, ...] = ()

    def named(self, lifted: Sequence[Place]) -> str:
        """The change for people; of a lifted number its value is no part of it."""
        is_lifted = isinstance(self.old, (Computed, *SYMBOLIC))
        before = "" if is_lifted else f" from {shown(self.old)}"
        new = with_leaves(self.new, lambda leaf: _named(leaf, lifted))
        new = new if isinstance(self.new, Computed) else shown(new)
        return f"{self.place.label}{before} to {new}"

    def with_names(self) -> list[Any]:
        """A name for each object made in what is left; its attributes and what is behind, too."""
        names = {id(one): f"new {type(one).__name__} {i}" for i, (one, _) in enumerate(self.made)}
        found = (self.new, *(own for _, own in self.made), *self.behind)
        return [with_leaves(one, lambda leaf: names.get(id(leaf), leaf)) for one in found]

    def told(self) -> str:
        """The place and what is left there, as every worker would say it."""
        new = self.new
        if isinstance(new, (Computed, BufferForm)):
            return f"{self.place.label}: {new}"
        if isinstance(new, torch.Tensor):  # of another class where its value is on another worker
            return f"{self.place.label}: Tensor"
        is_plain_value = new is MISSING or is_plain(new)
        return f"{self.place.label}: {shown(new) if is_plain_value else type(new).__name__}"


def _named(leaf: Any, lifted: Sequence[Place]) -> Any:
    """How a number is made of those in some places, for people; anything else as it is."""
    return leaf.of(lambda n: lifted[n].label) if isinstance(leaf, Computed) else leaf


def leave_all(changes: Sequence[Change], lifted: Sequence[Any]) -> None:
    """Leave all values of a step; in a container that is still there, its contents.

    One container in two places is one afterwards, too: what changes it in one changes the other.
    Objects that forward has made are left as it made them.

    Args:
        changes: What to leave.
        lifted: The numbers from which others are computed.

    Raises:
        CaptureError: An object was changed, and cannot be made again.
    """
    held: dict[int, Any] = {}
    for place, old in _found_at(changes):
        if isinstance(old, Frozen):
            for container, now in paired(old, place.read()):
                held.setdefault(id(container), now)
    _make_again([change for change in changes if change.made], held, lifted)
    for left_behind in chain.from_iterable(change.behind for change in changes):
        _left(left_behind, held, lifted)
    for change in changes:
        left = _left(change.new, held, lifted)
        if not isinstance(change.new, Frozen) or left is not change.place.read():
            change.place.write(left)


def _found_at(changes: Sequence[Change]) -> Iterator[tuple[Place, Any]]:
    """Places with what was there: first those that code reads, where others may have been put."""
    yield from ((change.place, change.old) for change in changes if change.is_read)
    yield from chain.from_iterable(change.held_at for change in changes)
    yield from ((change.place, change.old) for change in changes if not change.is_read)


def _make_again(changes: Sequence[Change], held: dict[int, Any], lifted: Sequence[Any]) -> None:
    """Find what stands for objects that forward has made: new ones, as it makes at each call.

    Where it goes on from the last one, that itself while it is as it was made: the steps that were
    recorded for it then hold.

    Raises:
        CaptureError: They were changed, and cannot be made again.
    """
    made = {id(one): (one, own) for change in changes for one, own in change.made}
    other = [one for one, own in made.values() if not same(own, attributes_of(one))]
    fixed = [one for one, own in made.values() if not _can_be_made(one, own, made)]
    if not other and (fixed or all(change.is_read for change in changes)):
        for container in (c for _, own in made.values() for c in containers_in(own)):
            held.setdefault(id(container), container)
        return
    if fixed:
        place = next(change.place for change in changes)
        raise CaptureError(
            f"network or loss makes {shown(fixed[0])} for {place.label}, which was changed since; "
            f"an object of a class of Python's own, or with a function that leads to it, cannot be "
            f"made again\n  {place.source}\n"
            f"  Fix: make it before the first step, and let forward change its attributes; or keep "
            f"the code around it whole with gs.opaque."
        )
    held.update((number, object.__new__(type(one))) for number, (one, _) in made.items())
    for number, (_, own) in made.items():
        items = [_left(item, held, lifted) for item in own.items]
        put_attributes(held[number], dict(zip(own.keys, items, strict=True)))


def _can_be_made(one: Any, own: Frozen, made: Container[int]) -> bool:
    """Whether an object is nothing but its attributes, none of which knows such an object."""

    def knows_one(leaf: Any) -> bool:
        inside: list[Any] = []
        if isinstance(leaf, MethodType):
            inside = [leaf.__self__]
        elif isinstance(leaf, FunctionType):
            inside = gc.get_referents(*(leaf.__closure__ or ()))
        return any(id(held) in made for held in inside)

    return is_plain_class(type(one)) and not any_leaf(own, knows_one)


def latest(frozen: Any) -> Any:
    """A snapshot with what stands for tensors now, where other things did when it was taken."""
    return with_leaves(frozen, lambda leaf: leaf.latest() if isinstance(leaf, StandIn) else leaf)


def _left(new: Any, held: dict[int, Any], lifted: Sequence[Any]) -> Any:
    """The value to leave, in the containers that are there; in new ones where forward made them."""
    if not isinstance(new, Frozen):
        return held[id(new)] if id(new) in held else latest(value_of(new, lifted))
    again = replace(new, items=tuple([_left(item, held, lifted) for item in new.items]))
    known = held.get(id(new.container))
    if known is None:
        known = held[id(new.container)] = thaw(again)
        return known
    return put_back(replace(again, container=known))


def change_of(noted: Noted, compute: Callable[[Any], Computed]) -> Change:
    """The change of a place from what was there first to what is there now, be it none."""
    new = freeze(noted.place.read())
    return _with_numbers(Change(noted.place, noted.first, new, noted.is_read), compute)


def changes_of(
    noted: Mapping[Any, Noted],
    compute: Callable[[Any], Computed],
    has_made: Callable[[Any], bool],
) -> tuple[Change, ...]:
    """Find changes in the places that were read or written, and put all of them back.

    Args:
        noted: The places.
        compute: How a number without value that was left is made of the lifted ones.
        has_made: Whether the code has made an object.

    Raises:
        CaptureError: Something was left that cannot be left again, and that is read.
    """
    try:
        found = list(_changes_in(from_before(noted), has_made))
    finally:
        put_all_back(noted.values())
    made = [_with_numbers(change, compute) for change in found]
    return tuple(change for change in made if _can_be_left(change))


def from_before(noted: Mapping[Any, Noted]) -> dict[Any, Noted]:
    """The places but those in containers that forward has made, which the next step makes anew."""
    found = {key: one for key, one in noted.items() if not one.place.is_inside}
    held, new = set[int](), list(found.values())
    while new:
        held.update(id(holder_of(item)) for one in new for item in containers_in(one.first))
        inner = {
            k: one for k, one in noted.items() if k not in found and id(one.place.holder) in held
        }
        found.update(inner)
        new = list(inner.values())
    return {key: one for key, one in noted.items() if key in found}


def _changes_in(noted: Mapping[Any, Noted], has_made: Callable[[Any], bool]) -> Iterator[Change]:
    held_at = _places_ofcontainers_in(noted.values())
    for one in noted.values():
        now = one.place.read()
        is_left = one.is_written and not one.is_read  # whatever was there
        told = (_is_noted(one, difference, noted) for difference in differences(one.first, now))
        if all(told) and not is_left and not _is_another(one, one.first, now, noted):
            continue
        new = freeze(now)
        objects = tuple(made_in(new, has_made))
        snapshots = (new, *(own for _, own in objects))
        others = {
            id(other): (other.place, other.first)
            for container in chain.from_iterable(map(containers_in, snapshots))
            for other in held_at.get(id(container), ())[:1]
            if other is not one
        }
        held = tuple(others.values())
        behind = tuple(_left_behind(one.first, noted.values()))
        yield Change(one.place, one.first, new, one.is_read, held, objects, behind)


def snapshots_in(frozen: Any) -> Iterator[Frozen]:
    """The snapshots of a container and of those in it."""
    if isinstance(frozen, Frozen):
        yield frozen
        for item in frozen.items:
            yield from snapshots_in(item)


def containers_in(frozen: Any) -> Iterator[Any]:
    """The containers in a snapshot."""
    return (one.container for one in snapshots_in(frozen))


def _left_behind(first: Any, noted: Iterable[Noted]) -> Iterator[Frozen]:
    """The contents of containers that were changed, and that no place holds any more."""
    changed = [
        one.container
        for one in snapshots_in(first)
        if isinstance(one.container, MUTABLE) and not same(one, one.container)
    ]
    if changed:
        now = chain.from_iterable(containers_in(freeze(one.place.read())) for one in noted)
        held = set(map(id, now))
        for container in changed:
            frozen = freeze(container)
            if id(container) not in held and not holds(frozen, _has_no_value):
                yield frozen


def made_in(frozen: Any, has_made: Callable[[Any], bool]) -> list[tuple[Any, Frozen]]:
    """The objects in a snapshot, and in such objects, that the code has made."""
    found: dict[int, tuple[Any, Frozen]] = {}

    def find(leaf: Any) -> bool:
        if has_made(leaf) and id(leaf) not in found:
            own = freeze(attributes_of(leaf))
            found[id(leaf)] = leaf, own
            any_leaf(own, find)
        return False

    any_leaf(frozen, find)
    return list(found.values())


def _places_ofcontainers_in(noted: Iterable[Noted]) -> dict[int, list[Noted]]:
    """The places in which each container was first, those that were read before others."""
    found: dict[int, list[Noted]] = {}
    for one in sorted(noted, key=lambda one: not one.is_read):
        for container in containers_in(one.first):
            found.setdefault(id(container), []).append(one)
    return found


def _is_another(one: Noted, first: Any, now: Any, noted: Mapping[Any, Noted]) -> bool:
    """Whether a container is not that of a snapshot, or one in it that is no noted place's own.

    What it holds may be the same: others may know it.
    """
    if not isinstance(first, Frozen):
        return False
    if first.container is not now and isinstance(now, MUTABLE):
        return True
    if first.content is not None or isinstance(now, (set, frozenset)):
        return False
    keys = first.keys or range(len(first.items))
    return any(
        inside(now, key, one.place).identity not in noted and _is_another(one, item, held, noted)
        for key, item, held in zip(keys, first.items, items_of(now), strict=True)
        if isinstance(item, Frozen)
    )


def put_all_back(noted: Iterable[Noted]) -> None:
    """Let all places hold what they held first: first the containers that others are items of.

    Context variables stay: what is captured has a context of its own, which ends with it.
    """
    places = [one for one in noted if one.place.kind is not PlaceKind.CONTEXT]
    places.reverse()
    for one in places:
        put_back(one.first)
    for one in places:
        if one.place.read() is not reference_of(one.first):
            one.place.write(reference_of(one.first))


def _with_numbers(change: Change, compute: Callable[[Any], Computed]) -> Change:
    """A change, with how the numbers in it are made; those in objects must not be of values.

    What stands for a function while code is recorded is not left.
    """

    def number(leaf: Any) -> Any:
        return compute(leaf) if isinstance(leaf, SYMBOLIC) else real_function(leaf)

    # Read or not: the script may look at it.
    holds(change.new, lambda leaf: number(leaf) is None)
    made = tuple((one, with_leaves(own, number)) for one, own in change.made)
    return replace(change, new=with_leaves(change.new, number), made=made)


def holds(value: Any, test: Callable[[Any], bool], depth: int = 3) -> bool:
    """Whether a value holds something of which a test is true, in attributes of objects too."""

    def is_held(leaf: Any) -> bool:
        if test(leaf):
            return True
        held = None if isinstance(leaf, (type, nn.Module, ModuleType)) else attributes_of(leaf)
        if not held or not depth:
            return False
        return any(holds(inner, test, depth - 1) for inner in list(held.values()))

    return any_leaf(freeze(value), is_held)


def _is_fake(value: Any) -> bool:
    """Whether a value is a tensor that has no values."""
    return isinstance(value, (FakeTensor, torch.fx.Proxy))


def _has_no_value(value: Any) -> bool:
    return _is_fake(value) or isinstance(value, SYMBOLIC)


def _has_fake_key(frozen: Any) -> bool:
    """Whether a mapping in a snapshot has a tensor without values as a key."""
    if not isinstance(frozen, Frozen):
        return False
    is_one = any(isinstance(key, FakeTensor) for key in frozen.keys)
    return is_one or any(map(_has_fake_key, frozen.items))


def _is_noted(one: Noted, difference: ValueDifference, noted: Mapping[Any, Noted]) -> bool:
    """Whether a difference is that of an entry which is a noted place of its own."""
    held = difference.container
    if held is None or difference.key is None:
        return False
    return inside(held, difference.key, one.place).identity in noted


def _can_be_left(change: Change) -> bool:
    """Whether a change is one of values; tensors without values that nobody reads may go."""
    if _has_fake_key(change.new):
        raise CaptureError(
            f"network or loss puts a tensor into {change.place.label} as a key; the captured graph "
            f"would not\n"
            f"  {change.place.source}\n"
            f"  Fix: take its name as the key, or put it there before the first step."
        )
    if not holds(change.new, _is_fake):
        return True
    is_in_object = not any_leaf(change.new, _is_fake)  # where no buffer stands for it
    if change.is_read and (change.place.module is None or is_in_object):
        raise CaptureError(
            f"network or loss changes {change.place.label} at every call, from "
            f"{shown(change.old)} to {shown(change.new)}; the captured graph would not\n"
            f"  {change.place.source}\n"
            f"  Fix: keep tensors that a later call reads in buffers of a module "
            f"(register_buffer), plain values in attributes; or keep the code around it whole "
            f"with gs.opaque."
        )
    return False
