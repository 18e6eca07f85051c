"""Plain values that two pieces of code reach, and what is seen of a change."""

from __future__ import annotations

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
