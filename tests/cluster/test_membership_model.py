"""Explores everything that a small cluster can do. See docs/explanation/membership.md.

``GS_MODEL_CHECK=full`` explores all pairs of failures, which takes long.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

import pytest
from membership_model import NODE_S, TOPO_S, BrokenInvariant, Budget, World, copy, key

from graphsplit.cluster.rules import JobRules

# Seconds of computing each on an idle core; on a busy machine many times that.
pytestmark = pytest.mark.timeout(900)

IS_FULL = os.environ.get("GS_MODEL_CHECK") == "full"
MOST = None if IS_FULL else 5_000
KINDS = ("kill", "break", "raise", "double", "lose", "freeze")
RULES = {
    "wait_rejoin": JobRules(3, TOPO_S, NODE_S, NODE_S, "wait_rejoin"),
    "wait_rejoin, journal": JobRules(3, TOPO_S, NODE_S, NODE_S, "wait_rejoin", True),
    "fail_fast": JobRules(3, TOPO_S, NODE_S, NODE_S),
    "fail_fast, journal": JobRules(3, TOPO_S, NODE_S, NODE_S, keeps_journal=True),
}


@dataclass
class Explored:
    """Worlds by their keys: how each was reached first, and from where each can be reached."""

    first: dict[int, tuple[int, str] | None] = field(default_factory=dict)
    before: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: list[int] = field(default_factory=list)
    is_complete: bool = True

    def story(self, of: int) -> str:
        """What happened up to a world, line by line."""
        lines = []
        while (step := self.first[of]) is not None:
            of, name = step
            lines.append(name)
        return "\n".join(reversed(lines))

    def stuck(self) -> list[int]:
        """Worlds from which no end can be reached."""
        reached, queue = set(self.ends), list(self.ends)
        while queue:
            for earlier in self.before[queue.pop()]:
                if earlier not in reached:
                    reached.add(earlier)
                    queue.append(earlier)
        return [one for one in self.first if one not in reached]


def explore(rules: JobRules, budget: Budget, *, most: int | None = None) -> Explored:
    """Breadth first, so that the story of what goes wrong is a short one."""
    world = World(rules, budget)
    found = Explored()
    name_of = hash(key(world))
    found.first[name_of] = None
    queue = deque([(world, name_of)])
    while queue:
        world, name_of = queue.popleft()
        if world.is_end:
            found.ends.append(name_of)
            continue
        for name, act in world.actions():
            after = copy(world)
            try:
                act(after)
                after.forget_the_past()
                after.check()
            except (AssertionError, BrokenInvariant) as error:
                raise AssertionError(f"{error}, after:\n{found.story(name_of)}\n{name}") from error
            name_of_after = hash(key(after))
            found.before[name_of_after].append(name_of)
            if name_of_after not in found.first:
                found.first[name_of_after] = (name_of, name)
                queue.append((after, name_of_after))
        if most is not None and len(found.first) > most:
            found.is_complete = False
            return found
    return found


def check(rules: JobRules, failures: int, kinds: set[str], *, most: int | None = None) -> Explored:
    found = explore(rules, Budget(failures, frozenset(kinds)), most=most)
    if found.is_complete:
        assert found.ends
        stuck = found.stuck()
        assert not stuck, f"{len(stuck)} worlds have no way to an end:\n{found.story(stuck[0])}"
    return found


def test_without_failures_every_order_of_events_ends_the_job_well():
    found = check(RULES["fail_fast"], 0, set())
    assert len(found.first) > 100
    assert len(found.ends) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_any_failure_anywhere_leads_to_one_end_for_all_when_the_job_recovers(kind):
    check(RULES["wait_rejoin"], 1, {kind})


def test_two_failures_leave_nothing_that_must_not_be():
    check(RULES["wait_rejoin, journal"], 2, {*KINDS, "crash"}, most=MOST)


def test_any_failure_anywhere_leads_to_one_end_for_all_under_fail_fast():
    check(RULES["fail_fast"], 1, set(KINDS))


@pytest.mark.parametrize("name", ["wait_rejoin, journal", "fail_fast, journal"])
def test_the_scheduler_may_be_lost_anywhere_when_it_keeps_a_journal(name):
    check(RULES[name], 1, {"crash"})


@pytest.mark.skipif(not IS_FULL, reason="takes long: set GS_MODEL_CHECK=full")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    "kinds", list(combinations_with_replacement((*KINDS, "crash"), 2)), ids=str
)
def test_any_two_failures_anywhere_lead_to_one_end_for_all(name, kinds):
    if "crash" in kinds and not RULES[name].keeps_journal:
        pytest.skip("without a journal the loss of the scheduler ends the job")
    check(RULES[name], 2, set(kinds))
