"""Batches that replicas evaluate at once: read one after the other, and run as one step.

A batch is never cut: the bits of a product depend on how many rows it has. So each replica runs
other batches than the next one::

    loader      b0 b1 | b2 b3 | b4'         b4' has fewer rows: it is alone
    worker 0    b0      b2      b4'
    worker 1       b1      b3

Reading ahead must change nothing: neither what was read, nor what the step depends on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from graphsplit.batches.microbatches import BatchDescription, Division
from graphsplit.batches.signature import Signature, fingerprint
from graphsplit.errors import ConfigurationError
from graphsplit.job.job import Job
from graphsplit.planning.step_plan import Outlook


def drawn(batches: Iterator[Division], job: Job, *, is_alone: bool) -> Iterator[Division]:
    """The batches; while the loader makes one for some workers, calls of all are refused."""
    calls = job.member.position.calls
    while True:
        before, calls.reads_alone = calls.reads_alone, is_alone  # no context: at every step
        try:
            batch = next(batches, None)
        finally:
            calls.reads_alone = before
        if batch is None:
            return
        yield batch


@dataclass(frozen=True)
class Group(Division):
    """Batches that look alike and are evaluated at once, as the microbatches of one step.

    Attributes:
        batches: Each by itself, whose one microbatch it is; the arguments are those of the first.
    """

    batches: tuple[Division, ...] = ()

    def shape(self) -> BatchDescription:
        """The description that other workers must have of it."""
        look = self.batches[0].shape().whole
        return BatchDescription(look, ((look, len(self.batches)),), self.weights)


def grouped(batches: Sequence[Division]) -> Division:
    """One batch or more as what one step evaluates."""
    if len(batches) == 1:
        return batches[0]
    each = tuple(batch.microbatches[0] for batch in batches)
    return Group(each[0], each, (1.0,) * len(each), tuple(batches))


def batches_of(division: Division) -> tuple[Division, ...]:
    """The batches of a loader that a step takes at once, as they were read."""
    return division.batches if isinstance(division, Group) else (division,)


class Groups:
    """The batches of a loader in groups of those that look alike; an iterator.

    Where the batches that look alike follow each other, each group begins at a multiple of its
    size: who knows how many rows they have knows which replica runs which of them.

    Args:
        batches: The batches.
        look: Gives the outlook for a batch.

    Raises:
        ConfigurationError: Reading a batch has changed one before it, or what its step reads.
    """

    def __init__(self, batches: Iterator[Division], look: Callable[[Signature], Outlook]) -> None:
        self._batches = batches
        self._look = look
        self._waiting: deque[Division] = deque()  # read, and in no group yet
        self._last: Signature | None = None
        self._num_alike = 0  # that followed each other, up to the last one

    def __iter__(self) -> Iterator[Division]:
        return self

    def skip(self) -> None:
        """Leave out the next batch."""
        batch = next(self._batches, None)
        if batch is not None:
            self._count(batch.shape().whole)

    def _count(self, look: Signature) -> None:
        self._num_alike = self._num_alike + 1 if look == self._last else 1
        self._last = look

    def _next(self) -> Division | None:
        return self._waiting.popleft() if self._waiting else next(self._batches, None)

    def __next__(self) -> Division:
        first = self._next()
        if first is None:
            raise StopIteration
        signature = first.shape().whole
        before = self._look(signature)
        found, checksums = [first], []
        self._count(signature)
        while self._num_alike % before.together:
            checksums.append(fingerprint(found[-1].arguments))
            following = self._next()
            if following is None:
                break
            if following.shape().whole != signature:
                self._waiting.appendleft(following)
                break
            self._count(signature)
            found.append(following)
        if checksums:
            now = [fingerprint(one.arguments) for one in found[: len(checksums)]]
            _check(now == checksums, self._look(signature) == before)
        return grouped(found)

    def first_of(self, division: Division, number: int) -> Division:
        """Some of the batches of the last group; the others are left for the next one."""
        kept, left = batches_of(division)[:number], batches_of(division)[number:]
        if not left:
            return division
        self._waiting.extendleft(reversed(left))
        self._num_alike -= len(left)
        return grouped(kept)


def num_batches(shape: BatchDescription) -> int:
    """How many batches of the loader a step of an evaluation takes."""
    return sum(count for _, count in shape.parts) or 1


def refuse_change(what: str) -> None:
    """Refuse code between two batches that replicas have evaluated at once.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(
        f"{what}; replicas evaluate several batches at once\n"
        f"  Fix: change it between two calls of eval or predict, or place the network's modules on "
        f"one worker each."
    )


def _check(are_batches_same: bool, is_outlook_same: bool) -> None:
    if not are_batches_same:
        refuse_change("the loader writes to a batch that it gave before")
    if not is_outlook_same:
        refuse_change("the loader changes what forward reads between two batches")
