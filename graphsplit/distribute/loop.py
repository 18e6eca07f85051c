"""A job, as the script's own loop uses it: who has a value, and how it comes to others."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from graphsplit.job.group import WorkerGroup
from graphsplit.job.job import Job
from graphsplit.optimizers.ownership import Residence
from graphsplit.tensor_meta import TensorMeta
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

META = torch.device("meta")
_loops: WeakKeyDictionary[Job, Loop] = WeakKeyDictionary()


class Loop:
    """The workers that run one script, line by line alike.

    Args:
        job: The job.

    Attributes:
        job: The job.
        num_changes: Grows whenever values were written to by more than operations of the script, as
            gradients are by a backward; on all workers alike.
        residences: Where the tensors of each distributed network live, under a name of its own.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.num_changes = 0
        self.residences: dict[str, Residence] = {}

    @staticmethod
    def of(job: Job) -> Loop:
        """The one of a job."""
        return _loops.setdefault(job, Loop(job))

    @property
    def rank(self) -> int:
        """This worker."""
        return self.job.rank

    @property
    def group(self) -> WorkerGroup:
        """All workers."""
        return self.job.control

    def share(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Give every worker a value; elsewhere ``tensor`` has its shape alone."""
        with self.job.reporting(), torch.no_grad(), DisableTorchFunctionSubclass():
            meta = TensorMeta.of(tensor)
            if self.rank == source:
                self.group.send(tensor.detach(), to=self.group.others(source))
                return tensor.detach()
            return _laid_out(self.group.receive_tensor(meta, source=source), meta)

    def move(self, tensor: torch.Tensor, source: int, destination: int) -> torch.Tensor:
        """Move a value from one worker to another one; all others get its shape alone."""
        with self.job.reporting(), torch.no_grad(), DisableTorchFunctionSubclass():
            meta = TensorMeta.of(tensor)
            if self.rank == source:
                self.group.send(tensor.detach(), to=(destination,))
            elif self.rank == destination:
                return _laid_out(self.group.receive_tensor(meta, source=source), meta)
            return shape_of(tensor)


def shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that has the shape, strides and dtype of another one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _laid_out(received: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    made = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype)
    return made.copy_(received)
