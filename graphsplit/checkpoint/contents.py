"""The contents of a save: the network's tensors, its optimizers' state, and whose job it is.

Everything has one worker that saves it: its owner once there is a plan. Before that every worker
has everything, and worker 0 saves it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from graphsplit.encoding.values import encode, to_text
from graphsplit.errors import StateError
from graphsplit.logs import say
from graphsplit.optimizers.optimizer import order_of
from graphsplit.optimizers.own_step import by_the_model
from graphsplit.planning.task import Task, named_state
from graphsplit.torch_ext.attributes import EXTRA_STATE, STATE_VERSIONS, is_waiting
from graphsplit.torch_ext.steering import steers

GRADIENTS = "gradients/"
OTHERS = "others/"
KEPT = "kept parts "  # and a rank: the parts of gradients that worker keeps until a step ends


@dataclass(frozen=True)
class NetworkState:
    """A network's state dictionary, sorted by what it holds.

    Attributes:
        tensors: Parameters and buffers, each under its first key.
        aliases: Further keys of a tied tensor: the key it is stored under.
        values: What modules return from ``get_extra_state``; tensors and anything else.
        others: Parameters and buffers that the state dictionary leaves out: those of the loss, and
            buffers that are not persistent. A run that goes on needs them; a plain network does
            not.
    """

    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    values: Mapping[str, Any]
    others: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, task: Task) -> NetworkState:
        """The state of a task's network, as it is now.

        Raises:
            StateError: A hook makes entries that could not be loaded again.
        """
        named = named_state(task.network, task.loss_fn)
        known = {id(tensor) for tensor in named.values()}
        first: dict[int, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        values: dict[str, Any] = {}
        made: list[str] = []
        for key, value in task.network.state_dict(keep_vars=True).items():
            if id(value) in first:
                aliases[key] = first[id(value)]
            elif id(value) in known:
                first[id(value)], tensors[key] = key, value
            elif key.rpartition(".")[2] == EXTRA_STATE:
                values[key] = value
            else:
                made.append(key)
        if made:
            raise StateError(
                f"the network's state_dict() holds {', '.join(made)}, which are neither parameters "
                f"nor buffers\n  Fix: do without the hook that makes them, or register them."
            )
        others = {}
        for name, tensor in named.items():
            is_first = first.setdefault(id(tensor), name) == name
            if is_first and name not in tensors and not is_waiting(name):
                others[name] = tensor
        return cls(tensors, aliases, values, others)


def module_of_extra(network: nn.Module, key: str) -> nn.Module:
    """The module that an entry of extra state belongs to."""
    return network.get_submodule(key.removesuffix(EXTRA_STATE).removesuffix("."))


class Ownership:
    """The workers that save, and load, each tensor.

    Args:
        task: What is trained.
        owners: The owner of every parameter and buffer that has one, by name.

    Attributes:
        tensors: Every parameter and buffer, once.
        is_settled: Whether all have an owner, or are for good on every worker.
    """

    def __init__(self, task: Task, owners: Mapping[str, int]) -> None:
        named = named_state(task.network, task.loss_fn)
        self.tensors = tuple({id(t): t for t in named.values()}.values())
        self._owners = {id(t): owners[name] for name, t in named.items() if name in owners}
        self.is_settled = all(id(t) in self._owners or steers(t) for t in self.tensors)
        self._parameters = tuple(task.network.named_parameters())
        self._names: dict[int, str] = {}
        for name, tensor in named.items():
            self._names.setdefault(id(tensor), name)

    @cached_property
    def digest(self) -> str | None:
        """Who owns which of the network's parameters, in short; None before there is a plan."""
        if not self.is_settled:
            return None
        owners = [[name, self._owners.get(id(p))] for name, p in self._parameters]
        return hashlib.sha256(to_text(owners).encode()).hexdigest()

    def saver(self, tensor: torch.Tensor) -> int:
        """The worker that saves a tensor."""
        return self._owners.get(id(tensor), 0)

    def loaders(self, tensor: torch.Tensor, num_workers: int) -> list[int]:
        """The workers that hold a tensor."""
        owner = self._owners.get(id(tensor))
        return list(range(num_workers)) if owner is None else [owner]

    def name(self, tensor: torch.Tensor) -> str | None:
        """A tensor's first name; None if it is of no module."""
        return self._names.get(id(tensor))


def other_parts(task: Task, sections: Mapping[str, Any]) -> list[str]:
    """Why gradients that were kept in the middle of a step do not fit a task; empty if they do.

    Args:
        task: What goes on with them.
        sections: All sections of a save.
    """
    kept = (section for name, section in sections.items() if name.startswith(KEPT))
    found = {one.get("of") for one in kept if "kept" in one or "waiting" in one}
    return [
        f"in the middle of a step that keeps {number} parts of each gradient apart; this Model "
        f"keeps {task.num_kept}: give it the same accumulate_by and microbatches"
        for number in found - {task.num_kept}
    ]


_DEFAULTS = {"gradient_order": "left", "accumulate_by": "batch", "gradient_dtype": "None"}


def orders_of_sums(task: Task) -> dict[str, str]:
    """The arguments of a Model that say in which order it adds gradients."""
    found = {"gradient_order": task.gradient_order, "accumulate_by": task.accumulate_by}
    return found | {"gradient_dtype": str(task.gradient_dtype)}


def say_other_order(task: Task, saved: Mapping[str, Any], rank: int) -> None:
    """Tell that training goes on with other bits than it would have had, if it does."""
    for name, now in orders_of_sums(task).items():
        before = saved.get(name, _DEFAULTS[name])
        if before != now and task.divider.num_microbatches > 1 and rank == 0:
            say(
                f"the save was made with {name}={before!r}, and this Model has {now!r}: from here "
                f"on gradients of microbatches round otherwise",
                event="gradient_order",
                level="warning",
            )


