"""The snapshots of a worker, of whatever kind: memory for parts, and who brings them away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from graphsplit.encoding.packed import FlatTensors
from graphsplit.job.job import Job
from graphsplit.recovery.agreement import START
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.recovery.snapshot.disk import DiskWriter, SnapshotFolder
from graphsplit.recovery.snapshot.replicator import HeldCopies, Replicator
from graphsplit.recovery.snapshot.shard import SnapshotShard

SMALLEST_LIMIT = 64 * 1024 * 1024


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

    def _replicate(self, held: HeldCopies, limit_bytes: int) -> Replicator:
        """Bring parts away from now on, in place of who has done so before."""
        self.close()
        self._disk = None
        if self._folder is not None:
            self._disk = self.writer(self._folder, self._job.rank, self._job.num_workers)
        made = Replicator(self._job, held=held, limit_bytes=limit_bytes, disk=self._disk)
        made.on_release = self._release
        self._replicator = made
        return made

    def wait_offered(self) -> None:
        """Wait until what was brought away last counts: a further loss does no harm then.

        Raises:
            MembershipChangedError, JobFailedError: The generation is over.
        """
        assert self._replicator is not None
        self._replicator.wait_committed(self._replicator.offered)

    def finished(self) -> None:
        """Nothing will have to be recovered."""
        self.close()
        if self._folder is not None and self._job.rank == 0:
            self._folder.remove_all()

    def close(self) -> None:
        """End all threads; what is being written is written."""
        if self._replicator is not None:
            self._replicator.close()
        if self._disk is not None:
            self._disk.close()
