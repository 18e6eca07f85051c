"""Snapshots on disk, where ``MS_RECOVERY_PATH`` is set.

Each has a folder; that of Models (own loops have another, see ``loops.disk``)::

    snapshots/00000012/
        m0/                what ``model.save`` writes, for the first Model of the script
        m1/                for the second
        snapshot.json      written last: without it there is no snapshot

So a snapshot is loaded by any number of workers, under any placement. Folders older than the last
two complete ones are removed; all of them, when the job has finished.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from graphsplit.checkpoint import by_worker
from graphsplit.checkpoint.contents import KEPT, CheckpointContents
from graphsplit.checkpoint.disk.files import no_tick
from graphsplit.checkpoint.save import write_manifest, write_shard
from graphsplit.encoding.values import from_text, to_text
from graphsplit.errors import CheckpointError
from graphsplit.job.group import read_message
from graphsplit.recovery.snapshot.left import LEFT
from graphsplit.recovery.snapshot.shard import SnapshotShard
from graphsplit.security.private_files import open_to_read, replace_file

SNAPSHOT = "snapshot.json"
FORMAT = "graphsplit snapshot"
VERSION = 6
MAX_BYTES = 1 << 30
KEEP = 2
WRITTEN, COMPLETE = "written", "complete"
_NAME = re.compile(r"\d{8}")

Done = tuple[str, int, str]


def model_folder(folder: Path, index: int) -> Path:
    """Where a Model's state is in a snapshot's folder."""
    return folder / f"m{index}"


class SnapshotFolder:
    """The snapshots on this worker's disk.

    Args:
        root: The folder that holds them.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, number: int) -> Path:
        """The folder of one snapshot."""
        return self.root / f"{number:08d}"

    def numbers(self) -> list[int]:
        """The snapshots that are complete here, oldest first."""
        return sorted(n for n in self._all() if (self.path(n) / SNAPSHOT).is_file())

    def _all(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(p.name) for p in self.root.iterdir() if _NAME.fullmatch(p.name)]
        return []

    def read(self, number: int) -> dict[str, Any]:
        """The content of ``snapshot.json``.

        Raises:
            CheckpointError: It cannot be read, or is not as it was written.
        """
        path = self.path(number) / SNAPSHOT
        try:
            with open_to_read(path) as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        return parse(content[:MAX_BYTES].decode(errors="replace"), what=str(path))

    def prune(self, newest: int) -> None:
        """Remove what is older than the last two complete ones."""
        complete = [n for n in self.numbers() if n <= newest]
        oldest = complete[-KEEP] if len(complete) >= KEEP else newest
        for number in self._all():
            if number < oldest:
                self._remove(number)

    def remove_all(self) -> None:
        """The job has finished: nothing is to be recovered."""
        for number in self._all():
            self._remove(number)

    def remove_after(self, number: int) -> None:
        """The job goes on from a snapshot: later ones are of a past that did not happen."""
        for later in self._all():
            if later > number:
                self._remove(later)

    def _remove(self, number: int) -> None:
        with contextlib.suppress(OSError):
            (self.path(number) / SNAPSHOT).unlink()
        shutil.rmtree(self.path(number), ignore_errors=True)


def text_of(number: int, script: Mapping[str, Any]) -> str:
    """The text of ``snapshot.json``."""
    body = {"format": FORMAT, "version": VERSION, "number": number, "script": script}
    digest = hashlib.sha256(to_text(body).encode()).hexdigest()
    return to_text({**body, "sha256": digest})


def parse(text: str, *, what: str) -> dict[str, Any]:
    """The content of a ``snapshot.json``, its checksum compared.

    Raises:
        CheckpointError: It is not as it was written.
    """
    found = from_text(text, what=what)
    digest = found.pop("sha256", None)
    if found.get("format") != FORMAT:
        raise CheckpointError(f"{what} is no snapshot of graphsplit")
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"{what} is a snapshot of version {str(found.get('version'))[:40]}; this graphsplit "
            f"reads version {VERSION}\n"
            f"  Fix: end the job with the graphsplit that wrote it, or remove its folder."
        )
    if digest != hashlib.sha256(to_text(found).encode()).hexdigest():
        raise CheckpointError(
            f"{what} is damaged: its checksum differs\n  Fix: remove its folder; the snapshot "
            f"before it is used then."
        )
    script = found.get("script")
    if not isinstance(script, dict):
        raise CheckpointError(f"{what} lacks an entry")
    return script


