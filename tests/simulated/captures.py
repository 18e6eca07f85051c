"""A captured graph for another copy of the network: simulated workers share what was captured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from graphsplit.capture.graph import CapturedGraph
from graphsplit.capture.operations.opaque_call import OpaqueCall
from graphsplit.capture.python.guards import PythonState
from graphsplit.capture.state.kept_value import KeptValue
from graphsplit.guards.check import Guards
from graphsplit.guards.places import Place, PlaceKind
from graphsplit.guards.values import any_leaf, freeze, is_plain
from graphsplit.torch_ext.attributes import BUFFERS, is_of_user
from graphsplit.torch_ext.steering import let_steer

_MOST_KEPT = 32


class RecentGraphs(dict[Any, CapturedGraph]):
    """Graphs by what they were captured of: the newest ones, for all slow down the next capture."""

    def __setitem__(self, key: Any, graph: CapturedGraph) -> None:
        super().__setitem__(key, graph)
        if len(self) > _MOST_KEPT:
            del self[next(iter(self))]


def plain_attributes(root: nn.Module) -> str:
    """All plain attributes of a network, as text."""
    found = (
        (path, name, value)
        for path, module in root.named_modules()
        for name, value in list(vars(module).items())
        if is_of_user(name) and is_plain(freeze(value))
    )
    return repr(list(found))


def keeps_tensors(state: PythonState) -> bool:
    """Whether something among what a step leaves belongs to one network's buffers, or script."""
    return bool(state.handed or state.renewed.names) or any(
        one.place.kind is PlaceKind.BUFFER
        or any_leaf(one.new, lambda leaf: isinstance(leaf, KeptValue))
        for one in state.changes
    )


def is_of_one_network(graph: CapturedGraph) -> bool:
    """Whether a graph calls code that is kept whole: it may hold Python state of its network."""
    return any(isinstance(node.target, OpaqueCall) for node in graph.fx_graph.nodes)


def state_of_copy(state: PythonState, root: nn.Module) -> PythonState:
    """The Python values around a captured step, for another copy of what was captured.

    Args:
        state: Those of the captured one.
        root: Holds network and loss under the names that they had.
    """
    guards, places = state.guards, [_in_copy(place, root) for place in state.lifted.places]
    watched = [
        replace(w, place=place, value=freeze(place.read()) if w.is_structure else w.value)
        for w, place in ((w, _in_copy(w.place, root)) for w in guards.watched)
    ]
    moved = Guards(
        watched,
        tensors=[tensor for tensor, *_ in guards._versions],
        lifted=[_in_copy(place, root) for place in guards.lifted],
        with_switches=guards._switches is not None,
    )
    changes = tuple(replace(c, place=_in_copy(c.place, root)) for c in state.changes)
    return PythonState(moved, changes, replace(state.lifted, places=tuple(places)))


def _in_copy(place: Place, root: nn.Module) -> Place:
    if place.module is None:
        return place
    held = vars(root.get_submodule(place.module))
    if place.kind is PlaceKind.NUMBER:
        let_steer((held[BUFFERS][place.key],))
    return replace(place, holder=held)
