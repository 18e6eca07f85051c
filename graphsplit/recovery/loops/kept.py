"""Objects of a script that ``gs.loop(..., keep=[...])`` names: copied, and put back."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from graphsplit.checkpoint.other_loaders import put_loader
from graphsplit.checkpoint.position import LoaderWatch
from graphsplit.checkpoint.states import Stateful
from graphsplit.distribute.values import LoopValue
from graphsplit.encoding.values import encode
from graphsplit.errors import ConfigurationError, StateError
from graphsplit.planning.task import named_state
from graphsplit.recovery.loops.networks import (
    Tensors,
    add_tensors,
    extra_states,
    put_extra_states,
    put_tensors,
)
from graphsplit.recovery.snapshot.shard import SnapshotShard
from graphsplit.torch_ext.private import pytree

CONTAINERS = (dict, list, set, deque, Counter)


def optimizers_in(kept: Sequence[Any]) -> Iterator[torch.optim.Optimizer]:
    """The optimizers among kept objects, and those of schedulers."""
    for one in kept:
        of_scheduler = getattr(one, "optimizer", None)
        for found in (one, of_scheduler):
            if isinstance(found, torch.optim.Optimizer):
                yield found


def check_kept(kept: Sequence[Any]) -> None:
    """Refuse what could not be put back.

    Raises:
        ConfigurationError: An object has no state that is known.
    """
    for index, one in enumerate(kept):
        if not can_be_kept(one):
            raise ConfigurationError(
                f"gs.loop(..., keep=[...]): entry {index} is a {type(one).__name__}, whose state "
                f"cannot be kept\n"
                f"  Fix: give it state_dict() and load_state_dict(); or keep what it counts in a "
                f'dictionary: counts = {{"steps": 0}}, keep=[..., counts].'
            )


def can_be_kept(one: Any) -> bool:
    """Whether an object's state can be copied and put back."""
    return type(one) in CONTAINERS or isinstance(
        one, (nn.Module, torch.optim.Optimizer, DataLoader, torch.Generator, Stateful)
    )


class KeptObjects:
    """The objects that a loop keeps, besides networks and optimizers.

    Args:
        kept: All objects, in the order in which the script gave them.
        distributed: The ids of the modules of distributed networks.
    """

    def __init__(self, kept: Sequence[Any], distributed: set[int]) -> None:
        check_kept(kept)
        self.all = list(kept)
        self._distributed = distributed

    def __contains__(self, one: Any) -> bool:
        return any(one is kept for kept in self.all)

    def _parts(self) -> Iterator[tuple[str, Any]]:
        for index, one in enumerate(self.all):
            if not isinstance(one, torch.optim.Optimizer) and id(one) not in self._distributed:
                yield f"keep{index}", one

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the modules among them, by name."""
        return {
            f"{path}.{name}": tensor
            for path, one in self._parts()
            if isinstance(one, nn.Module)
            for name, tensor in self._own(one).items()
        }

    def _own(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Tensors of a module that are no distributed network's."""
        inside = [m for m in module.modules() if id(m) in self._distributed]
        others = {id(t) for m in inside for t in (*m.parameters(False), *m.buffers(False))}
        return {n: t for n, t in named_state(module, None).items() if id(t) not in others}

    def collect(self, tensors: Tensors) -> list[Any]:
        """Their states, as they are now; tensors are added by name, and not copied.

        Raises:
            StateError: Something cannot be kept; names it.
        """
        return [self._collected(path, one, tensors) for path, one in self._parts()]

    def _collected(self, path: str, one: Any, tensors: Tensors) -> Any:
        if isinstance(one, nn.Module):
            modes = [m.training for m in one.modules()]
            others = {"metric": _metric_state(one), "extra": extra_states(one)}
            own = add_tensors(self._own(one), path, tensors)
            return [modes, own, _encoded(others, tensors, path)]
        return _encoded(_state(one), tensors, path)

    def put_back(self, part: SnapshotShard, running: Sequence[Any]) -> None:
        """Let them be as they were.

        Args:
            part: A part that has what ``collect`` gave.
            running: The loaders that are gone through, which stand where they should.
        """
        for (path, one), node in zip(self._parts(), part.values["kept"], strict=True):
            if any(one is source for source in running):
                continue
            if isinstance(one, nn.Module):
                modes, names, others = node
                for module, mode in zip(one.modules(), modes, strict=True):
                    module.training = mode
                put_tensors(one, path, names, part)
                states = part.decoded(others)
                put_extra_states(one, states["extra"])
                for name, state in states["metric"].items():
                    setattr(one, name, state)
            else:
                _put(one, part.decoded(node))


def _encoded(value: Any, tensors: Tensors, path: str) -> Any:
    try:
        return encode(pytree.tree_map_only(LoopValue, _told, value), tensors, path=path)
    except StateError as error:
        raise StateError(f"gs.loop(..., keep=[...]): {error}") from None


def _told(value: LoopValue) -> torch.Tensor:
    return value.everywhere("keep").detach()


def _metric_state(module: nn.Module) -> dict[str, Any]:
    """The state that torchmetrics keeps in attributes that are neither parameters nor buffers."""
    names = getattr(module, "_defaults", None)
    if not isinstance(names, dict) or not hasattr(module, "_update_count"):
        return {}
    return {n: getattr(module, n) for n in (*names, "_update_count", "_computed")}


def _state(one: Any) -> Any:
    if type(one) in CONTAINERS:
        return list(one) if isinstance(one, deque) else one
    if isinstance(one, DataLoader):
        return LoaderWatch(one).state()
    if isinstance(one, torch.Generator):
        return one.get_state()
    return one.state_dict()


def _put(one: Any, state: Any) -> None:
    if isinstance(one, DataLoader):
        put_loader(one, state)
    elif isinstance(one, torch.Generator):
        one.set_state(state)
    elif type(one) in CONTAINERS:
        one.clear()
        fill: Callable[[Any], None] = one.extend if hasattr(one, "extend") else one.update
        fill(state)
    else:
        one.load_state_dict(state)
