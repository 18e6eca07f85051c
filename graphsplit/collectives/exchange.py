"""How some workers make one call: they agree on it, then move values. Used by one thread.

Every worker tells the first one what it calls, and where; the first one compares, and answers. Only
then anything moves, so that a call that does not fit is told on both sides, with both lines::

    first    ◄── calls ── others        ── fits, or why not ──►        values
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphsplit.encoding.packed import Packed
from graphsplit.errors import CollectiveMismatchError
from graphsplit.job.group import WorkerGroup


@dataclass(frozen=True)
class CallOfMany:
    """One call, as one worker makes it.

    Attributes:
        name: What the script called: ``"all_reduce"``.
        alike: What all workers must pass alike, in words: ``"op='sum', float32 of [3]"``.
        line: The script's line.
    """

    name: str
    alike: str
    line: str

    @property
    def text(self) -> str:
        """The call as it is compared."""
        return f"{self.name}({self.alike})"

    @property
    def told(self) -> str:
        """The call with its line, as others are told it."""
        return f"{self.text}\n{self.line}"


class PartOfJob(WorkerGroup):
    """Some workers of a job, numbered from 0 in the order of their ranks.

    Args:
        workers: All workers of the job.
        ranks: The ranks of some, in order; this worker's is among them.
    """

    def __init__(self, workers: WorkerGroup, ranks: Sequence[int]) -> None:
        self._workers = workers
        self._ranks = ranks
        self.rank = ranks.index(workers.rank)
        self.num_workers = len(ranks)

    def name(self, rank: int) -> str:
        """See ``WorkerGroup.name``."""
        return self._workers.name(self._ranks[rank])

    def send(self, *pieces: torch.Tensor, to: Iterable[int]) -> None:
        """See ``WorkerGroup.send``."""
        self._workers.send(*pieces, to=[self._ranks[index] for index in to])

    def receive(
        self, size_bytes: int, *, source: int, is_exact: bool = True
    ) -> Iterator[torch.Tensor]:
        """See ``WorkerGroup.receive``."""
        return self._workers.receive(size_bytes, source=self._ranks[source], is_exact=is_exact)

    def collect(self, value: Any, *, root: int) -> list[Any]:
        """Every worker's value, on one of them, in the order of ranks; elsewhere nothing.

        Raises:
            StateError: Something in it is neither plain nor a tensor.
        """
        if self.rank != root:
            self.send(*_pieces(value), to=(root,))
            return []
        return [
            value if index == root else self.receive_value(source=index, what="a value")
            for index in range(self.num_workers)
        ]

    def deliver(self, value: Any, *, root: int) -> Any:
        """The value that one of them has, on all."""
        if self.rank != root:
            return self.receive_value(source=root, what="a value")
        self.send(*_pieces(value), to=self.others(root))
        return value

    def deal(self, value: Callable[[int], Any], *, root: int) -> Any:
        """Each worker's own value, which ``value`` gives on one of them by number."""
        if self.rank != root:
            return self.receive_value(source=root, what="a value")
        for index in self.others(root):
            self.send(*_pieces(value(index)), to=(index,))
        return value(root)


def _pieces(value: Any) -> list[torch.Tensor]:
    return Packed.of(value, what="value").pieces()


def agree(part: PartOfJob, call: CallOfMany) -> None:
    """See that all make the same call.

    Raises:
        CollectiveMismatchError: Two do not; raised on all of them.
    """
    told = part.gather(call.told)
    verdict = part.share(_difference(part, told) if told else "")
    if verdict:
        raise CollectiveMismatchError(verdict)


def _difference(part: PartOfJob, told: Sequence[str]) -> str:
    """Why calls do not fit; empty if they do. Lines may differ."""
    calls = [text.partition("\n") for text in told]
    for index, (call, _, line) in enumerate(calls):
        if call != calls[0][0]:
            return mismatch(
                f"{part.name(0)}: {calls[0][0]}, at {calls[0][2]}",
                f"{part.name(index)}: {f'{call}, at {line}' if call else 'not in such a call'}",
            )
    return ""


def mismatch(one: str, other: str) -> str:
    """The message for two calls that do not fit."""
    return (
        f"workers made calls that do not fit together\n  {one}\n  {other}\n"
        f"  Fix: make the same call on these workers, with the same arguments, and with tensors of "
        f"the same shape and dtype."
    )


def pass_on(part: PartOfJob, values: Sequence[Any]) -> Any:
    """Let the first of two workers give the second a value.

    Args:
        part: The two: the one that sends, then the one that receives.
        values: The value, where it is sent.
    """
    if values:
        part.send(*_pieces(values[0]), to=(1,))
        return None
    return part.receive_value(source=0, what="a value")
