"""What follows from the parts of a world, computed once for each. See ``membership_model``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from membership_failures import Budget, failures, failures_of_head
from membership_head import AnyEvent, Gone, Head, HungUp, Sent, ToSlot
from membership_invariants import BrokenInvariant
from membership_moves import Move, moves
from membership_names import renaming
from membership_settling import forget_streams, hear_at_once, is_to_hear
from membership_slot import NODES_PER_SLOT, Slot
from membership_values import Numbered, copy
from membership_view import View

from graphsplit.cluster.scheduler.job.rules import JobRules
from graphsplit.cluster.wire.messages import Fence

SLOT_BITS = 24
NOT_RENAMED = 1 << 110
"""Added to a world in which streams have yet to get their shortest names."""


class Made(dict[Any, Any]):
    """A dictionary that makes what is missing."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __missing__(self, name: Any) -> Any:
        made = self[name] = self._make(name)
        return made


@dataclass(frozen=True)
class Reduction:
    """What is not looked at, because nobody can tell the difference.

    Attributes:
        hears_at_once: See [Note: hearing at once].
        forgets: Whether what nothing depends on any more is put aside.
    """

    hears_at_once: bool = True
    forgets: bool = True


@dataclass(frozen=True)
class Row:
    """What one slot can do.

    Attributes:
        changes: What is added to the number of the world when it moves by itself.
        calls: What the scheduler notices when it moves otherwise, and the slot after that.
        failures: What goes wrong here: what may go wrong then, and the same as in ``calls``.
        names: Of ``changes`` and ``calls``, for people.
        names_of_failures: The same of ``failures``.
    """

    changes: tuple[int, ...]
    calls: tuple[tuple[int, int], ...]
    failures: tuple[tuple[tuple[Budget, int | None], int], ...]
    names: tuple[str, ...]
    names_of_failures: tuple[str, ...]

    @property
    def is_quiet(self) -> bool:
        """Whether nothing happens here as long as nothing goes wrong."""
        return not self.names


@dataclass(frozen=True, eq=False)
class Surroundings:
    """All that one slot depends on, apart from itself."""

    slot: int
    view: View
    budget: Budget


@dataclass(eq=False)
class Tables:
    """The parts of worlds by their numbers, and what follows from each."""

    rules: JobRules
    reduction: Reduction
    heads: Numbered = field(default_factory=Numbered)
    slots: Numbered = field(default_factory=Numbered)
    events: Numbered = field(default_factory=Numbered)
    views: Numbered = field(default_factory=Numbered)
    notices: Numbered = field(default_factory=Numbered)

    def __post_init__(self) -> None:
        self.rows = Made(self._rows)
        self.delivered = Made(self._delivered)
        self.after = Made(self._after)
        self.views_of = Made(self._views)

    def _views(self, head: int) -> list[int]:
        """What each slot sees of a scheduler."""
        known: Head = self.heads[head]
        return [self.views.number(known.view(slot)) for slot in range(self.rules.num_workers)]

    def _after(self, what: tuple[int, int]) -> tuple[int, list[int]]:
        """The scheduler after an event, and what each slot notices of it."""
        head: Head = self.heads[what[0]]
        after, noticed = head.after(self.events[what[1]], forgets=self.reduction.forgets)
        return self.heads.number(after), [
            self.notices.number(_noticed_by(slot, noticed))
            for slot in range(self.rules.num_workers)
        ]

    def _rows(self, where: tuple[int, int, Budget]) -> dict[int, Row]:
        """Slot to row, at one place, under one view of the scheduler."""
        number, view, budget = where
        around = Surroundings(number, self.views[view], budget)
        return Made(lambda slot: self._row(self.slots[slot], slot, around))

    def _delivered(self, what: tuple[int, int, int, Budget]) -> dict[int, int]:
        """Slot to the slot after it was told these things, as part of the number of the world."""
        number, notices, view, budget = what
        around = Surroundings(number, self.views[view], budget)
        told = self.notices[notices]
        return Made(lambda slot: self._told(copy(self.slots[slot]), told, around))

    def _row(self, slot: Slot, number: int, around: Surroundings) -> Row:
        changes, calls, names, names_of_calls = [], [], [], []
        for move in moves(slot, around.view):
            after, event = _moved(slot, move)
            if event is None:
                changes.append(self._settled(after, around) - (number << SLOT_BITS * around.slot))
                names.append(move.name)
            else:
                calls.append((self.events.number(event), self.slots.number(after)))
                names_of_calls.append(move.name)
        wrong, names_of_wrong = [], []
        left = around.budget.after(around.slot) if around.budget.failures else around.budget
        for move in failures(slot, around.view, around.budget):
            after, event = _moved(slot, move)
            after.hears_in_turn = self.reduction.hears_at_once and is_to_hear(after)
            noticed = None if event is None else self.events.number(event)
            wrong.append(((left, noticed), self.slots.number(after)))
            names_of_wrong.append(move.name)
        return Row(
            tuple(changes),
            tuple(calls),
            tuple(wrong),
            (*names, *names_of_calls),
            tuple(names_of_wrong),
        )

    def _told(self, slot: Slot, told: tuple[ToSlot, ...], around: Surroundings) -> int:
        for one in told:
            _notice(slot, one)
        return self._settled(slot, around)

    def _settled(self, slot: Slot, around: Surroundings) -> int:
        """The number of this slot as part of the number of the world."""
        if self.reduction.hears_at_once and around.budget.spares(slot.number):
            hear_at_once(slot, around.view)
        forgets = self.reduction.forgets
        forget_streams(slot, around.view, forgets=forgets)
        number = self.slots.number(slot) << SLOT_BITS * around.slot
        is_named = not forgets or renaming(slot, around.view) is None
        return number if is_named else number + NOT_RENAMED


