"""Gather a Model's state on every worker, and load what a worker owns out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphsplit.errors import StateError
from graphsplit.runtime.job import Job
from graphsplit.runtime.ownership import plain_classes
from graphsplit.tensor_meta import TensorMeta, contiguous_strides
from graphsplit.train.checkpoint.group import ControlGroup, share_value
from graphsplit.train.task import Task, named_state


class StateGatherer:
    """Moves whole states, tensor by tensor, in an order that all workers share."""

    def __init__(self, task: Task, job: Job, owners: Mapping[str, int]) -> None:
        self._task = task
        self._job = job
        self._group = ControlGroup(job.control, _no_tick)
        self._owner_of = {
            id(tensor): owners[name]
            for name, tensor in named_state(task.network, task.loss_fn).items()
            if name in owners
        }

    def gather_network(self) -> dict[str, Any]:
        """The network's state dictionary: original keys and order, values copied."""
        gathered: dict[str, Any] = {}
        copies: dict[int, torch.Tensor] = {}
        with plain_classes(self._task.network), torch.no_grad():
            for key, value in self._task.network.state_dict(keep_vars=True).items():
                if isinstance(value, torch.Tensor):
                    if id(value) not in copies:  # tied tensors travel once
                        copies[id(value)] = self._gather_tensor(value)
                    value = copies[id(value)]
                gathered[key] = value
        return gathered

    def _gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        owner = self._owner_of.get(id(tensor))
        if owner is None:  # not planned yet: every worker has it
            return tensor.detach().clone()
        meta = TensorMeta(tensor.dtype, tuple(tensor.shape), contiguous_strides(tensor.shape))
        found = self._job.control.broadcast(tensor.detach(), meta, source=owner)
        return found.clone() if owner == self._job.rank else found

    def load_network(self, state: Mapping[str, Any]) -> None:
        """Copy the values of owned parameters and buffers out of a full state dictionary.

        Raises:
            StateError: Keys or shapes do not fit; nothing was loaded.
        """
        with plain_classes(self._task.network), torch.no_grad():
            own = self._task.network.state_dict(keep_vars=True)
            tensors = {k: v for k, v in own.items() if isinstance(v, torch.Tensor)}
            problems = [f"missing: {key}" for key in tensors if key not in state]
            problems += [f"unknown: {key}" for key in state if key not in own]
            problems += [
                f"{key} has shape {list(state[key].shape)}; expected {list(tensor.shape)}"
                for key, tensor in tensors.items()
                if key in state and state[key].shape != tensor.shape
            ]
            if problems:
                raise StateError(
                    "the state dictionary does not fit the network:\n  " + "\n  ".join(problems)
                )
            for key, tensor in tensors.items():
                if self._owner_of.get(id(tensor), self._job.rank) == self._job.rank:
                    tensor.copy_(state[key])

    def gather_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """An optimizer's state dictionary, in PyTorch's own form."""
        gathered = optimizer.state_dict()
        gathered["state"] = {}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            owner = self._owner_of.get(id(parameter), -1)
            state = optimizer.state.get(parameter) or {}
            if owner >= 0:
                mine = dict(state) if owner == self._job.rank else None
                state = share_value(
                    self._group, mine, source=owner, what="the state of a parameter"
                )
            if state:
                gathered["state"][index] = state
        return gathered

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load the entries of owned parameters out of a full optimizer state."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        entries = {
            index: entry
            for index, entry in state["state"].items()
            if self._owner_of.get(id(parameters[index]), self._job.rank) == self._job.rank
        }
        optimizer.load_state_dict({**state, "state": entries})


def _no_tick() -> None:
    """Nothing here waits for a disk."""
