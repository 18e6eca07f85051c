"""The snapshots of one worker's own loops: brought away, written, agreed on, handed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from graphsplit.errors import ClusterError
from graphsplit.job.job import Job
from graphsplit.recovery.agreement import START, Offer
from graphsplit.recovery.exchange import exchange_parts
from graphsplit.recovery.loops.anew import HandedOver, Successor
from graphsplit.recovery.loops.disk import PartsOnDisk, read_part
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.recovery.snapshot.parts import Parts
from graphsplit.recovery.snapshot.replicator import HeldCopies
from graphsplit.recovery.snapshot.shard import SnapshotShard


class LoopSnapshots(Parts):
    """The snapshots of one worker.

    Args:
        job: The job.
        successor: The process that comes after this one.
        settings: How often they go to disk, and where.

    Attributes:
        may_go_on: Whether an earlier process, or job, may have taken one.
    """

    writer = PartsOnDisk

    def __init__(self, job: Job, successor: Successor, settings: SnapshotSettings) -> None:
        super().__init__(job, settings)
        self._successor = successor
        self.may_go_on = job.generation > 1 or self._folder is not None
        self._parts = successor.received()

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
            disk=() if self._folder is None else tuple(self._folder.numbers()),
        )
        target = self._choose(offer, begins_anew=True)
        self._parts = HandedOver()
        if target.number == START:
            return None
        kept = parts.held.only(target.number)
        if target.from_disk:
            part = read_part(group, self._folder, target.number)
        else:
            part, _ = exchange_parts(group, target, parts.own, kept)
        if part.values.get("rank") != group.rank:
            raise ClusterError(
                f"this process was worker {part.values.get('rank')}, and is worker {group.rank} "
                f"now\n  Fix: start each worker with its MS_NODE_ID."
            )
        self._replicate(kept).offer(part, ())
        return part

    def take(
        self,
        values: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        rounds: int,
        is_last: bool = False,
    ) -> None:
        """Take a snapshot. All workers take the same ones.

        Args:
            values: All that is no tensor, encoded.
            tensors: The tensors that they name; they are copied.
            rounds: Batches since the snapshot before.
            is_last: The job ends here: wait until it is safe, on disk where there is a folder.

        Raises:
            MembershipChangedError, JobFailedError: The generation is over.
            CheckpointError: An earlier one could not be written.
        """
        if self._replicator is not None:
            self.wait_offered()
        self._number += 1
        part = self._copied(values, tensors)
        replicator = self._replicator or self._replicate(HeldCopies())
        goes_to_disk = self._goes_to_disk(replicator, rounds, is_due=is_last)
        replicator.offer(part, (), script={} if goes_to_disk else None)
        if is_last:
            self.wait_safe()

    def start_anew(self) -> NoReturn:
        """Start the script again, with the parts that are here."""
        self.close()
        parts = self._parts
        if self._replicator is not None:
            parts = HandedOver(dict(self._replicator.own), self._replicator.held)
        self._successor.start(self._job, parts)
