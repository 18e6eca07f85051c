"""How often snapshots are taken, and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphsplit.settings import ClusterSettings

_FOLDER = "snapshots"


@dataclass(frozen=True)
class SnapshotSettings:
    """How often snapshots are taken, and where they go.

    Attributes:
        every: Training steps from one snapshot to the next.
        disk_every: Training steps from one snapshot on disk to the next: the first snapshot after
            so many steps goes there.
        folder: Where snapshots on disk are; None: only in memory.
    """

    every: int = ClusterSettings.snapshot_every
    disk_every: int = ClusterSettings.snapshot_disk_every
    folder: Path | None = None

    @classmethod
    def of(cls, settings: ClusterSettings) -> SnapshotSettings:
        """The settings that the environment gives."""
        path = settings.recovery_path
        folder = Path(path) / _FOLDER if path else None
        return cls(settings.snapshot_every, settings.snapshot_disk_every, folder)
