"""Nothing is missed by what the exploration of a small cluster leaves out."""

from __future__ import annotations

from typing import Any

import pytest
from membership_exploration import Explored, explore
from membership_failures import Budget
from membership_forgetting import forget, without_attempts
from membership_head import RULES, Head
from membership_model import Model
from membership_names import rename, rename_in_head, renaming
from membership_settling import forget_streams
from membership_slot import Slot
from membership_tables import Reduction
from membership_values import copy, key


def explored(name: str, failures: int, kinds: set[str], reduction: Reduction) -> Explored:
    found = Explored(Model(RULES[name], Budget(failures, frozenset(kinds)), reduction))
    explore(found)
    return found


def states(found: Explored) -> tuple[set[Any], set[Any], set[Any]]:
    """The schedulers, the states of workers, and the ends that were reached."""
    heads, workers, ends = set(), set(), set()
    for world in found.worlds:
        _, head, slots = found.model.parts(world)
        heads.add(key(head))
        workers |= {
            (one.number, key(one.process.state)) for one in slots if one.process is not None
        }
        if found.model.is_end(world):
            ends.add((key(head), *[one.outcome for one in slots]))
    return heads, workers, ends


@pytest.mark.parametrize(
    ("name", "failures", "kinds"),
    [
        ("wait_rejoin", 1, {"kill", "lose"}),
        ("fail_fast, journal", 1, {"double", "lose"}),
        ("wait_rejoin", 2, {"double"}),
    ],
)
def test_hearing_at_once_hides_no_state_of_scheduler_or_worker_and_no_end(name, failures, kinds):
    every = explored(name, failures, kinds, Reduction(hears_at_once=False))
    found = explored(name, failures, kinds, Reduction())
    assert len(found.worlds) < len(every.worlds) / 1.5
    assert states(found) == states(every)


def named(budget: Budget, head: Head, slots: list[Slot]) -> Any:
    return budget, key(head), *[key(slot) for slot in slots]


def forgotten(budget: Budget, head: Head, slots: list[Slot]) -> Any:
    """The world without what nothing depends on any more."""
    state, slots = copy(head.state), copy(slots)
    if state is not None:
        forget(state.job)
    image = without_attempts(head.image) if head.image is not None else None
    head = Head(head.rules, state, image, head.exit)
    for slot in slots:
        forget_streams(slot, head.view(slot.number), forgets=True)
        names = renaming(slot, head.view(slot.number))
        if names is not None:
            rename(slot, names)
            head = rename_in_head(head, names)
    return named(budget, head, slots)


@pytest.mark.parametrize(
    ("name", "kind"), [("wait_rejoin", "kill"), ("fail_fast, journal", "lose")]
)
def test_worlds_in_which_the_same_can_happen_are_one_world(name, kind):
    every = explored(name, 1, {kind}, Reduction(forgets=False))
    found = explored(name, 1, {kind}, Reduction())
    assert len(found.worlds) < len(every.worlds)
    assert {forgotten(*every.model.parts(world)) for world in every.worlds} == {
        named(*found.model.parts(world)) for world in found.worlds
    }
