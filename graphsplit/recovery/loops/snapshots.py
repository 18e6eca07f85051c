"""The snapshots of one worker's own loops: brought away, agreed on, handed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from graphsplit.encoding import records
from graphsplit.encoding.packed import FlatTensors
from graphsplit.errors import ClusterError
from graphsplit.job.group import read_record
from graphsplit.job.job import Job
from graphsplit.recovery.agreement import START, Offer, choose
from graphsplit.recovery.exchange import exchange_parts
from graphsplit.recovery.loops.anew import Parts, Successor
from graphsplit.recovery.snapshot.replicator import HeldCopies, Replicator
from graphsplit.recovery.snapshot.shard import SnapshotShard

_SMALLEST_LIMIT = 64 * 1024 * 1024
_FACTOR = 16  # no worker's part is so much larger than that of the one before it


class LoopSnapshots:
    """The snapshots of one worker.

    Args:
        job: The job.
        successor: The process that comes after this one.
    """

    def __init__(self, job: Job, successor: Successor) -> None:
        self._job = job
        self._successor = successor
        self._parts = successor.received()
        self._number = START
        self._free: list[FlatTensors] = []
        self._used: dict[int, FlatTensors] = {}
        self._replicator: Replicator | None = None
        self._limit_bytes = _SMALLEST_LIMIT

    def agree(self) -> SnapshotShard | None:
        """Find out with all others where to go on. Collective.

        Returns:
            This worker's part of the newest snapshot that all can go back to; None if there is
            none, so that all begin at the beginning.
        """
        group, parts = self._job.control, self._parts
        offer = Offer(
            is_fresh=not parts.own and not parts.held.parts,
            own=tuple(parts.own),
            held=tuple(parts.held.parts),
        )
        told = group.exchange(records.to_text(offer))
        target = choose([read_record(Offer, text, what="an offer of snapshots") for text in told])
        if target.number == START:
            self._parts = Parts()
            return None
        kept = parts.held.only(target.number)
        given = exchange_parts(group, target, kept.parts.get(target.number, ()), ())
        part = parts.own[target.number] if given is None else given[0]
        self._number = target.number
        if part.values.get("rank") != group.rank:
            raise ClusterError(
                f"this process was worker {part.values.get('rank')}, and is worker {group.rank} "
                f"now\n  Fix: start each worker with its MS_NODE_ID."
            )
        self._replicating(part, kept).offer(part, ())
        self._parts = Parts()
        return part

    def take(self, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take a snapshot. All workers take the same ones.

        Args:
            values: All that is no tensor, encoded.
            tensors: The tensors that they name; they are copied.

        Raises:
            MembershipChangedError, JobFailedError: The generation is over.
        """
        if self._replicator is not None:
            self._replicator.wait_committed(self._replicator.offered)
        flat = self._free.pop() if self._free else FlatTensors()
        flat.copy(tensors)
        self._number += 1
        self._used[self._number] = flat
        named = {"number": self._number, "rank": self._job.rank, **values}
        part = SnapshotShard(named, flat.memory, flat.slots)
        replicator = self._replicator or self._replicating(part, HeldCopies())
        replicator.offer(part, ())

    def wait_safe(self) -> None:
        """Wait until the last snapshot is held by others as well.

        Raises:
            MembershipChangedError, JobFailedError: The generation is over.
        """
        if self._replicator is not None:
            self._replicator.wait_committed(self._replicator.offered)

    def start_anew(self) -> NoReturn:
        """Start the script again, with the parts that are here."""
        self.close()
        parts = self._parts
        if self._replicator is not None:
            parts = Parts(dict(self._replicator.own), self._replicator.held)
        self._successor.start(self._job, parts)

    def _replicating(self, part: SnapshotShard, held: HeldCopies) -> Replicator:
        size = sum(piece.numel() for piece in part.pieces())
        limit = max(_SMALLEST_LIMIT, _FACTOR * size)
        self._replicator = Replicator(self._job, held=held, limit_bytes=limit)
        self._replicator.on_release = self._release
        return self._replicator

    def _release(self, part: SnapshotShard) -> None:
        flat = self._used.pop(part.number, None)
        if flat is not None:
            self._free.append(flat)

    def close(self) -> None:
        """End all threads."""
        if self._replicator is not None:
            self._replicator.close()
