"""Meetings of all workers: barriers, agreements and the finish. Pure.

A worker waits at one meeting at a time and leaves it only when all are there. So two workers that
wait at different meetings wait for ever, and that is known as soon as the second one arrives.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.cluster.wire.messages import Arrive, Text
from graphsplit.text import cut_end, first_difference

_LINE_CHARS = 1_000


class Meetings:
    """The meetings of one generation: who waits at which. One is open at a time.

    Args:
        ranks: Its workers.

    Attributes:
        num_departed: How many meetings are over: a worker that lost the news of its departure
            arrives again, and is let go at once.
        last_arrival: When somebody arrived last.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._arrived: dict[int, Arrive] = {}
        self.num_departed = 0
        self.last_arrival = 0.0

    @property
    def open_meeting(self) -> Arrive | None:
        """Where workers wait now, as the first of them said; None when nobody waits."""
        return next(iter(self._arrived.values()), None)

    @property
    def is_complete(self) -> bool:
        """Whether all workers have arrived at the open meeting."""
        return len(self._arrived) == len(self._ranks)

    @property
    def missing(self) -> list[int]:
        """The ranks that the open meeting waits for."""
        return [rank for rank in self._ranks if rank not in self._arrived]

    def waits_at(self, rank: int) -> Arrive | None:
        """Where this worker has arrived and was not let go yet."""
        return self._arrived.get(rank)

    def leave(self, rank: int) -> None:
        """This worker does not wait any more."""
        self._arrived.pop(rank, None)

    def catch_up(self, num_departed: int) -> list[int]:
        """A worker was let go from so many meetings. Returns the ranks that missed the news."""
        self.num_departed = max(self.num_departed, num_departed)
        return [rank for rank, one in self._arrived.items() if one.number <= self.num_departed]

    def arrive(self, rank: int, arrival: Arrive, now: float) -> str | None:
        """Note an arrival. Returns why the workers can never meet, or None."""
        first = self.open_meeting
        self._arrived[rank] = arrival
        self.last_arrival = now
        if first is None or (first.kind, first.name) == (arrival.kind, arrival.name):
            return None
        other = next(iter(self._arrived))
        return (
            f"workers wait for each other at different places: worker {other} at "
            f"{first.meeting_name}, worker {rank} at {arrival.meeting_name}\n"
            f"  Fix: every worker must run the same steps in the same order; look for an `if` on "
            f"the rank around one of the two"
        )

    def differing(self) -> tuple[int, int] | None:
        """The first worker, and the next whose digest differs from its own; None if all agree."""
        first, *others = self._ranks
        for rank in others:
            if self._arrived[rank].digest != self._arrived[first].digest:
                return first, rank
        return None

    def dissolve(self) -> None:
        """Let everyone go."""
        self._arrived.clear()
        self.num_departed += 1


class Dispute:
    """Two workers whose texts differ at an agreement; collects the texts to show where."""

    def __init__(self, name: str, ranks: tuple[int, int], since: float) -> None:
        self.name = name
        self.ranks = ranks
        self.since = since
        self._texts: dict[int, bytes] = {}

    @property
    def is_complete(self) -> bool:
        """Whether both texts are here."""
        return len(self._texts) == len(self.ranks)

    def add(self, rank: int, text: Text) -> str | None:
        """Take one text. Returns what is wrong with it, or None."""
        if rank not in self.ranks or rank in self._texts or text.name != self.name:
            return f"sent a text for {text.name!r} that nobody asked for"
        self._texts[rank] = text.text
        return None

    def describe(self) -> str:
        """The first line that differs, as both workers have it."""
        one, other = self.ranks
        head = f"workers {one} and {other} disagree about {self.name!r}"
        fix = (
            "  Fix: every worker must run the same script, on the same model, placement and "
            "schedule"
        )
        if not self.is_complete:
            return f"{head} (their texts could not be fetched in time)\n{fix}"
        texts = [self._texts[rank].decode("utf-8", errors="replace") for rank in self.ranks]
        difference = first_difference(texts[0], texts[1])
        if difference is None:
            return f"{head}: they differ beyond the first {len(self._texts[one])} bytes\n{fix}"
        number, line, theirs = difference
        return (
            f"{head}: line {number} is the first that differs\n"
            f"  worker {one}: {cut_end(line, _LINE_CHARS)}\n"
            f"  worker {other}: {cut_end(theirs, _LINE_CHARS)}\n{fix}"
        )
