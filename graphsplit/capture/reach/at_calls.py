"""Values that code kept whole finds in Python: those that stand there when it is called.

The Python code of a step does not run with it: what it leaves is left before the step computes
(``guards.changes``). Code kept whole does run then, and would read that::

    self.depth = 3
    h = self.whole(h)        reads 3, as in eager mode
    self.depth = 0           and this is what is left

So where it would find something else, the value of its moment stands in the place while it runs
(docs/design/0052).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import torch

from graphsplit.capture.reach.state import Reached
from graphsplit.errors import CaptureError
from graphsplit.guards.changes import Change, Computed, holds, snapshots_in, value_of
from graphsplit.guards.places import Place, inside
from graphsplit.guards.recorder import ReadRecorder
from graphsplit.guards.values import (
    MUTABLE,
    SYMBOLIC,
    Frozen,
    freeze,
    is_mapping,
    items_of,
    keys_of,
    put_back,
    reference_of,
    same,
    thaw,
    with_leaves,
)
from graphsplit.guards.visitor import Noted


@dataclass(frozen=True, eq=False)
class AtCall:
    """A place in which a call finds something else than the step leaves there.

    Attributes:
        reached: The state that the call can reach.
        place: The place.
        value: The snapshot of what it finds, or the ``Computed`` number.
        is_first: Whether that is what was there when the step began, whatever it was.
        is_in_last: Whether a container is the one that is left there, with other contents.
        may_change: Whether the call may change it, since the code around it sets it behind.
    """

    reached: Reached
    place: Place
    value: Any
    is_first: bool
    is_in_last: bool
    may_change: bool


class FoundByCalls:
    """The calls of one recording, with what each found in the places that were noted by then.

    Attributes:
        found: What the calls are to find.
        are_other_after: Whether the next microbatch has to begin anew: a call finds what was there
            before, or may change what the code around it sets.
    """

    def __init__(self) -> None:
        self.found: tuple[AtCall, ...] = ()
        self.are_other_after = False
        self._calls: list[tuple[Reached, str, dict[Any, Any], int]] = []

    def note(
        self,
        reached: Reached,
        line: str,
        recorder: ReadRecorder,
        real_of: Callable[[Any], Any],
    ) -> None:
        """Note what a call that is being recorded finds.

        Args:
            reached: The state that it can reach.
            line: The user's line.
            recorder: Has noted the places that were read or written around it so far.
            real_of: Gives for what stands for a kept tensor that itself, for anything else that.
        """
        found = {
            identity: with_leaves(freeze(one.place.read()), real_of)
            for identity, one in recorder.noted.items()
            if reached.reaches(one.place)
        }
        self._calls.append((reached, line, found, recorder.begin_part()))

    def find(
        self,
        noted: Mapping[Any, Noted],
        compute: Callable[[Any], Computed],
        has_made: Callable[[Any], bool],
        *,
        leaves: bool,
    ) -> None:
        """Note what the calls are to find, once the recording is over; before all is put back.

        Args:
            noted: The places that were read or written around them.
            compute: How a number without value is made of the lifted ones.
            has_made: Whether the code has made an object.
            leaves: Whether the step leaves what is there now; else what was there first stays.

        Raises:
            CaptureError: A call finds what cannot be put there again.
        """
        found: list[AtCall] = []
        writers = [reached for reached, *_ in self._calls if reached.may_write]
        for identity, one in noted.items():
            calls = [c for c in self._calls if identity in c[2] or c[0].reaches(one.place)]
            num_writers = 0 if one.is_read else sum(w is c[0] for w in writers for c in calls)
            self.are_other_after |= num_writers > 0
            for (reached, line, seen, behind), following in zip_longest(calls, calls[1:]):
                uses = (use for use in one.uses.items() if use[0] >= behind)
                part, is_read = next(uses, (behind, None))
                is_set = is_read is False and (following is None or part < following[3])
                one.is_read_behind |= is_read is True and reached.may_write
                now, last = seen.get(identity, one.first), one.first
                if identity not in seen:  # first used after the call
                    now = _as_seen(now, seen.values())
                if leaves:
                    last = freeze(one.place.read())
                if holds(now, _is_tensor) and holds(last, _is_tensor):
                    continue  # it may ask whether there is one; its value comes as an argument
                is_same = _is_one(now, last) and not _is_other(now, reference_of(last))
                is_value = not isinstance(now, Frozen)
                may_be_set = (is_set and is_value) or not (one.is_read or one.is_timed)
                may_be_set &= reached.may_write
                if is_same and num_writers < 2 and not may_be_set:  # else also between the two
                    continue
                is_first = leaves and _is_one(now, one.first)
                if not is_first:
                    now = _of_step(now, one.place, line, compute, has_made)
                is_in_last = reference_of(now) is reference_of(last)
                rest = is_first, is_in_last, is_set and is_value
                found.append(AtCall(reached, one.place, now, *rest))
        self.found = tuple(found)
        self.are_other_after |= any(one.is_first for one in found)
        self._calls.clear()


def _as_seen(first: Any, seen: Iterable[Any]) -> Any:
    """A snapshot in which containers hold what they held in others: one may be in two places."""
    if not isinstance(first, Frozen):
        return first
    known = {id(one.container): one for value in seen for one in snapshots_in(value)}

    def now(one: Any) -> Any:
        if not isinstance(one, Frozen):
            return one
        held = replace(one, items=tuple(map(now, one.items)))
        return known.get(id(one.container), held)

    return now(first)


def _is_other(was: Any, now: Any) -> bool:
    """Whether this is another container, which may hold something else while a call runs."""
    return isinstance(now, MUTABLE) and reference_of(was) is not now


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _is_made_anew(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, *SYMBOLIC))


def _is_one(one: Any, other: Any) -> bool:
    """Whether two snapshots hold the same."""
    if not isinstance(one, Frozen) or not isinstance(other, Frozen):
        return one is other if isinstance(one, SYMBOLIC) else same(one, reference_of(other))
    if type(one.container) is not type(other.container) or one.content != other.content:
        return False
    pairs = zip((*one.keys, *one.items), (*other.keys, *other.items), strict=False)
    return len(one.items) == len(other.items) and all(_is_one(*pair) for pair in pairs)


def _of_step(
    value: Any,
    place: Place,
    line: str,
    compute: Callable[[Any], Computed],
    has_made: Callable[[Any], bool],
) -> Any:
    """A value that each step makes anew."""
    if isinstance(value, SYMBOLIC):
        return compute(value)
    if holds(value, _is_made_anew) or has_made(reference_of(value)):
        raise CaptureError(
            f"code that is kept whole reads {place.label}, which the code around it sets before "
            f"and after: something that each step makes anew\n  {line}\n  {place.source}\n"
            f"  Fix: pass it as an argument; or keep the code around it whole with gs.opaque."
        )
    return value


class _State(Protocol):
    """The part of a recorded step that is left in Python, and found there."""

    @property
    def changes(self) -> Sequence[Change]: ...
    @property
    def calls(self) -> FoundByCalls: ...


@dataclass(frozen=True, eq=False)
class Left:
    """The end of a step in Python.

    Attributes:
        before: The places that it has changed, each with the snapshot of what was there before.
        at_calls: What its calls are to find: see ``Reached.at_call``.
    """

    before: Sequence[tuple[Place, Any]] = ()
    at_calls: Mapping[Reached, tuple[tuple[Place, Any, bool], ...]] = field(default_factory=dict)

    def let_find(self) -> None:
        """Let the calls find that from now on."""
        for reached, values in self.at_calls.items():
            reached.at_call = values


NOTHING_LEFT = Left()
_Values = Mapping[Any, tuple[Place, Any]]  # snapshots, each with its place, by the place's identity


def left_by(state: _State, leave: Callable[[], object], lifted: Sequence[Any]) -> Left:
    """Leave what a step leaves; its calls find what they are to.

    Args:
        state: The step.
        leave: Leaves what the step leaves.
        lifted: The numbers from which others are computed.
    """
    places = [*(one.place for one in state.changes), *(one.place for one in state.calls.found)]
    before = [(place, freeze(place.read())) for place in places]
    leave()
    found: dict[Reached, tuple[tuple[Place, Any, bool], ...]] = {}
    for one, (_, first) in zip(state.calls.found, before[len(state.changes) :], strict=True):
        value = first if one.is_first else value_of(one.value, lifted)
        if isinstance(value, Frozen) and not one.is_first:
            value = freeze(thaw(value))
            if one.is_in_last:
                value = _in_what_is_there(value, one.place.read())
        entries = _entries(one.place, value, is_copy=not one.is_first)
        standing = ((*entry, one.may_change) for entry in entries)
        found[one.reached] = (*found.get(one.reached, ()), *standing)
    changed = [entry for pair in before[: len(state.changes)] for entry in _entries(*pair)]
    left = Left(changed, found)
    left.let_find()
    return left


def _in_what_is_there(value: Any, there: Any) -> Any:
    """A snapshot for containers that are there: a tuple is the same one, with a list in it."""
    if not isinstance(value, Frozen) or type(there) is not type(value.container):
        return value
    items = value.items
    held = [*items_of(there)] if items and not isinstance(there, Set) else []
    if len(items) == len(held):
        items = tuple([_in_what_is_there(*pair) for pair in zip(items, held, strict=True)])
    return replace(value, container=there, items=items)


def _entries(place: Place, value: Any, *, is_copy: bool = False) -> list[tuple[Place, Any]]:
    """The entries of a mapping that differ from what is left there: a call may change others.

    Containers of a copy are others in any case.
    """
    there = place.read()
    is_there = isinstance(value, Frozen) and value.container is there and is_mapping(there)
    if not is_there or value.keys != tuple(keys_of(there)):
        return [(place, value)]
    entries = zip(value.keys, value.items, items_of(there), strict=True)
    return [
        (inside(there, key, place), was)
        for key, was, now in entries
        if not same(was, now) or (not is_copy and _is_other(was, now))
    ]


def moments(
    lefts: Sequence[Left], calls: Sequence[Iterable[Reached]]
) -> Sequence[Callable[[], None]]:
    """Functions that bring back the Python state of each of several steps, one after the other.

    They have been recorded, and have left what they leave, before the first of them computes. What
    their calls find, and their backward, is what their own step has left, and none after it.

    Args:
        lefts: What each has left, in their order.
        calls: What the calls of each can reach.

    Returns:
        For each what is to be called before it computes; nothing where no call could tell.
    """
    every = [one for of_step in calls for one in of_step]
    before = [
        [(place, was) for place, was in left.before if any(one.reaches(place) for one in every)]
        for left in lefts
    ]
    if not any(before[1:]) and not any(left.at_calls for left in lefts):
        return []
    places = {place.identity: place for of_step in before for place, _ in of_step}
    values = {identity: (place, freeze(place.read())) for identity, place in places.items()}
    states = [values]
    for after in before[:0:-1]:  # what was there before an earlier one counts
        values = {**values, **{place.identity: (place, was) for place, was in after}}
        states.append(values)
    states.reverse()
    before_each = [states[-1], *states[:-1]]
    own = [frozenset(place.identity for place, _ in of_step) for of_step in before]
    return [partial(_enter, *each) for each in zip(lefts, states, before_each, own, strict=True)]


def _enter(left: Left, values: _Values, before: _Values, own: Set[Any]) -> None:
    """Bring Python from one state to another; what is one in both calls may have changed.

    Args:
        left: What the step leaves.
        values: The state that it leaves.
        before: That of the step before.
        own: The places that the step itself sets.
    """
    for identity, (place, value) in values.items():
        if identity in own:
            _put(place, value)
            continue
        was = before[identity][1]
        is_one = not isinstance(value, Frozen) or value.container is reference_of(was)
        if is_one and _is_one(value, was):
            continue
        if not same(was, place.read()):
            raise CaptureError(
                f"code that is kept whole changes {place.label}, which the code around it changes "
                f"as well, in one of several microbatches\n  {place.source}\n"
                f"  Fix: let one of the two change it; or keep the code around it whole with "
                f"gs.opaque."
            )
        _put(place, value)
    left.let_find()


@contextmanager
def standing(
    values: Iterable[tuple[Place, Any, bool]], refuse: Callable[[Place], Exception]
) -> Iterator[None]:
    """Let values stand in places while a call runs, which must leave them.

    Args:
        values: The snapshots, each with its place, and whether the call may change it after all.
        refuse: The error where it has changed one.
    """
    values = tuple(values)
    before = [(place, freeze(place.read())) for place, *_ in values]
    try:
        for place, value, _ in values:
            _put(place, value)
        yield
        for place, value, may_change in values:
            now = place.read()
            if not may_change and (not same(value, now) or _is_other(value, now)):
                raise refuse(place)
    finally:
        for place, was in reversed(before):
            _put(place, was)


def _put(place: Place, value: Any) -> None:
    there = put_back(value)
    if place.read() is not there:
        place.write(there)
