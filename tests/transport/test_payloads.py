"""Receives of large payloads are posted ahead: two that send to each other do not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from graphsplit.transport.torch.payloads import NUM_POSTED, Payloads

WAIT_S = 10.0


class Posted:
    """A receive, which is done when the test says so."""

    def __init__(self) -> None:
        self.arrives, self.is_broken = threading.Event(), False

    def wait(self, _timeout: object) -> None:
        assert self.arrives.wait(WAIT_S)
        if self.is_broken:
            raise RuntimeError("the peer is gone")


class Link:
    """What payloads need of a link: notes what is posted, what is done, and the end."""

    def __init__(self) -> None:
        self.posted: list[Posted] = []
        self.done: list[str] = []
        self.error: Exception | None = None
        self.changed = threading.Condition()
        self.payloads = Payloads("test", self.end)

    def post(self, piece: torch.Tensor) -> Posted:
        with self.changed:
            self.posted.append(Posted())
            self.changed.notify_all()
        return self.posted[-1]

    def end(self, error: Exception) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def take(self, name: str, pieces: int) -> None:
        def act() -> None:
            with self.changed:
                self.done.append(name)
                self.changed.notify_all()

        self.payloads.after([torch.empty(1)] * pieces, self.post, act)

    def arrive(self, number: int) -> None:
        self.posted[number].arrives.set()

    def until(self, posted: int, done: list[str]) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: (len(self.posted), self.done) == (posted, done), WAIT_S
            )


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    for work in link.posted:
        work.arrives.set()
    link.payloads.stop(WAIT_S)


def test_some_are_posted_before_others_are_there_and_acts_keep_their_order(link: Link) -> None:
    link.take("small", 0)
    assert link.done == ["small"] and not link.payloads.are_under_way()
    link.take("a", NUM_POSTED + 1)
    link.take("b", 1)
    link.take("behind", 0)
    link.take("c", 1)
    link.take("d", 1)
    link.until(NUM_POSTED + 1, ["small"])  # all of a, and nothing else
    link.arrive(1)
    link.until(NUM_POSTED + 1, ["small"])  # they come in order
    link.arrive(0)
    link.until(NUM_POSTED + 2, ["small"])  # fewer are left than are posted ahead: b
    for number in range(2, NUM_POSTED + 1):
        link.arrive(number)
    link.until(NUM_POSTED + 4, ["small", "a"])
    for number in range(NUM_POSTED + 1, NUM_POSTED + 4):
        link.arrive(number)
    link.until(NUM_POSTED + 4, ["small", "a", "b", "behind", "c", "d"])
    link.payloads.stop(WAIT_S)
    assert not link.payloads.are_under_way()
    link.take("small again", 0)
    assert link.done[-1] == "small again"


def test_a_link_that_breaks_ends_once_and_nothing_is_filed(link: Link) -> None:
    link.take("a", 1)
    link.take("b", 1)
    link.posted[0].is_broken = True
    link.arrive(0)
    with link.changed:
        assert link.changed.wait_for(lambda: link.error is not None, WAIT_S)
    assert str(link.error) == "the peer is gone"
    assert link.done == [] and link.payloads.are_under_way()