class DiskWriter:
    """Writes parts on a thread of its own; subclasses know of what.

    Args:
        folder: Where to.
        rank: This worker.
        num_workers: How many there are.

    Attributes:
        writing: Numbers of parts that are not written yet.
        tick: Called for each piece that is written.
    """

    def __init__(self, folder: SnapshotFolder, rank: int, num_workers: int) -> None:
        self._folder = folder
        self._rank, self._num_workers = rank, num_workers
        self.writing: tuple[int, ...] = ()
        self.tick: Callable[[], None] = no_tick
        self._thread = ThreadPoolExecutor(1, f"graphsplit-disk-{rank}")
        self._begun: deque[tuple[str, int, Future[Any]]] = deque()

    def put(self, part: SnapshotShard, script: Mapping[str, Any]) -> None:
        """Write this worker's files of a snapshot.

        Args:
            part: This worker's part.
            script: The place in the script; the one of worker ``script["source"]`` counts.
        """
        self.writing = (*self.writing, part.number)
        self._begin(WRITTEN, part.number, self._write, part, script)

    def commit(self, number: int, told: list[str]) -> None:
        """Everybody's files are durable: write what makes them count."""
        self._begin(COMPLETE, number, self._commit, number, told)

    def prune(self, number: int) -> None:
        """A snapshot is complete: remove what is too old."""
        self._begin("", number, self._folder.prune, number)

    def _begin(self, what: str, number: int, call: Callable[..., Any], *arguments: Any) -> None:
        self._begun.append((what, number, self._thread.submit(call, *arguments)))

    def take_done(self) -> Done | None:
        """The work that was done meanwhile, if any.

        Raises:
            CheckpointError: It could not be done.
        """
        if not self._begun or not self._begun[0][2].done():
            return None
        what, number, future = self._begun.popleft()
        try:
            text = future.result()
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) else error
            where = self._folder.root
            raise CheckpointError(
                f"no snapshot can be kept in {where}: {reason}\n"
                f"  Fix: make room there, or set MS_RECOVERY_PATH to another folder."
            ) from error
        if what == WRITTEN:
            self.writing = tuple(n for n in self.writing if n != number)
        return (what, number, text or "") if what else self.take_done()

    def close(self) -> None:
        """Finish what was begun, and end the thread."""
        self._thread.shutdown()

    def _write(self, part: SnapshotShard, script: Mapping[str, Any]) -> str:
        """Write this worker's files durably; what to tell of them."""
        raise NotImplementedError

    def _commit(self, number: int, told: list[str]) -> None:
        """Write ``snapshot.json``, given what each worker has told."""
        raise NotImplementedError


class ModelsOnDisk(DiskWriter):
    """Writes the Models of a script, so that any number of workers can load them."""

    def _write(self, part: SnapshotShard, script: Mapping[str, Any]) -> str:
        models = {}
        for node in part.values["models"]:
            index = int(node["index"])
            folder = model_folder(self._folder.path(part.number), index)
            folder.mkdir(parents=True, exist_ok=True)
            contents = contents_of(part, node)
            files = write_shard(folder, contents, 0, self._rank, self._num_workers, self.tick)
            models[str(index)] = {
                "files": [vars(file) for file in files],
                "sections": told_sections(contents, self._rank, int(node["loader_rank"])),
            }
        told = script if self._rank == script["source"] else None
        return to_text({"models": models, "script": told})

    def _commit(self, number: int, told: list[str]) -> None:
        reports = [read_message(text) for text in told]
        folder = self._folder.path(number)
        for index in reports[0]["models"]:
            shards = [report["models"][index] for report in reports]
            write_manifest(model_folder(folder, int(index)), shards, 0, self._num_workers)
        folder.mkdir(parents=True, exist_ok=True)  # there may be no Model yet that matters
        (script,) = [report["script"] for report in reports if report["script"] is not None]
        replace_file(folder / SNAPSHOT, text_of(number, script).encode())


def told_sections(contents: CheckpointContents, rank: int, loader_rank: int) -> dict[str, Any]:
    """The sections of one worker's part that count for all."""

    def counts(section: str) -> bool:
        if section == "optimizers":
            return True
        if section.startswith((KEPT, LEFT)) or by_worker.saver_of(section) is not None:
            return True  # every worker has its own
        return rank == (loader_rank if section == "loader" else 0)

    return {name: value for name, value in contents.sections.items() if counts(name)}


def contents_of(part: SnapshotShard, node: Mapping[str, Any]) -> CheckpointContents:
    """One Model's share of a part, as a save has it."""
    prefix = f"m{node['index']}"
    found = CheckpointContents(aliases=dict(node["aliases"]), sections=dict(node["sections"]))
    for name in part.slots:
        if name.startswith(f"{prefix}/w/"):
            found.weights[name.removeprefix(f"{prefix}/w/")] = part.tensor(name)
        elif name.startswith(f"{prefix}/t/"):
            found.tensors[name.removeprefix(f"{prefix}/t/")] = part.tensor(name)
    return found
