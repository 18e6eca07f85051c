"""The parts of a network at one moment: modules, parameters, buffers and hooks, by their places.

A script may swap a layer, wrap it, prune it or give it another parameter between two calls. A
worker that goes back behind that needs the network that there was: the objects, by identity. What
graphsplit itself has put there meanwhile, such as a buffer for what code keeps, is made again by
the calls that run again, and has their values: there only what the script did is done again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from graphsplit.capture.state.kept_value import KeptValue
from graphsplit.capture.state.older_values import settle_older
from graphsplit.guards.changes import containers_in, latest
from graphsplit.planning.plain_attributes import Own
from graphsplit.planning.python_values import Values
from graphsplit.planning.task import Task, stateful_modules
from graphsplit.torch_ext.attributes import FORWARD_HOOKS, NOT_SAVED, TABLES

_TABLES = (*TABLES, NOT_SAVED, *FORWARD_HOOKS)  # hooks: of pruning, and older norms of weights
_KEPT = (torch.Tensor, KeptValue)  # of attributes: what such a hook leaves


@dataclass(frozen=True)
class ModuleTables:
    """The tables of one module.

    Attributes:
        module: The module.
        kind: Its class, which a parametrization changes.
        tables: Copies of its tables, by name.
        tensors: Its attributes that are tensors and in no table.
    """

    module: nn.Module
    kind: type[nn.Module]
    tables: dict[str, Any]
    tensors: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleTables:
        """The tables as they are now."""
        own = vars(module)
        return cls(
            module,
            type(module),
            {name: own[name].copy() for name in _TABLES},
            {name: value for name, value in own.items() if isinstance(value, _KEPT)},
        )

    def is_same(self, other: ModuleTables) -> bool:
        """Whether the same objects hang in the same places."""
        return (
            self.module is other.module
            and self.kind is other.kind
            and all(map(_holds_same, self.tables.values(), other.tables.values()))
            and _holds_same(self.tensors, other.tensors)
        )

    def put(self) -> None:
        """Let the module have them again."""
        own = vars(self.module)
        self.module.__class__ = self.kind
        for name, table in self.tables.items():
            if not _holds_same(own[name], table):
                own[name].clear()
                own[name].update(table)
        for name in [n for n, value in own.items() if isinstance(value, _KEPT)]:
            del own[name]
        own.update({name: latest(value) for name, value in self.tensors.items()})

    def done_again(self, before: ModuleTables) -> ModuleTables:
        """The module as it is now, with what became of it between two moments then."""
        now = ModuleTables.of(self.module)
        pairs = {name: (before.tables[name], table) for name, table in self.tables.items()}
        return ModuleTables(
            self.module,
            now.kind if self.kind is before.kind else self.kind,
            {name: _done_again(*pair, now.tables[name]) for name, pair in pairs.items()},
            _done_again(before.tensors, self.tensors, now.tensors),
        )

    def pairs(self, other: ModuleTables) -> Iterator[tuple[Any, Any]]:
        """Pairs of things in the places that two have in common, at these two moments."""
        for name in TABLES:
            one, another = self.tables[name], other.tables[name]
            yield from ((value, another[key]) for key, value in one.items() if key in another)


Tables = tuple[ModuleTables, ...]


def tables_of(task: Task) -> Tables:
    """The tables of all modules of a network, and of a loss that is a module."""
    settle_older(task.network)
    modules = {m: None for root in stateful_modules(task) for m in root.modules()}
    return tuple(map(ModuleTables.of, modules))


def are_same(some: Tables, others: Tables) -> bool:
    """Whether nothing was swapped, replaced, added or taken away."""
    return len(some) == len(others) and all(map(ModuleTables.is_same, some, others))


def _holds_same(one: Any, other: Any) -> bool:
    if not isinstance(one, dict):
        return bool(one == other)
    return list(one) == list(other) and all(map(is_, one.values(), other.values()))


def _done_again(before: Any, after: Any, now: Any) -> Any:
    """A table as it is now, with the difference of two earlier ones."""
    if not isinstance(after, dict):
        return (now | (after - before)) - (before - after)
    is_left_alone = {key: key in before and before[key] is value for key, value in after.items()}
    found = {k: now.get(k, v) if is_left_alone[k] else v for k, v in after.items()}
    found.update((k, v) for k, v in now.items() if k not in after and k not in before)
    return found


class Given(NamedTuple):
    """The things that the script may give a Model anew.

    Attributes:
        loss_fn: The loss.
        optimizer: The optimizer, or several.
        tables: What hangs where in network and loss.
        own: The containers in attributes, and other values that no snapshot holds.
        read: The containers in other places; and values of what hangs nowhere now.
    """

    loss_fn: Any
    optimizer: Any
    tables: Tables
    own: Own
    read: Values

    def is_same(self, other: Given | Task) -> bool:
        """Whether these are the same loss and optimizers."""
        return self.loss_fn is other.loss_fn and self.optimizer is other.optimizer

    def containers(self) -> Iterator[Any]:
        """All containers that it knows."""
        for value in (*(frozen for *_, frozen in self.own), *self.read.values()):
            yield from containers_in(value)

    def done_again(self, before: Given) -> tuple[Given, dict[int, torch.Tensor]]:
        """The script's changes since what it had before, made to what is there now.

        Args:
            before: What there was when the script went on, before it gave this.

        Returns:
            That, and the tensors that hang where other ones hung then, by the identity of those.
        """
        then = {one.module: one for one in before.tables}
        tables = tuple(
            one.done_again(then[one.module]) if one.module in then else one for one in self.tables
        )
        pairs = (
            pair for one, now in zip(self.tables, tables, strict=True) for pair in one.pairs(now)
        )
        moved = {id(old): new for old, new in pairs if old is not new}
        return self._replace(tables=tables), moved
