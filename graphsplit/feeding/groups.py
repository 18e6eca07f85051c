"""Batches that replicas evaluate at once: read one after the other, and run as one step.

A batch is never cut: the bits of a product depend on how many rows it has. So each replica runs
other batches than the next one::

    loader      b0 b1 | b2 b3 | b4'         b4' has fewer rows: it is alone
    worker 0    b0      b2      b4'
    worker 1       b1      b3

Reading ahead must change nothing: neither what was read, nor what the step depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from graphsplit.batches.microbatches import BatchDescription, Division
from graphsplit.batches.signature import Signature, fingerprint
from graphsplit.errors import ConfigurationError
from graphsplit.planning.step_plan import Outlook


class Groups:
    """The batches of a loader in groups of those that look alike; an iterator.

    Args:
        batches: The batches.
        look: Gives the outlook for a batch.

    Raises:
        ConfigurationError: Reading a batch has changed one before it, or what its step reads.
    """

    def __init__(self, batches: Iterator[Division], look: Callable[[Signature], Outlook]) -> None:
        self._batches = batches
        self._look = look
        self._waiting: Division | None = None  # it looks otherwise than the group before

    def __iter__(self) -> Iterator[Division]:
        return self

    def __next__(self) -> Division:
        first, self._waiting = self._waiting or next(self._batches), None
        signature = Signature.of(first.arguments)
        before = self._look(signature)
        found, checksums = [first], []
        while len(found) < before.together:
            checksums.append(fingerprint(found[-1].arguments))
            following = next(self._batches, None)
            if following is None:
                break
            if Signature.of(following.arguments) != signature:
                self._waiting = following
                break
            found.append(following)
        if checksums:
            now = [fingerprint(one.arguments) for one in found[: len(checksums)]]
            _check(now == checksums, self._look(signature) == before)
        return first if len(found) == 1 else _as_one(found)


def num_batches(shape: BatchDescription) -> int:
    """How many batches of the loader a step of an evaluation takes."""
    return sum(count for _, count in shape.parts) or 1


def evaluated(division: Division) -> tuple[Division, ...]:
    """The batches that were evaluated at once, each by itself."""
    if not division.weights:
        return (division,)
    return tuple(Division(one, (one,)) for one in division.microbatches)


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


def _as_one(batches: Sequence[Division]) -> Division:
    each = tuple(batch.arguments for batch in batches)
    return Division((each, {}), each, (1.0,) * len(each))