def _moved(slot: Slot, move: Move) -> tuple[Slot, AnyEvent | None]:
    after = copy(slot)
    return after, move.act(after)


def _notice(slot: Slot, told: ToSlot) -> None:
    """Something that the scheduler did comes to a slot."""
    if isinstance(told, Gone):
        for stream in slot.streams.values():
            stream.is_cut = stream.scheduler_sees_end = True
            stream.to_scheduler.clear()
            if told.loses:
                stream.to_member.clear()
        return
    stream = slot.streams.get(told.node)
    if stream is None or stream.scheduler_sees_end:
        if isinstance(told, Sent):
            raise BrokenInvariant(f"{told} on a stream whose end the scheduler has seen")
    elif isinstance(told, HungUp):
        stream.is_cut = True
    elif not stream.is_cut:
        stream.numbers[1] += 1
        fence = Fence("job", told.generation, stream.incarnation, stream.numbers[1])
        stream.to_member.append((fence, told.message))


class Top:
    """The scheduler, and what may still go wrong.

    Attributes:
        base: The number of the world in which this is the top, and all slots have the number 0.
        budget: What may still go wrong.
        head: The scheduler, by its number.
        views: What each slot sees of it.
        rows: What each slot can do.
        handled: The world, less the slots, and ``Tables.delivered`` for each, after an event.
        failed: The same when something goes wrong: after less may go wrong, and an event or none.
        times: What happens in time, if something else can happen (False), or if not (True).
        failures: What may go wrong with the scheduler.
    """

    def __init__(self, tables: Tables, number: int, budget: Budget, head: int) -> None:
        rules = tables.rules
        self.base = number << SLOT_BITS * rules.num_workers
        self.budget = budget
        self.head = head
        known: Head = tables.heads[head]
        self.is_gone = known.is_gone
        self.has_failed = known.exit is not None and known.exit.cause is not None
        self.has_finished = known.exit is not None and known.exit.cause is None
        self.may_finish = known.may_finish
        self.views: list[int] = tables.views_of[head]
        self.rows = [tables.rows[slot, view, budget] for slot, view in enumerate(self.views)]
        self.times: dict[bool, list[int]] = {}
        self.names: dict[bool, list[str]] = {}
        for is_quiet in (False, True):
            times = list(known.times(is_quiet=is_quiet))
            self.times[is_quiet] = [tables.events.number(event) for _, event in times]
            self.names[is_quiet] = [name for name, _ in times]
        wrong = list(failures_of_head(known, budget))
        self.failures = [(budget.after(None), tables.events.number(event)) for _, event in wrong]
        self.names_of_failures = [name for name, _ in wrong]


def _noticed_by(slot: int, noticed: list[ToSlot]) -> tuple[ToSlot, ...]:
    """What of it comes to one slot."""
    return tuple(
        one for one in noticed if isinstance(one, Gone) or one.node // NODES_PER_SLOT == slot
    )
