"""Snapshots of own loops on disk: the part of each worker as it is in memory, in a file of its own.

A folder has ``part-0``, ``part-1`` and so on; ``snapshot.json`` is written last. A worker reads the
part of its rank; where another number of workers goes on, each reads all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from graphsplit.encoding.values import to_text
from graphsplit.errors import CheckpointError, ConfigurationError, FrameError
from graphsplit.job.group import WorkerGroup, read_message
from graphsplit.recovery.exchange import share_script
from graphsplit.recovery.loops.merged import merged
from graphsplit.recovery.snapshot.disk import (
    SNAPSHOT,
    DiskWriter,
    SnapshotFolder,
    text_of,
)
from graphsplit.recovery.snapshot.shard import SnapshotShard
from graphsplit.security.private_files import replace_file

_PARTS = "parts of own loops"


class PartsOnDisk(DiskWriter):
    """Writes the parts of own loops."""

    def _write(self, part: SnapshotShard, script: Mapping[str, Any]) -> str:
        path = _path(self._folder.path(part.number), self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        octets, digest = [piece.numpy().data for piece in part.pieces()], hashlib.sha256()
        for one in octets:
            digest.update(one)
            self.tick()
        replace_file(path, *octets)
        return to_text({"size": sum(map(len, octets)), "sha256": digest.hexdigest()})

    def _commit(self, number: int, told: list[str]) -> None:
        folder = self._folder.path(number)
        script = {_PARTS: [read_message(text) for text in told]}
        replace_file(folder / SNAPSHOT, text_of(number, script).encode())


def read_part(group: WorkerGroup, folder: SnapshotFolder | None, number: int) -> SnapshotShard:
    """This worker's part of a snapshot on disk. Collective.

    Raises:
        CheckpointError: It cannot be read, or is not as it was written; it is none of own loops.
        ConfigurationError: Another number of workers has written it, and not all of it was the same
            on them; or one worker alone is to go on.
    """
    parts = share_script(group, folder, number).get(_PARTS)
    where = f"MS_RECOVERY_PATH ({folder.root.parent})" if folder is not None else "MS_RECOVERY_PATH"
    if not isinstance(parts, list):
        raise CheckpointError(
            f"snapshot {number} in {where} is that of a gs.Model, and this script has a loop of "
            f"its own\n  Fix: give each script a folder of its own, or remove what is there."
        )
    if folder is None:
        raise CheckpointError(f"worker {group.rank} has no MS_RECOVERY_PATH, and others have")
    paths = [_path(folder.path(number), rank) for rank in range(len(parts))]
    if len(parts) == group.num_workers:
        return _read(paths[group.rank], parts[group.rank])
    if group.num_workers == 1:
        raise ConfigurationError(
            f"snapshot {number} in {where} was written by {len(parts)} workers, and here is one: a "
            f"loop of the script's own goes on with two or more\n"
            f"  Fix: start the job with two workers; or remove the folder, and begin anew."
        )
    return merged([_read(*pair) for pair in zip(paths, parts, strict=True)], group.rank)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank}"


def _read(path: Path, told: Any) -> SnapshotShard:
    try:
        content = bytearray(path.read_bytes()) if path.stat().st_size == told["size"] else b""
        if hashlib.sha256(content).hexdigest() != told["sha256"]:
            raise FrameError("its checksum differs")
        octets = torch.frombuffer(content, dtype=torch.uint8)
        return SnapshotShard.read([octets], what="it")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (FrameError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}\n  Fix: remove its folder; the snapshot before it is used "
            f"then."
        ) from None
