"""A job, as the script's own loop uses it: who has a value, and how it comes to others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from graphsplit.cluster.wire.messages import ASKING, END_OF_SCRIPT
from graphsplit.distribute.workers.here import WITHOUT_PLACE, FromOutside, Here
from graphsplit.distribute.workers.left_values import LeftValues
from graphsplit.distribute.workers.twins import Twins
from graphsplit.distribute.workers.writes import CountedWrites
from graphsplit.errors import ConfigurationError, LoaderMismatchError
from graphsplit.job.group import WorkerGroup
from graphsplit.job.job import Job
from graphsplit.optimizers.ownership import Residence, is_elsewhere
from graphsplit.tensor_meta import TensorMeta
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

META = torch.device("meta")
_LOOP = "_graphsplit_own_loop"  # attribute of a job

_MOVING = "way to another worker"
_OUTSIDE = (
    "backward came to a distributed network from an ordinary tensor, into which a value that lives "
    "on one worker was written: all gradients of one backward cannot be added up in eager's order\n"
    "  Fix: make a new tensor of the values, as torch.stack(losses) does."
)


class Loop:
    """The workers that run one script, line by line alike.

    Args:
        job: The job.

    Attributes:
        job: The job.
        rank: This worker.
        group: All workers.
        num_changes: Grows whenever values were written to by more than operations of the script, as
            gradients are by a backward; on all workers alike.
        steps: Writes to parameters by steps, or where ``.data`` was set.
        loads: Loaded states.
        calls: Calls of networks, which may write to buffers.
        residences: Where the tensors of each distributed network live, under a name of its own.
        here: Those that live on this worker, under the same name.
        singles: Those of one element among these.
        num_settled: Grows whenever a network's tensors are known to live somewhere.
        taken: What operations of the script took from outside.
        is_calling: Whether a network runs forward: each worker does other things meanwhile.
        networks: All that were distributed, copies included, in order.
        is_followed: Whether the backward under way runs operations of the script on shapes.
        unsent: Sends others the numbers that they wait for, of the backward under way.
        untold: Learns the numbers of others.
        twins: Values of which parameters of other workers have copies.
        left: What calls have left in Python for the script.
        given: The modules whose buffers were set to values, by the module's id and the name.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.rank = job, job.rank
        self.group: WorkerGroup = job.control
        self.num_changes = 0
        self.steps, self.loads, self.calls = CountedWrites(), CountedWrites(), CountedWrites()
        self.residences: dict[str, Residence] = {}
        self.here: dict[str, list[torch.Tensor]] = {}
        self.singles: dict[str, list[torch.Tensor]] = {}
        self.num_settled = 0
        self.taken, self.twins = FromOutside(), Twins()
        self.is_calling = self.is_followed = False
        self.unsent: Callable[[], None] | None = None
        self.untold: Callable[[], None] | None = None
        self.networks: list[weakref.ref[nn.Module]] = []
        self.left = LeftValues(self.twins)
        self.given: dict[tuple[int, str], weakref.ref[nn.Module]] = {}
        self._totals: dict[int, torch.Tensor] | None = None
        job.at_end.append(self._compare_at_end)

    def _compare_at_end(self) -> None:
        """Writes of one worker alone, since the last message, end the job here.

        Raises:
            LoaderMismatchError: One has.
        """
        if self.job.is_stopping or not self.residences:
            return
        calls = self.job.member.position.calls
        calls.begin(END_OF_SCRIPT)
        try:
            told = self.group.exchange(f"{self.taken.written} {self.taken.latest_write()}")
        finally:
            calls.end()
        sums, _, writes = zip(*(one.partition(" ") for one in told), strict=True)
        if len(set(sums)) > 1:
            ends = "; ".join(f"worker {n} came to it{one}" for n, one in enumerate(writes))
            raise LoaderMismatchError(
                f"the workers have changed parameters, gradients, hooks or optimizers differently "
                f"by the end of the script: {ends}\n"
                f"  Fix: let all workers do so, none below an `if` on the rank."
            )

    @staticmethod
    def of(job: Job) -> Loop:
        """The one of a job."""
        found: Loop | None = getattr(job, _LOOP, None)
        if found is None:
            found = Loop(job)
            setattr(job, _LOOP, found)
        return found

    def add_up(self, totals: dict[int, torch.Tensor] | None) -> None:
        """Let a backward add up gradients of parameters here, by the parameter's id.

        Args:
            totals: The gradients so far; None when it is over.
        """
        self._totals, self.unsent, self.untold = totals, None, None

    def tell(self) -> None:
        """Tell others the numbers of the backward under way; once."""
        send, self.unsent = self.unsent, None
        if send is not None:
            send()

    def learn_told(self) -> None:
        """Let all workers know the numbers of the backward under way; once."""
        self.tell()
        learn, self.untold = self.untold, None
        if learn is not None:
            learn()

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward is under way."""
        return self._totals is not None

    def totals_now(self) -> dict[int, torch.Tensor]:
        """Where the backward under way adds up gradients of parameters.

        Raises:
            ConfigurationError: None is, or it is that of a tensor which is no value of the loop.
        """
        if self._totals is None:
            raise ConfigurationError(_OUTSIDE)
        return self._totals

    def is_own_memory(self, number: torch.Tensor) -> bool:
        """Whether no parameter or buffer is in the memory of a tensor of one element."""
        start, is_whole = number.data_ptr(), number.untyped_storage().nbytes() == number.nbytes
        singles = chain.from_iterable(list(self.singles.values()))  # a network may go meanwhile
        return is_whole and all(single.data_ptr() != start for single in singles)

    def settle(self, name: str, residence: Residence) -> None:
        """Take note of where the tensors of a network live, under a name of its own."""
        with DisableTorchFunctionSubclass():
            here = [tensor for tensor in residence.unique() if not is_elsewhere(tensor)]
            self.singles[name] = [tensor for tensor in here if tensor.numel() == 1]
        self.residences[name], self.here[name] = residence, here
        self.num_settled += 1

    def forget(self, name: str) -> None:
        """A network is gone."""
        self.residences.pop(name, None)
        self.singles.pop(name, None)
        self.here.pop(name, None)

    def share(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Give every worker a value; elsewhere ``tensor`` has its shape alone."""
        with self._moving() as group:
            return group.broadcast(tensor.detach(), TensorMeta.of(tensor), source=source)

    def move(self, tensor: torch.Tensor, source: int, destination: int) -> torch.Tensor:
        """Move a value from one worker to another one; all others get its shape alone."""
        with self._moving() as group:
            meta = TensorMeta.of(tensor)
            if self.rank == source:
                group.send_laid_out(tensor.detach(), to=(destination,))
            elif self.rank == destination:
                return group.receive_laid_out(meta, source=source)
            return shape_of(tensor)

    def carry(
        self, tensor: torch.Tensor, source: int | None, destination: int | None
    ) -> torch.Tensor:
        """A value where it is to be, its shape elsewhere; None: all workers."""
        if source is None:  # whoever is to have it has it already
            return tensor.detach() if self.rank == destination else shape_of(tensor)
        if destination is None:
            return self.share(tensor, source)
        return self.move(tensor, source, destination)

    @contextmanager
    def _moving(self) -> Iterator[WorkerGroup]:
        """Inside, an operation of the script moves a value; all workers come to it together."""
        self.learn_told()  # it came before
        here, calls = Here(self.job, self.taken, _MOVING), self.job.member.position.calls
        with (
            self.job.reporting(),
            torch.no_grad(),
            DisableTorchFunctionSubclass(),
            here.about(WITHOUT_PLACE * 2 + self.taken.checksum),
        ):
            calls.begin(ASKING + _MOVING)
            try:
                yield self.job.asked
            finally:
                calls.end()


def empty_as(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor without memory of a tensor's shape and dtype, and of these strides."""
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=META)


def shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that has the shape, strides and dtype of another one."""
    return empty_as(tensor, tensor.stride())


# Where a value of the script comes to other workers: steps of its autograd graph. Every worker
# records the same graph of the script's operations, with values where they are, with shapes
# elsewhere. So backward comes to these steps in one order on all workers, and each of them moves
# the gradient back the way that the value came.


class _Way(Function):
    """From where a value is to where it is used; None: all workers."""

    @staticmethod
    def forward(
        ctx: Any, loop: Loop, source: int | None, destination: int | None, tensor: torch.Tensor
    ) -> torch.Tensor:
        """The value where it is used, its shape elsewhere."""
        ctx.loop, ctx.source, ctx.destination, ctx.graphsplit_way = loop, source, destination, True
        return loop.carry(tensor, source, destination)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The same way back."""
        return None, None, None, ctx.loop.carry(gradient, ctx.destination, ctx.source)


way: Callable[[Loop, int | None, int | None, torch.Tensor], torch.Tensor] = _Way.apply
