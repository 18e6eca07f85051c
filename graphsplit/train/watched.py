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

from collections.abc import Mapping
from typing import Any

from torch import nn

from graphsplit.capture.attributes import Key, set_value, value_at
from graphsplit.capture.graph import CapturedGraph


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

    def values(self) -> tuple[str, ...]:
        """The values of the watched attributes now."""
        return tuple([repr(value_at(*self._place(key))) for key in self._watched])

    def watch(self, graph: CapturedGraph) -> Mapping[Key, str]:
        """Watch what a new graph depends on; returns what was not watched yet, with its value."""
        changes = graph.changes if graph.is_other_after else ()
        new = {c.key: repr(c.old) for c in changes if c.key not in self._watched}
        self._watched += new
        return new

    def leave(self, graph: CapturedGraph) -> None:
        """Leave the attributes as forward leaves them."""
        for change in graph.changes:
            module, key = self._place(change.key)
            set_value(module, key, change.new)

    def _place(self, key: Key) -> tuple[nn.Module, Key]:
        top, _, path = key[0].partition(".")
        return self._modules[top], (path, key[1])
