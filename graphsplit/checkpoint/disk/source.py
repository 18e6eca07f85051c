"""The files of one save, wherever they can be seen.

Workers may share a disk, or some of them, or none. Each looks for the save under the path that its
own script gave; then all tell what they found. Of each file the lowest worker that sees it whole
is the *reader*: it reads for those who do not see the file, and streams to them what they need::

    worker 0   sees weights-00000, weights-00001    reads both for itself, streams to 2
    worker 1   sees weights-00000, weights-00001    reads both for itself
    worker 2   sees nothing                         receives

No path and no name comes from another worker: names follow from two numbers in the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphsplit.checkpoint.disk import folder as folders
from graphsplit.checkpoint.disk.files import TensorFile
from graphsplit.checkpoint.disk.manifest import MANIFEST, Manifest
from graphsplit.encoding.values import from_text, meta_from_json, meta_to_json, to_text
from graphsplit.errors import CheckpointError, TransportError
from graphsplit.job.group import WorkerGroup, read_message
from graphsplit.tensor_meta import TensorMeta


@dataclass(frozen=True, eq=False)
class TensorRequest:
    """One tensor that some workers need.

    Attributes:
        name: Its name in the save.
        holds: ``"weights"`` or ``"training"``.
        receivers: The workers that need it.
        target: What its value goes into, for the one who takes it.
    """

    name: str
    holds: str
    receivers: Sequence[int]
    target: torch.Tensor | None = None


@dataclass(frozen=True)
class Stored:
    """Where a tensor of the save is.

    Attributes:
        file: The file's name.
        meta: Its dtype and shape.
    """

    file: str
    meta: TensorMeta


class Source:
    """The files of one save. All workers call its methods in the same order.

    Files stay open as long as the source lives, so that a save which is removed meanwhile can
    still be read.

    Attributes:
        tensors: All tensors of the weights and of the training state, by name.
        aliases: Other names of tied weights.
        values: What is saved beside tensors: the sections of a training state, or what belongs to
            a single file.
    """

    def __init__(self, group: WorkerGroup, files: dict[str, TensorFile]) -> None:
        self._group = group
        self._files = files
        self._seers: dict[str, list[int]] = {}
        self.tensors: dict[str, dict[str, Stored]] = {"weights": {}, "training": {}}
        self.aliases: dict[str, str] = {}
        self.values: dict[str, Any] = {}

    @classmethod
    def open_folder(cls, folder: Path, group: WorkerGroup) -> Source:
        """Open a saved training state. Collective.

        Raises:
            CheckpointError: Nobody sees a complete save there; the same on all workers.
        """
        text, problem = "", ""
        try:
            text = folders.read_manifest_text(folder)
        except CheckpointError as error:
            problem = str(error)
        text = group.share_first(text, problem, what=str(folder))
        manifest = Manifest.read(text, what=str(folder / MANIFEST))
        files, problems = folders.open_whole(folder, manifest)
        source = cls(group, files)
        names = [record.name for record in manifest.files]
        source._find_readers(names, problems, folder)
        for name in names:
            source._read_index(name, name.partition(".")[0].partition("-")[0])
        source.values = dict(manifest.training)
        return source

    @classmethod
    def open_file(cls, path: Path, group: WorkerGroup, *, holds: str) -> Source:
        """Open a single safetensors file, ours or another's. Collective.

        Raises:
            CheckpointError: Nobody sees a whole file there; the same on all workers.
        """
        files: dict[str, TensorFile] = {}
        problem = ""
        try:
            files[path.name] = TensorFile(path)
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{path} cannot be read: {error.strerror}"
        # Who sees another file than the first who sees any, such as an older one, sees none.
        record = vars(files[path.name].record) if files else None
        first = group.share_first(to_text(record) if record else "", problem, what=str(path))
        if record is not None and to_text(record) != first:
            files.pop(path.name).close()
        source = cls(group, files)
        source._find_readers([path.name], [], path.parent)
        source._read_index(path.name, holds)
        return source

    def _find_readers(self, names: Sequence[str], problems: list[str], folder: Path) -> None:
        told = self._group.exchange(to_text({"sees": list(self._files), "problems": problems}))
        reports = [read_message(text) for text in told]
        faults: dict[str, None] = {}
        for name in names:
            self._seers[name] = [
                rank for rank, report in enumerate(reports) if name in report.get("sees", ())
            ]
            if not self._seers[name]:
                faults[f"{folder / name} is seen by no worker"] = None
        if faults:
            causes = [str(p) for report in reports for p in report.get("problems", ())]
            raise CheckpointError(
                f"{folder} holds no complete save:\n  "
                + "\n  ".join(dict.fromkeys([*causes, *faults]))
                + "\n  Fix: load another save. Workers that share no disk save with "
                "model.save(path, gather=True), or load each on the host where it saved."
            )

    def _read_index(self, name: str, holds: str) -> None:
        """Learn what is in a file, from its reader where it is not seen here."""
        seers = self._seers[name]
        text = ""
        if self._group.rank == seers[0]:
            file = self._files[name]
            metas = {key: meta_to_json(meta) for key, meta in file.metas.items()}
            aliases, values = dict(file.info.aliases), file.info.values
            text = to_text({"tensors": metas, "aliases": aliases, "values": values})
        if len(seers) < self._group.num_workers:
            text = self._group.share(text, source=seers[0])
        elif self._group.rank != seers[0]:
            file = self._files[name]
            self._add(name, holds, file.metas, dict(file.info.aliases), file.info.values)
            return
        found = from_text(text, what=f"the index of {name}")
        metas_found = {
            key: meta_from_json(node, what=f"{key!r} in {name}")
            for key, node in _dict(found.get("tensors"), name).items()
        }
        self._add(name, holds, metas_found, _dict(found.get("aliases"), name), found.get("values"))

    def _add(
        self, name: str, holds: str, metas: dict[str, TensorMeta], aliases: Any, values: Any
    ) -> None:
        for key, meta in metas.items():
            self.tensors[holds][key] = Stored(name, meta)
        self.aliases.update(aliases)
        if isinstance(values, dict):
            self.values.update(values)

    def verify(self, requests: Sequence[TensorRequest]) -> None:
        """Read everything that will be read once, before anything is loaded. Collective.

        Raises:
            CheckpointError: Something is damaged; the same on all workers.
        """
        problems = []
        for request in requests:
            stored = self.tensors[request.holds][request.name]
            if self._reads(request, stored):
                try:
                    self._files[stored.file].read(request.name)
                except CheckpointError as error:
                    problems.append(str(error))
                self._group.tick()
        self._group.agree_none(problems)

    def _reads(self, request: TensorRequest, stored: Stored) -> bool:
        """Whether this worker reads a tensor, for itself or for others."""
        seers = self._seers[stored.file]
        mine = self._group.rank in request.receivers and self._group.rank in seers
        for_others = self._group.rank == seers[0] and bool(set(request.receivers) - set(seers))
        return mine or for_others

    def deliver(
        self, requests: Sequence[TensorRequest], take: Callable[[TensorRequest, torch.Tensor], None]
    ) -> None:
        """Give every worker what it needs, one tensor at a time.

        Collective where some worker does not see a file; without messages where all see all.

        Args:
            requests: The tensors, the same on all workers.
            take: Called with each tensor that this worker needs.
        """
        for request in requests:
            stored = self.tensors[request.holds][request.name]
            seers = self._seers[stored.file]
            blind = [rank for rank in request.receivers if rank not in seers]
            tensor: torch.Tensor | None = None
            if self._reads(request, stored):
                tensor = self._read_again(request.name, stored.file)
                if self._group.rank == seers[0] and blind:
                    self._group.send(tensor, to=blind)
            elif self._group.rank in blind:
                tensor = self._group.receive_tensor(stored.meta, source=seers[0])
            if self._group.rank in request.receivers:
                assert tensor is not None
                take(request, tensor)
            self._group.tick()

    def _read_again(self, name: str, file: str) -> torch.Tensor:
        try:
            return self._files[file].read(name)
        except CheckpointError as error:  # only this worker knows, and others may wait for it
            raise TransportError(f"a save changed while it was loaded: {error}") from None

    def fetch(self, requests: Sequence[TensorRequest]) -> dict[str, torch.Tensor]:
        """All tensors that this worker needs at once, by name; ``deliver`` says how."""
        found: dict[str, torch.Tensor] = {}

        def take(request: TensorRequest, tensor: torch.Tensor) -> None:
            found[request.name] = tensor

        self.deliver(requests, take)
        return found


def _dict(node: Any, name: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise CheckpointError(f"the index of {name} is no object")
    return node
