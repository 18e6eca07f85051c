"""Gather a Model's state on every worker, and load what a worker owns out of it."""

from __future__ import annotations

import functools
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from graphsplit.checkpoint.contents import parameters_of
from graphsplit.checkpoint.own_state_code import own_loading, own_saving
from graphsplit.errors import ConfigurationError, StateError
from graphsplit.job.group import WorkerGroup
from graphsplit.job.job import Job
from graphsplit.optimizers.optimizer import order_of
from graphsplit.optimizers.own_step import by_the_model
from graphsplit.optimizers.ownership import Elsewhere
from graphsplit.planning.task import Task, named_state
from graphsplit.tensor_meta import TensorMeta, contiguous_strides, sample_of
from graphsplit.torch_ext.attributes import STATE_VERSIONS, storage_of
from graphsplit.torch_ext.private import leaves_of, pytree
from graphsplit.torch_ext.stand_ins import StandIn, as_ordinary

_NOT_LOOKED_AT = "-"
_ADDRESS = re.compile(r"0x[0-9a-f]+")


class StateGatherer:
    """Moves whole states, tensor by tensor, in an order that all workers share."""

    def __init__(self, task: Task, job: Job, owners: Mapping[str, int]) -> None:
        self._task = task
        self._job = job
        # Optimizers may still hold parameters of layers that were taken out of the network.
        held = {str(id(p)): p for one in task.optimizers for p in parameters_of(one)}
        self._owner_of = {int(number): rank for number, rank in job.owners.known(held).items()}
        self._owner_of |= {
            id(tensor): owners[name]
            for name, tensor in named_state(task.network, task.loss_fn).items()
            if name in owners
        }

    def gather_network(self) -> dict[str, Any]:
        """The network's own ``state_dict``: hooks have run, values are copied."""
        network = self._task.network
        with as_ordinary(_tensors(network), Elsewhere), torch.no_grad():
            if own_saving(network, with_extra=True):  # it may look at every value
                self._bring_values(network)
                return _copied(network.state_dict())
            found: dict[str, Any] = network.state_dict(keep_vars=True)
            copies: dict[int, torch.Tensor] = {}
            for key, value in found.items():
                if isinstance(value, torch.Tensor):
                    if id(value) not in copies:  # tied tensors travel once
                        copies[id(value)] = self._gather_tensor(value)
                    found[key] = copies[id(value)]
        return found

    def _bring_values(self, network: nn.Module) -> None:
        """Give every stand-in the value it stands for; its memory is there."""
        for tensor in _tensors(network):
            if id(tensor) in self._owner_of:
                tensor.data.copy_(self._gather_tensor(tensor))

    def _gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        owner = self._owner_of.get(id(tensor))
        if owner is None:  # not planned yet: every worker has it
            return tensor.detach().clone()
        meta = TensorMeta(tensor.dtype, tuple(tensor.shape), contiguous_strides(tensor.shape))
        found = self._job.control.broadcast(tensor.detach(), meta, source=owner)
        return found.clone() if owner == self._job.rank else found

    def load_network(self, state: Mapping[str, Any], **options: Any) -> Any:
        """Let the network's own ``load_state_dict`` load a full state on every worker.

        Each keeps what it owns. Hooks and overridden methods see what they would in one process.

        Args:
            state: The state.
            options: Those of ``load_state_dict``, as ``strict``.

        Returns:
            What ``load_state_dict`` returns.

        Raises:
            StateError: It does not fit, or the network's code refuses it; the same on all workers.
        """
        network = self._task.network
        named, given = named_state(network, None), _checksum(state)
        with as_ordinary(_tensors(network), Elsewhere):
            if own_loading(network, with_extra=True):
                with torch.no_grad():
                    self._bring_values(network)
            told: list[Any] = []
            error = _error_of(lambda: told.append(network.load_state_dict(state, **options)))
        now = named_state(network, None)
        replaced = [name for name, tensor in named.items() if now.get(name) is not tensor]
        if replaced and self._owner_of:
            error = StateError(
                f"loading has put another tensor in the place of {', '.join(replaced)}, whose "
                f"owner is fixed\n  Fix: copy values into it (assign=False), or load before the "
                f"optimizer is made and the Model first runs."
            )
        self._agree(error, "the network", given)
        return told[0]

    def _agree(self, error: Exception | None, what: str, given: str) -> None:
        """Raise the same on all workers, so that a script may catch it on all alike."""
        mine = "" if error is None else f"{type(error).__name__}: {error}"
        found = self._job.control.exchange(f"{given} {_ADDRESS.sub('0x', mine)}")
        sums, _, told = zip(*(one.partition(" ") for one in found), strict=True)
        if len(set(told)) > 1:
            by_rank = "\n  ".join(f"worker {rank}: {t or 'fine'}" for rank, t in enumerate(told))
            raise ConfigurationError(
                f"loading a state into {what} ended otherwise on some workers\n  {by_rank}\n"
                f"  Fix: pass the same state on every worker."
            ) from error
        if len({*sums} - {_NOT_LOOKED_AT}) > 1:
            raise ConfigurationError(
                f"the workers load different values into {what}: each would have its part of "
                f"another state\n"
                f"  Fix: pass the same state on every worker; where one writes a file that all "
                f"read, call gs.barrier() in between."
            )
        if error is not None:
            refused = StateError(f"the state does not fit {what}\n  {mine}")
            refused.is_settled = True
            raise refused from error

    def gather_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's own ``state_dict``, with the entries of all workers."""
        own = optimizer.state
        whole = gather_entries(optimizer, self._owner_of, self._job.control)
        optimizer.state = whole
        try:
            with by_the_model():
                return optimizer.state_dict()
        finally:
            optimizer.state = own

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Let the optimizer's own ``load_state_dict`` load a full state; keep what is owned.

        Raises:
            StateError: It does not fit, or the optimizer's code refuses it; the same on all
                workers.
        """
        given = _checksum(state)
        error = _error_of(lambda: optimizer.load_state_dict(dict(state)))
        if error is None:
            loaded = [key for key in optimizer.state if isinstance(key, torch.Tensor)]
            order_of(optimizer).note_loaded(loaded)
        for parameter in parameters_of(optimizer):
            if self._owner_of.get(id(parameter), self._job.rank) != self._job.rank:
                optimizer.state.pop(parameter, None)
        self._agree(error, "the optimizer", given)


def gather_entries(
    optimizer: torch.optim.Optimizer, owner_of: Mapping[int, int], group: WorkerGroup
) -> Any:
    """Collective: what an optimizer keeps of each parameter, of all workers.

    Args:
        optimizer: The optimizer, with the entries of this worker.
        owner_of: The owner of each parameter, by its id; every worker has those that are missing.
        group: All workers.
    """
    order = order_of(optimizer)
    order.note(optimizer)
    whole = defaultdict(dict, optimizer.state)
    found: list[tuple[list[int], Any, Any]] = []
    for parameter in parameters_of(optimizer):
        owner = owner_of.get(id(parameter), -1)
        entries: Any = whole.pop(parameter, None) or {}
        made = [*order.made.get(parameter, ())]
        if owner >= 0:
            mine = [made, dict(entries)] if owner == group.rank else None
            made, entries = group.share_value(mine, source=owner, what="the state of a parameter")
        if entries:
            found.append((made, parameter, entries))
    for _, parameter, entries in sorted(found, key=lambda one: one[0]):
        whole[parameter] = entries
    return whole


def _checksum(state: Any) -> str:
    """A checksum of a state's values; none where some of them are not here."""
    tensors = leaves_of(torch.Tensor, dict(state) if isinstance(state, Mapping) else state)
    if any(isinstance(one, StandIn) or one.is_meta for one in tensors):
        return _NOT_LOOKED_AT
    dense = (one for one in tensors if one.layout is torch.strided and not one.is_quantized)
    return str(functools.reduce(lambda known, one: zlib.crc32(sample_of(one), known), dense, 0))


def _error_of(load: Callable[[], object]) -> Exception | None:
    """The error that the user's code raised, if any: all workers must have raised the same."""
    try:
        load()
    except Exception as error:
        return error
    return None


def _copied(value: dict[str, Any]) -> dict[str, Any]:
    """A state dictionary with copies of its tensors; those of one memory stay of one memory."""
    copies: dict[Any, torch.Tensor] = {}

    def copy(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        key = (
            storage_of(tensor),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        if key not in copies:
            copies[key] = tensor.detach().clone()
        return copies[key]

    found: Any = pytree.tree_map(copy, value)
    if hasattr(value, STATE_VERSIONS):
        setattr(found, STATE_VERSIONS, getattr(value, STATE_VERSIONS))
    return cast(dict[str, Any], found)


def _tensors(network: nn.Module) -> tuple[torch.Tensor, ...]:
    return *network.parameters(), *network.buffers()
