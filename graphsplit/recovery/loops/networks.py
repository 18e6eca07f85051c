"""Distributed networks and optimizers of a script's own loop, copied for a snapshot and put back.

Each worker copies what lives on it. A process that starts anew has the networks as the script
builds them: each is told first who owns what, and then given its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphsplit.capture.state.kept_names import is_kept_name, register_again
from graphsplit.checkpoint.contents import parameters_of
from graphsplit.checkpoint.forms import forget_waiting_forms, kept_forms, put_forms
from graphsplit.deferred.construction import is_deferred
from graphsplit.distribute.network import behind
from graphsplit.distribute.states import hide_others, show_here, state_of
from graphsplit.distribute.steps import settled
from graphsplit.distribute.workers.loop import Loop
from graphsplit.encoding.values import encode
from graphsplit.errors import CheckpointError, ConfigurationError, StateError
from graphsplit.optimizers.optimizer import order_of
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.planning.plain_attributes import PlainState
from graphsplit.planning.task import named_state
from graphsplit.recovery.snapshot.left import LeftInPython
from graphsplit.recovery.snapshot.optimizers import (
    members_of,
    put_entries,
    put_settings,
    settings_of,
)
from graphsplit.recovery.snapshot.shard import SnapshotShard
from graphsplit.torch_ext.attributes import is_waiting, note_stepped

Tensors = dict[str, torch.Tensor]


class LoopNetworks:
    """The networks of a job that were distributed before its loops began.

    Args:
        loop: The workers.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._number = len(loop.networks)
        machineries = [one for _, net in self._all() if (one := behind(net)) is not None]
        self._python = [PlainState(one.task) for one in machineries]
        for python in self._python:
            python.begin()  # as the script builds them, which a new process does as well
        self._left = [LeftInPython(one.task) for one in machineries]
        for one in machineries:
            for planner in one.planners():
                planner.task.ways = one.task.ways

    def _all(self) -> Iterator[tuple[int, nn.Module]]:
        """Those that are in use, each with its number."""
        for index, known in enumerate(self._loop.networks[: self._number]):
            network = known()
            if network is not None and behind(network) is not None:
                yield index, network

    def tensors(self) -> dict[str, torch.Tensor]:
        """Each parameter and buffer, by name; what is shared has several."""
        return {
            f"net{index}.{name}": tensor
            for index, network in self._all()
            for name, tensor in named_state(network, None).items()
        }

    def modules(self) -> set[int]:
        """The ids of all their modules."""
        return {id(module) for _, network in self._all() for module in network.modules()}

    def collect(self, tensors: Tensors) -> list[Any]:
        """All that lives here, as it is now; tensors are added by name, and not copied.

        Raises:
            StateError: Something cannot be kept; names it.
        """
        self._refuse_new()
        found = []
        for (index, network), python, left in zip(
            self._all(), self._python, self._left, strict=True
        ):
            if is_deferred(network):
                continue  # not used yet
            path = f"net{index}"
            machinery = behind(network)
            assert machinery is not None
            values = {
                "owners": machinery.owners(),
                "python": python.saved(with_tensors=False),
                "attributes": machinery.python_values(),
                "forms": kept_forms(machinery.task),
                "left": left.kept(machinery.planners(), self._loop.rank)["values"],
                "extra": extra_states(network),
            }
            named = named_state(network, None).items()
            own = add_tensors({n: t for n, t in named if not is_waiting(n)}, path, tensors)
            found.append([index, encode(values, tensors, path=path), own])
        return found

    def _refuse_new(self) -> None:
        later = [known() for known in self._loop.networks[self._number :]]
        new = [network for network in later if network is not None]
        if new:
            raise ConfigurationError(
                f"a {type(new[0]).__name__} was distributed, or copied, inside gs.loop; a worker "
                f"that comes back would not have it\n"
                f"  Fix: call gs.distribute and copy.deepcopy before the loop."
            )

    def put_back(self, part: SnapshotShard) -> None:
        """Let all be as it was."""
        known = {index: (at, net) for at, (index, net) in enumerate(self._all())}
        for index, node, names in part.values["networks"]:
            if index not in known:
                raise StateError(_OTHERWISE)
            at, network = known[index]
            machinery = behind(network)
            assert machinery is not None
            values = part.decoded(node)
            put_forms(machinery.task, values["forms"], values["owners"], self._loop.rank)
            forget_waiting_forms(machinery.task)
            if values["owners"]:
                machinery.settle_as(values["owners"])
            self._python[at].put(values["python"])
            register_again(network, values["attributes"])
            machinery.put_python_values(values["attributes"])
            self._left[at].put_back([{"values": values["left"], "here": ()}])
            put_extra_states(network, values["extra"])
            put_tensors(network, f"net{index}", names, part)


