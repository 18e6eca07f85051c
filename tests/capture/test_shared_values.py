"""Plain values that two pieces of code reach, and what is seen of a change."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

from graphsplit.capture.reach.plain import SharedValues


def test_a_value_that_the_writer_lets_go_of_counts_as_changed() -> None:
    config = SimpleNamespace(beta=1.0)
    loss, loader = SimpleNamespace(config=config), SimpleNamespace(config=config)
    shared = SharedValues((loss,), (loader,))

    assert shared.changed() == []
    config.beta, loader.config = 2.0, None

    assert any("2.0" in line for line in shared.changed())


def test_what_the_reader_does_not_reach_does_not_count() -> None:
    loss, loader = SimpleNamespace(beta=1.0), SimpleNamespace(count=0)
    shared = SharedValues((loss,), (loader,))
    loader.count = 1

    assert shared.changed() == []


def test_what_it_has_seen_in_a_list_may_go() -> None:
    """A weak registry that forward asks loses its entry, as in the plain loop."""
    listeners = [Changed()]
    shared = SharedValues((SimpleNamespace(held=listeners),), (SimpleNamespace(held=listeners),))
    gone = weakref.ref(listeners.pop())

    assert gone() is None
    assert shared.changed()


class Changed:
    """A listener."""
