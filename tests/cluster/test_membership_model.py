"""Explores everything that a small cluster can do. See docs/explanation/membership.md.

``make model-check`` explores all of two failures, which takes some minutes.
"""

from __future__ import annotations

import pytest
from membership_check import main
from membership_exploration import Explored, explore, prove_ends, prove_good_ends
from membership_failures import KINDS, Budget
from membership_head import RULES
from membership_model import Model

from graphsplit.cluster.wire.fencing import FencingVerdict, StreamGuard

# Seconds of computing each on an idle core; on a busy machine many times that.
pytestmark = pytest.mark.timeout(900)


def explored(name: str, failures: int, kinds: set[str], most: int | None = None) -> Explored:
    found = Explored(Model(RULES[name], Budget(failures, frozenset(kinds))))
    explore(found, most=most)
    return found


def test_without_failures_every_order_of_events_ends_the_job_well():
    found = explored("fail_fast", 0, set())
    prove_ends(found)
    assert len(found.ends) == 1


@pytest.mark.parametrize("name", RULES)
def test_any_failure_anywhere_leads_to_one_end_for_all(name):
    found = explored(name, 1, {*KINDS})
    prove_ends(found)
    prove_good_ends(found)


def test_two_failures_leave_nothing_that_must_not_be():
    found = explored("wait_rejoin, journal", 2, {*KINDS}, most=30_000)
    assert not found.is_complete


def test_any_two_messages_may_be_lost_or_doubled():
    prove_ends(explored("wait_rejoin", 2, {"double", "lose"}))


def test_a_rule_that_is_missing_is_found_and_told_as_a_story(monkeypatch):
    monkeypatch.setattr(StreamGuard, "check", lambda guard, fence: FencingVerdict.TAKE)
    with pytest.raises(AssertionError, match="doubled to scheduler, 0\n"):
        prove_ends(explored("wait_rejoin", 1, {"double"}))


def test_the_command_says_what_it_has_looked_at(capsys):
    assert main(["--rules", "fail_fast", "--kinds", "double", "--failures", "1"]) == 0
    assert "fail_fast: 1 of double: 696 worlds" in capsys.readouterr().out
