"""The snapshots of a worker, of whatever kind: memory for parts, and who brings them away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from graphsplit.encoding import records
from graphsplit.encoding.packed import FlatTensors
from graphsplit.job.group import read_record
from graphsplit.job.job import Job
from graphsplit.recovery.agreement import START, Offer, Target, choose
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.recovery.snapshot.disk import DiskWriter, SnapshotFolder
from graphsplit.recovery.snapshot.replicator import HeldCopies, Replicator
from graphsplit.recovery.snapshot.shard import SnapshotShard


class Parts:
    """The parts of snapshots that one worker takes.

    Args:
        job: The job.
        settings: How often they go to disk, and where.
    """

    writer: ClassVar[type[DiskWriter]]

    def __init__(self, job: Job, settings: SnapshotSettings) -> None:
        self._job, self._settings = job, settings
        self._folder = SnapshotFolder(settings.folder) if settings.folder else None
        self._number = START
        self._since_disk = 0
        self._free: list[FlatTensors] = []
        self._used: dict[int, FlatTensors] = {}
        self._replicator: Replicator | None = None
        self._disk: DiskWriter | None = None

    def _copied(
        self, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> SnapshotShard:
        """The part of the present number; tensors are copied, into memory that is used again."""
        flat = self._free.pop() if self._free else FlatTensors()
        flat.copy(tensors)
        self._used[self._number] = flat
        numbers = {"number": self._number, "rank": self._job.rank}
        return SnapshotShard({**numbers, **values}, flat.memory, flat.slots)

    def _release(self, part: SnapshotShard) -> None:
        flat = self._used.pop(part.number, None)
        if flat is not None:
            self._free.append(flat)

    def _replicate(self, held: HeldCopies) -> Replicator:
        """Bring parts away from now on, in place of who has done so before."""
        self.close()
        self._disk = None
        if self._folder is not None:
            self._disk = self.writer(self._folder, self._job.rank, self._job.num_workers)
            self._disk.tick = self._tick
        made = Replicator(self._job, held=held, disk=self._disk)
        made.on_release = self._release
        self._replicator = made
        return made

    def _tick(self) -> None:
        self._job.member.position.aside += 1

    def _choose(
        self, offer: Offer, seats: Sequence[int] | None = None, *, begins_anew: bool = False
    ) -> Target:
        """Find out with all others where to go on; see ``choose``. Collective.

        Args:
            offer: What this worker offers.
            seats: The workers that are there, where the job goes on without those who are lost.
            begins_anew: Whether all scripts do, and so can go back to any snapshot on disk.
        """
        texts = self._job.control.exchange(records.to_text(offer))
        offers = [read_record(Offer, text, what="an offer of snapshots") for text in texts]
        if begins_anew:
            on_disk = tuple(number for one in offers for number in one.disk)
            offers = [replace(one, reaches=on_disk) for one in offers]
        target = choose(offers, seats)
        self._number, self._since_disk = target.number, 0
        if self._folder is not None and self._job.rank == 0:
            self._folder.remove_after(target.number)
        return target

    def _goes_to_disk(self, replicator: Replicator, steps: int, *, is_due: bool) -> bool:
        """Whether the next snapshot goes to disk; then the one before is there.

        Args:
            replicator: Brings parts away.
            steps: Steps since the snapshot before.
            is_due: Whether it does in any case, where there is a folder.
        """
        self._since_disk += steps
        if self._folder is None or not (is_due or self._since_disk >= self._settings.disk_every):
            return False
        replicator.wait_stored()
        self._since_disk = 0
        return True

    def wait_offered(self) -> None:
        """Wait until what was brought away last counts: a further loss does no harm then.

        Raises:
            MembershipChangedError, JobFailedError: The generation is over.
        """
        assert self._replicator is not None
        self._replicator.wait_committed(self._replicator.offered)

    def wait_safe(self) -> None:
        """Wait until the last snapshot counts, and is on disk if it goes there."""
        self.wait_offered()
        assert self._replicator is not None
        self._replicator.wait_stored()

    def finished(self) -> None:
        """Nothing will have to be recovered."""
        self.close()
        if self._folder is not None:  # whoever was writing last leaves nothing; each host has one
            self._folder.remove_all()

    def close(self) -> None:
        """End all threads; what is being written is written."""
        if self._replicator is not None:
            self._replicator.close()
        if self._disk is not None:
            self._disk.close()
