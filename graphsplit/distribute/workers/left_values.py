"""Tensors that a network's code leaves in Python for the script: what hooks collect, say.

They are outputs of the call beside those that are returned. While calls run, what stands for them
in their places are tensors without values, the same ones at each call: so the plans that were made
hold, and code that reads them finds what is kept with the network.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from graphsplit.capture.graph import CapturedGraph
from graphsplit.capture.state.handed import Handed, swap
from graphsplit.capture.state.kept_value import label_of
from graphsplit.capture.state.older_values import stand_ins_of
from graphsplit.distribute.workers.twins import LEFT, Twin, Twins, is_shared
from graphsplit.errors import ConfigurationError
from graphsplit.guards.places import Place
from graphsplit.guards.values import any_leaf, freeze
from graphsplit.torch_ext.attributes import writes_of

_OWN_REFERENCES = 2  # of a value that nobody else holds: a variable's, and that of who counts


class LeftValues:
    """The values of all networks' latest calls, in the places where these have left them.

    Attributes:
        values: Each value, what stands for it during calls, and how often it was written to, by the
            value's identity.
    """

    def __init__(self, twins: Twins) -> None:
        self._twins = twins
        self._places: dict[Any, Place] = {}
        self.values: dict[int, tuple[Any, Any, Any]] = {}
        self._before: list[tuple[Any, Any, Any]] = []  # the values while a call runs

    def take_out(self) -> None:
        """Before a call: put back what stands for the values; forget those that are gone.

        Raises:
            ConfigurationError: The script has written to a value.
        """
        held = [(place, freeze(place.read())) for place in self._places.values()]
        self.values = {
            number: one
            for number, one in self.values.items()
            if any(any_leaf(value, lambda leaf: leaf is one[0]) for _, value in held)  # noqa: B023
        }
        for value, stand_in, writes in self.values.values():
            if _writes(value) != writes:
                raise ConfigurationError(
                    f"the script has written to the value in {label_of(stand_in)}, which forward "
                    f"or a hook had left there, and the next call would find it so\n"
                    f"  Fix: write into a copy (clone)."
                )
        instead = {number: stand_in for number, (_, stand_in, _) in self.values.items()}
        for place, _ in held:
            swap(place, instead)
        self._before = list(self.values.values())

    def put_back(self, network: nn.Module, graph: CapturedGraph) -> None:
        """After a call: the values again, in the places where it has not left others.

        A value that the call has modified in place is the network's alone from now on: what stands
        there says so, and a look at the value as it was, which the script may hold, is refused.

        Args:
            network: Whose call it was.
            graph: What it ran.
        """
        new = {id(one.stand_in) for one in graph.state.handed}
        known = stand_ins_of(network)
        moved_on = {id(known[name]) for name in graph.written_buffers & known.keys()} - new
        modified = moved_on | {id(known[name]) for name in graph.left_buffers & known.keys()}
        gone = [value for value, stand_in, _ in self._before if id(stand_in) in modified]
        self._before = []
        self.values = {n: one for n, one in self.values.items() if id(one[1]) not in moved_on}
        while gone:
            value = gone.pop()
            inner = getattr(value, "held", value)
            if sys.getrefcount(value) > _OWN_REFERENCES or is_shared(inner):
                twin = Twin(LEFT, inner, is_written=True)
                self._twins.add(value, twin)
        instead = {id(stand_in): value for value, stand_in, _ in self.values.values()}
        for place in self._places.values():
            swap(place, instead)

    def put(self, handed: Iterable[Handed], values: Iterable[Any]) -> None:
        """Put what a call has left into its places.

        Args:
            handed: Where.
            values: The values.
        """
        new = {
            id(one.stand_in): (value, one.stand_in)
            for one, value in zip(handed, values, strict=True)
        }
        self._places.update({one.place.identity: one.place for one in handed})
        self.values = {n: one for n, one in self.values.items() if id(one[1]) not in new}
        for value, stand_in in new.values():
            self.values[id(value)] = value, stand_in, _writes(value)


def _writes(value: torch.Tensor) -> Any:
    inner = getattr(value, "held", value)
    return None if inner.is_inference() else writes_of(inner)
