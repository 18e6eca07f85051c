"""A small cluster: both state machines, the streams between them, and what can fail.

A world is a number. In it are the numbers of its parts: the scheduler with what may still go wrong
(the *top*), and each slot. What happens changes few parts, and how a part changes depends only on
that part and on what comes from elsewhere; so it is computed once, by the state machines
themselves, and looked up by the numbers of the parts ever after.
"""

from __future__ import annotations

from membership_failures import Budget
from membership_head import Head, first_head
from membership_invariants import check_standings
from membership_names import Renaming, rename, rename_in_head, renaming
from membership_slot import Slot
from membership_tables import NOT_RENAMED, SLOT_BITS, Made, Reduction, Tables, Top
from membership_values import Numbered, copy

from graphsplit.cluster.scheduler.job.rules import JobRules

_SLOT = (1 << SLOT_BITS) - 1
Reached = tuple[int, list[dict[int, int]]]


class Model:
    """All that a small cluster can do.

    Attributes:
        start: The world in which everything begins.
    """

    def __init__(self, rules: JobRules, budget: Budget, reduction: Reduction | None = None) -> None:
        self.tables = Tables(rules, reduction or Reduction())
        self._tops: list[Top] = []
        self._top_of: dict[tuple[Budget, int], Top] = {}
        self._shifts = tuple(SLOT_BITS * slot for slot in range(rules.num_workers))
        self._top_shift = SLOT_BITS * rules.num_workers
        self._standings = Numbered()
        self._standing_of: dict[int, int] = Made(self._standing)
        self._is_empty: dict[int, bool] = Made(lambda one: self.tables.slots[one].process is None)
        self._has_hope: dict[int, bool] = Made(lambda one: self.tables.slots[one].has_hope)
        self._names_at: dict[tuple[int, int], tuple[Renaming | None, int]] = Made(self._rename_slot)
        self._renamed_head: dict[tuple[int, Renaming], int] = Made(self._rename_head)
        self._fine: set[tuple[int | bool, ...]] = set()
        self._nothing = [self.tables.notices.number(())] * rules.num_workers
        slots = [Slot(number, rules) for number in range(rules.num_workers)]
        for slot in slots:
            slot.start()
        top = self._top(budget, self.tables.heads.number(first_head(rules)))
        self.start = self._world(top, [self.tables.slots.number(slot) for slot in slots])

    def successors(self, world: int) -> list[int]:
        """All worlds that may come next; none after an end."""
        top, slots = self._parts(world)
        if top.is_gone and self._are_empty(slots):
            return []
        found: list[int] = []
        rows = [every[one] for every, one in zip(top.rows, slots, strict=True)]
        for slot, row in enumerate(rows):
            for change in row.changes:
                found.append(world + change)
            for event, after in row.calls:
                found.append(_reached(top.handled[event], slots, slot, after))
        for event in top.times[not any(row.names for row in rows)]:
            found.append(_reached(top.handled[event], slots))
        if top.budget.failures:
            for slot, row in enumerate(rows):
                for what, after in row.failures:
                    found.append(_reached(top.failed[what], slots, slot, after))
            for what in top.failures:
                found.append(_reached(top.failed[what], slots))
        return [self._renamed(one) if one >= NOT_RENAMED else one for one in found]

    def names(self, world: int) -> list[str]:
        """What leads to each of ``successors``, for people."""
        top, slots = self._parts(world)
        rows = [every[one] for every, one in zip(top.rows, slots, strict=True)]
        names = [name for row in rows for name in row.names]
        names += top.names[all(row.is_quiet for row in rows)]
        names += [name for row in rows for name in row.names_of_failures]
        return names + top.names_of_failures

    def is_end(self, world: int) -> bool:
        """Whether the job is over for everybody."""
        top, slots = self._parts(world)
        return top.is_gone and self._are_empty(slots)

    def has_finished(self, world: int) -> bool:
        """Whether the job is over, and has not failed."""
        top, slots = self._parts(world)
        return top.has_finished and self._are_empty(slots)

    def may_finish(self, world: int) -> bool:
        """Whether nothing has happened yet that ends the job for good."""
        top, slots = self._parts(world)
        return top.may_finish and all(self._has_hope[one] for one in slots)

    def check(self, world: int) -> None:
        """Raise if this world must not be. Of each part alone, that was seen when it was made."""
        top, slots = self._parts(world)
        name = (top.has_failed, *[self._standing_of[one] for one in slots])
        if name not in self._fine:
            check_standings([self._standings[one] for one in name[1:]], has_failed=top.has_failed)
            self._fine.add(name)

    def _standing(self, slot: int) -> int:
        return self._standings.number(self.tables.slots[slot].standing)

    def parts(self, world: int) -> tuple[Budget, Head, list[Slot]]:
        """What a world consists of."""
        top, slots = self._parts(world)
        return top.budget, self.tables.heads[top.head], [self.tables.slots[one] for one in slots]

    def _are_empty(self, slots: list[int]) -> bool:
        return all(self._is_empty[one] for one in slots)

    # Numbers.

    def _world(self, top: Top, slots: list[int]) -> int:
        return top.base + sum(one << by for one, by in zip(slots, self._shifts, strict=True))

    def _parts(self, world: int) -> tuple[Top, list[int]]:
        return self._tops[world >> self._top_shift], [(world >> by) & _SLOT for by in self._shifts]

    def _top(self, budget: Budget, head: int) -> Top:
        top = self._top_of.get((budget, head))
        if top is None:
            top = self._top_of[budget, head] = Top(self.tables, len(self._tops), budget, head)
            top.handled = Made(lambda event: self._handled(top, event, budget))
            top.failed = Made(lambda what: self._handled(top, what[1], what[0]))
            self._tops.append(top)
        return top

    def _handled(self, top: Top, event: int | None, budget: Budget) -> Reached:
        tables = self.tables
        head, noticed = top.head, self._nothing
        if event is not None:
            head, noticed = tables.after[top.head, event]
        after = self._top(budget, head)
        return after.base, [
            tables.delivered[slot, noticed[slot], view, budget]
            for slot, view in enumerate(after.views)
        ]

    def _renamed(self, world: int) -> int:
        """The world in which all streams have their shortest names."""
        top, slots = self._parts(world % NOT_RENAMED)
        for number, one in enumerate(slots):
            names, slots[number] = self._names_at[top.views[number], one]
            if names is not None:
                top = self._top(top.budget, self._renamed_head[top.head, names])
        return self._world(top, slots)

    def _rename_slot(self, what: tuple[int, int]) -> tuple[Renaming | None, int]:
        view, number = what
        slot: Slot = self.tables.slots[number]
        names = renaming(slot, self.tables.views[view])
        if names is None:
            return None, number
        slot = copy(slot)
        rename(slot, names)
        return names, self.tables.slots.number(slot)

    def _rename_head(self, what: tuple[int, Renaming]) -> int:
        head, names = what
        return self.tables.heads.number(rename_in_head(self.tables.heads[head], names))


def _reached(reached: Reached, slots: list[int], slot: int = -1, after: int = 0) -> int:
    world, delivered = reached
    for number, one in enumerate(slots):
        world += delivered[number][after if number == slot else one]
    return world