def extra_states(network: nn.Module) -> dict[str, Any]:
    """The answers of modules to ``get_extra_state``, by their paths."""
    return {
        path: module.get_extra_state()
        for path, module in network.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def put_extra_states(network: nn.Module, states: Mapping[str, Any]) -> None:
    """Give modules what ``extra_states`` gave."""
    for path, state in states.items():
        network.get_submodule(path).set_extra_state(state)


def add_tensors(named: Mapping[str, torch.Tensor], path: str, tensors: Tensors) -> list[list[Any]]:
    """Add tensors that live here, with their gradients.

    Returns:
        The name of each, and whether it has a gradient.
    """
    found = []
    for name, tensor in named.items():
        if is_elsewhere(tensor):
            continue
        gradient = tensor.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise StateError(
                f"the gradient of {name} is sparse, and cannot be kept\n"
                f"  Fix: make the embedding with sparse=False."
            )
        tensors[f"{path}:{name}"] = tensor.detach()
        if gradient is not None:
            tensors[f"{path}:{name}:grad"] = gradient.detach()
        found.append([name, gradient is not None])
    return found


def put_tensors(
    network: nn.Module, path: str, names: Sequence[Sequence[Any]], part: SnapshotShard
) -> None:
    """Copy values and gradients into the tensors of a network."""
    named = named_state(network, None)
    for name, has_gradient in names:
        target, value = named.get(name), part.tensor(f"{path}:{name}")
        if target is None and is_kept_name(name):  # nothing stands for it at this batch
            continue
        if target is None or is_elsewhere(target) or target.shape != value.shape:
            raise CheckpointError(f"the snapshot does not hold {name} as this worker has it")
        with torch.no_grad():
            target.copy_(value)
        target.grad = part.tensor(f"{path}:{name}:grad").clone() if has_gradient else None


_OTHERWISE = (
    "the script has built other networks or optimizers than before the restart\n"
    "  Fix: let it build the same ones each time it is started."
)


class LoopOptimizers:
    """The optimizers that a loop keeps.

    Args:
        optimizers: Those.
        loop: The workers.
        named: The tensors of networks, and of modules that are kept, by name: they may be put into
            groups later.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        loop: Loop,
        named: Mapping[str, torch.Tensor],
    ) -> None:
        self._all = list({id(one): one for one in optimizers}.values())
        self._loop = loop
        self._named = dict(named)
        self._names: dict[int, str] = {}
        for name, tensor in named.items():
            self._names.setdefault(id(tensor), name)
        for index, one in enumerate(self._all):
            for at, parameter in enumerate(parameters_of(one)):
                self._names.setdefault(id(parameter), f"optimizer{index}.{at}")
                self._named[self._names[id(parameter)]] = parameter

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(one is optimizer for one in self._all)

    def collect(self, tensors: Tensors) -> list[Any]:
        """Settings, groups, and the state of what lives here.

        Raises:
            StateError: Something cannot be kept; names it.
        """
        found = []
        for index, one in enumerate(self._all):
            order = order_of(one)
            order.note(one)
            is_settled = state_of(one) is not None  # until then each worker has all entries
            entries = {p: s for p, s in one.state.items() if not (is_settled and is_elsewhere(p))}
            values = {
                "settings": settings_of(one),
                "members": [[self._name(one, p) for p in group] for group in members_of(one)],
                "num_steps": order.num_steps,
                "is_settled": is_settled,
                "state": [
                    [self._name(one, p), list(order.made.get(p, (0, 0))), dict(state)]
                    for p, state in entries.items()
                ],
            }
            found.append(encode(values, tensors, path=f"optimizer{index}"))
        return found

    def _name(self, optimizer: torch.optim.Optimizer, parameter: Any) -> str:
        name = self._names.get(id(parameter)) if isinstance(parameter, torch.Tensor) else None
        if name is None:
            raise StateError(
                f"{type(optimizer).__name__} was given a parameter inside gs.loop that no network "
                f"has; a worker that comes back would not have it\n"
                f"  Fix: give it to the optimizer before the loop."
            )
        return name

    def put_back(self, part: SnapshotShard) -> None:
        """Let all be as it was."""
        nodes = part.values["optimizers"]
        if len(nodes) != len(self._all):
            raise StateError(_OTHERWISE)
        for one, node in zip(self._all, nodes, strict=True):
            values = part.decoded(node)
            members = [[self._find(name) for name in group] for group in values["members"]]
            put_settings(one, values["settings"], members)
            if values["is_settled"]:
                settled(one, self._loop)
            show_here(one)
            state = [(self._find(name), *rest) for name, *rest in values["state"]]
            put_entries(one, values["num_steps"], state)
            if values["is_settled"]:
                hide_others(one, self._loop)
            note_stepped(one)

    def note_stepped(self) -> None:
        """Schedulers warn if an optimizer has not stepped before them; it has, elsewhere."""
        for one in self._all:
            note_stepped(one)

    def _find(self, name: str) -> torch.Tensor:
        if name not in self._named:
            raise StateError(_OTHERWISE)
        return self._named[name]
