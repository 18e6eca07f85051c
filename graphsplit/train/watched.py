"""Attributes of a network by which its graphs differ, since forward changes them.

A network may compute otherwise once it has run in eval mode: RWKV of transformers rescales its
weights there, notes that in an attribute, and scales them back when it next trains. A captured
graph is right for one value of such an attribute, and leaves another one behind::

    eval   False   rescales the weights; leaves True
    eval   True    leaves it as it is
    train  True    scales them back; leaves False
    train  False   leaves it as it is
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from graphsplit.capture.attributes import MISSING, Key, set_value, value_at
from graphsplit.capture.graph import CapturedGraph
from graphsplit.capture.owned_tensors import make_buffers
from graphsplit.train.kept_values import from_kept, to_kept


class WatchedAttributes:
    """What attributes there are to look at before a step.

    Args:
        network: The network.
        loss_fn: The loss, which may be a module too.
    """

    def __init__(self, network: nn.Module, loss_fn: Any) -> None:
        self._modules = {"network": network}
        if isinstance(loss_fn, nn.Module):
            self._modules["loss_fn"] = loss_fn
        self._watched: list[Key] = []
        self._buffers: set[Key] = set()
        self._first: dict[Key, Any] = {}  # what was there before forward left something

    def values(self) -> tuple[str, ...]:
        """The values of the watched attributes now."""
        return tuple([repr(value_at(*self._place(key))) for key in self._watched])

    def watch(self, graph: CapturedGraph) -> Mapping[Key, str]:
        """Watch what a new graph depends on; returns what was not watched yet, with its value."""
        changes = graph.changes if graph.is_other_after else ()
        new = {c.key: repr(c.old) for c in changes if c.key not in self._watched}
        self._watched += new
        return new

    def make_buffers(self, graph: CapturedGraph) -> bool:
        """Let tensors in attributes that forward changes be buffers, as capture has made them.

        Returns:
            Whether there are any that no graph before has changed.
        """
        new = set(graph.buffers) - self._buffers
        make_buffers(self._modules, graph.buffers)
        self._buffers |= new
        return bool(new)

    def leave(self, graph: CapturedGraph) -> None:
        """Leave the attributes as forward leaves them."""
        for change in graph.changes:
            module, key = self._place(change.key)
            self._first.setdefault(change.key, value_at(module, key))
            set_value(module, key, change.new)

    def start_over(self) -> bool:
        """Watch nothing any more; whether anything was watched."""
        had_any, self._watched = bool(self._watched), []
        return had_any

    # Snapshots.

    def kept(self) -> list[list[Any]]:
        """The present values of all attributes in which forward has left something."""
        found = []
        for path, name in self._first:
            value = value_at(*self._place((path, name)))
            found.append([path, name, value is not MISSING, to_kept(value)])
        return found

    def put_back(self, kept: Iterable[Sequence[Any]]) -> None:
        """Let the attributes be as when ``kept`` was called; others as before the first step."""
        values: dict[Key, Any] = dict(self._first)
        for path, name, is_there, value in kept:
            key = (path, name)
            self._first.setdefault(key, value_at(*self._place(key)))
            values[key] = from_kept(value) if is_there else MISSING
        for key, value in values.items():
            set_value(*self._place(key), value)

    def _place(self, key: Key) -> tuple[nn.Module, Key]:
        top, _, path = key[0].partition(".")
        return self._modules[top], (path, key[1])
