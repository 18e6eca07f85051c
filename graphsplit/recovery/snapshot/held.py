"""All parts of a snapshot in the memory of every worker, read as a save is.

So a snapshot may be put back by another number of workers than have taken it: as on disk, what is
in it has names, and each worker takes what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphsplit.checkpoint.contents import merge
from graphsplit.checkpoint.disk.source import Source, Stored, TensorRequest
from graphsplit.job.group import WorkerGroup
from graphsplit.recovery.snapshot.disk import contents_of, told_sections
from graphsplit.recovery.snapshot.shard import SnapshotShard
from graphsplit.tensor_meta import plain_meta

IN_MEMORY = "the snapshot"


class HeldSource(Source):
    """One Model's state in the parts of a snapshot, all of which every worker holds.

    Args:
        group: All workers.
        parts: The parts, by the ranks of those who took them.
        index: Which Model of the script it is.
    """

    def __init__(self, group: WorkerGroup, parts: Sequence[SnapshotShard], index: int) -> None:
        super().__init__(group, {})
        self._values: dict[str, dict[str, torch.Tensor]] = {"weights": {}, "training": {}}
        told = []
        for part in parts:
            node = next(node for node in part.values["models"] if node["index"] == index)
            contents = contents_of(part, node)
            self._values["weights"].update(contents.weights)
            self._values["training"].update(contents.tensors)
            self.aliases.update(contents.aliases)
            told.append(told_sections(contents, part.rank, int(node["loader_rank"])))
        for holds, tensors in self._values.items():
            metas = {name: plain_meta(tensor) for name, tensor in tensors.items()}
            self.tensors[holds] = {name: Stored(IN_MEMORY, meta) for name, meta in metas.items()}
        self.values = merge(told)

    def verify(self, requests: Sequence[TensorRequest]) -> None:
        """Nothing can be damaged in memory."""

    def deliver(
        self, requests: Sequence[TensorRequest], take: Callable[[TensorRequest, torch.Tensor], None]
    ) -> None:
        """Give this worker what it needs. No messages: everybody holds all."""
        for request in requests:
            if self._group.rank in request.receivers:
                take(request, self._values[request.holds][request.name].clone())
