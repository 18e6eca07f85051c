"""Snapshots of own loops on disk: the part of each worker as it is in memory, in a file of its own.

A folder has ``part-0``, ``part-1`` and so on; ``snapshot.json`` is written last. A worker reads the
part of its rank; where another number of workers goes on, each reads all of them, put together.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from graphsplit.encoding.packed import FlatTensors
from graphsplit.encoding.values import decode, encode, to_text
from graphsplit.errors import CheckpointError, ConfigurationError, FrameError
from graphsplit.job.group import WorkerGroup, read_message
from graphsplit.recovery.exchange import share_script
from graphsplit.recovery.snapshot.disk import (
    SNAPSHOT,
    DiskWriter,
    SnapshotFolder,
    text_of,
)
from graphsplit.recovery.snapshot.shard import SnapshotShard
from graphsplit.security.private_files import replace_file
from graphsplit.tensor_meta import has_same_bits

_PARTS = "parts of own loops"
_OF_OPTIMIZERS = "optimizer"  # the names of their tensors begin with it
# Generators that the script does not seed differ between workers: those of the first go on. They
# stand by themselves, in the places of loaders, and in what a kept loader remembers.
_DRAWN = re.compile(r"generators|loader\d|keep\d+/remembered/\d+//(python|numpy)/")
_OWN = frozenset({"rank", "networks", "optimizers", "generators", "loaders"})


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


# Parts put together, for another number of workers. Each has what lived on one worker, and what all
# workers keep alike. Together they are the state of one process: every worker puts all of it back,
# and its first calls decide what lives there.


def merged(parts: Sequence[SnapshotShard], rank: int) -> SnapshotShard:
    """One part that has everything.

    Args:
        parts: Those of all workers that have written.
        rank: The worker that goes on with it.

    Raises:
        ConfigurationError: Something that is kept differs between workers; names it.
    """
    first, tensors = parts[0], _alike_tensors(parts)
    for part in parts[1:]:
        for key, value in first.values.items():
            if key not in _OWN and part.values.get(key) != value:
                raise _differs(key, len(parts))
    values = {
        **first.values,
        "rank": rank,
        "networks": [
            _network([part.values["networks"][at] for part in parts], tensors)
            for at in range(len(first.values["networks"]))
        ],
        "optimizers": [
            encode(_optimizer(parts, at), tensors, path=f"{_OF_OPTIMIZERS}{at}")
            for at in range(len(first.values["optimizers"]))
        ],
    }
    flat = FlatTensors()
    flat.copy(tensors)
    return SnapshotShard(values, flat.memory, flat.slots)


def _alike_tensors(parts: Sequence[SnapshotShard]) -> dict[str, torch.Tensor]:
    """All tensors but those of optimizers, by name; what several workers have is the same."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name in part.slots:
            if not name.startswith(_OF_OPTIMIZERS):
                tensor = part.tensor(name)
                known = found.setdefault(name, tensor)
                if not _DRAWN.match(name) and not has_same_bits(known, tensor):
                    raise _differs(name, len(parts))
    return found


def _network(nodes: Sequence[Any], tensors: dict[str, torch.Tensor]) -> list[Any]:
    """A network without owners: its placement decides them anew."""
    index, node, _ = nodes[0]
    if any(other[:2] != [index, node] for other in nodes):
        raise _differs(f"an attribute, or code that is kept whole, of network {index}", len(nodes))
    values = decode(node, tensors.__getitem__) | {"owners": {}}
    names = {name: has_gradient for _, _, told in nodes for name, has_gradient in told}
    return [index, encode(values, tensors, path=f"net{index}"), [list(p) for p in names.items()]]


def _optimizer(parts: Sequence[SnapshotShard], at: int) -> Mapping[str, Any]:
    """An optimizer with the entries of all workers, in the order in which they were made."""
    told = [decode(part.values["optimizers"][at], part.tensor) for part in parts]
    states = sorted((one for values in told for one in values.pop("state")), key=lambda s: s[1])
    if any(values != told[0] for values in told):
        raise _differs(f"settings of optimizer {at}", len(parts))
    return {**told[0], "is_settled": False, "state": states}


def _differs(what: str, num_workers: int) -> ConfigurationError:
    return ConfigurationError(
        f"a snapshot of a loop of the script's own was written by {num_workers} workers, on which "
        f"{what} was not the same: it belongs to each of them\n"
        f"  Fix: start the job with {num_workers} workers; or remove the folder, and begin anew."
    )