def optimizers_of(task: Task) -> dict[str, torch.optim.Optimizer]:
    """All optimizers of a task, by their numbers."""
    return {str(number): optimizer for number, optimizer in enumerate(task.optimizers)}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """An optimizer's parameters, in the order in which PyTorch numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@dataclass
class CheckpointContents:
    """One worker's part of a save.

    Attributes:
        weights: Tensors of the network's state dictionary.
        aliases: Other names of tied ones.
        tensors: All other tensors.
        sections: Encoded values by section; all workers' are put together by ``merge``.
        encoder: What encodes them.
    """

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    encoder: Callable[..., Any] = encode

    def add_network(self, state: NetworkState, ownership: Ownership, rank: int) -> None:
        """Add what this worker saves of the network.

        Raises:
            StateError: Some extra state cannot be written.
        """
        for key, tensor in state.tensors.items():
            if ownership.saver(tensor) == rank:
                self.weights[key] = tensor
        self.aliases = {a: key for a, key in state.aliases.items() if key in self.weights}
        if rank == 0:
            self._add_values(state.values)

    def add_whole(self, state: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> None:
        """Add a state dictionary as the network's own code has made it.

        Raises:
            StateError: Something in it cannot be written.
        """
        self._add_values(state)
        if metadata is not None:
            self.sections["network"][STATE_VERSIONS] = encode(
                dict(metadata), {}, path=STATE_VERSIONS
            )

    def _add_values(self, found: Mapping[str, Any]) -> None:
        values: dict[str, Any] = {}
        for key, value in found.items():
            if isinstance(value, torch.Tensor):
                self.weights[key] = value
            else:
                nested: dict[str, torch.Tensor] = {}
                values[key] = encode(value, nested, path=key)
                if nested:
                    raise StateError(
                        f"{next(iter(nested))} is a tensor inside {key!r}, which a module's own "
                        f"code has put into the state, and cannot be saved\n  Fix: let "
                        f"get_extra_state, or the hook, give one tensor, or plain values."
                    )
        self.sections["network"] = values

    def add_others(self, state: NetworkState, ownership: Ownership, rank: int) -> None:
        """Add what a state dictionary leaves out."""
        for name, tensor in state.others.items():
            if ownership.saver(tensor) == rank:
                self.tensors[f"{OTHERS}{name}"] = tensor

    def add_gradients(
        self, task: Task, ownership: Ownership, rank: int, *, between_updates: bool
    ) -> None:
        """Add the gradients that the next step adds to, or sees.

        The next step makes None of those that an optimizer has, unless they are still added up, or
        become zeros. Nobody resets those that no optimizer has, and clipping looks at them.

        Raises:
            StateError: One is sparse; names it.
        """
        reset: set[int] = set()
        if task.set_to_none and not between_updates:
            reset = {id(p) for optimizer in task.optimizers for p in parameters_of(optimizer)}
        for tensor in ownership.tensors:
            if ownership.saver(tensor) != rank or id(tensor) in reset:
                continue
            if tensor.grad is not None:
                path = f"{GRADIENTS}{ownership.name(tensor)}"
                encode(tensor.grad, self.tensors, path=path)

    def add_optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, ownership: Ownership, rank: int
    ) -> None:
        """Add what this worker saves of an optimizer.

        Raises:
            StateError: The optimizer keeps something that cannot be written; names it.
        """
        with by_the_model():
            packed = optimizer.state_dict()
        parameters = parameters_of(optimizer)
        path = f"optimizers/{name}"
        state, order, others = {}, {}, {}
        made = order_of(optimizer).made
        for place, (key, entry) in enumerate(packed.pop("state").items()):
            if not isinstance(key, int):
                others[str(key)] = entry
            elif ownership.saver(parameters[key]) == rank:
                state[str(key)] = self.encoder(entry, self.tensors, path=f"{path}/{key}")
                order[str(key)] = [*made.get(parameters[key], (0, place))]
        found: dict[str, Any] = {"state": state, "order": order}
        if rank == 0:
            found["class"] = type(optimizer).__qualname__
            found["parameters"] = [ownership.name(p) for p in parameters]
            found["group_sizes"] = [len(group["params"]) for group in optimizer.param_groups]
            found["settings"] = self.encoder(packed, self.tensors, path=path)
            found["others"] = self.encoder(others, self.tensors, path=f"{path}/others")
        self.sections.setdefault("optimizers", {})[name] = found

    def add_section(self, name: str, value: Any) -> None:
        """Add a value that this worker saves for all.

        Raises:
            StateError: Something in it cannot be written; names it.
        """
        self.sections[name] = self.encoder(value, self.tensors, path=name)


def merge(fragments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All workers' sections, put together."""
    whole: dict[str, Any] = {}
    for fragment in fragments:
        for section, value in fragment.items():
            if section != "optimizers":
                whole[section] = value
                continue
            for name, optimizer in value.items():
                new: dict[str, Any] = {"state": {}, "order": {}}
                known = whole.setdefault("optimizers", {}).setdefault(name, new)
                for part in new:
                    known[part].update(optimizer[part])
                known.update({k: v for k, v in optimizer.items() if k not in new})
    for optimizer in whole.get("optimizers", {}).values():
        order = optimizer.pop("order")
        keys = sorted(optimizer["state"], key=order.__getitem__)
        optimizer["state"] = {key: optimizer["state"][key] for key in keys}
    return whole
