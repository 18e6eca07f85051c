"""Tensors that code leaves in Python places for the script: features that a hook collects, say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphsplit.guards.places import Place
from graphsplit.guards.values import Frozen, any_leaf, freeze, put_into, with_leaves


@dataclass(frozen=True, eq=False)
class Handed:
    """A tensor that code has left in a place, where the script looks for it after the call.

    Attributes:
        place: The place.
        stand_in: What the recorded step leaves there.
        value: The tensor without values; None once it is an output of the graph.
    """

    place: Place
    stand_in: Any
    value: Any

    @property
    def where(self) -> tuple[Any, int]:
        """The place, and what stands there: equal for two that hand out alike."""
        return self.place.identity, id(self.stand_in)


def swap(place: Place, instead: Mapping[int, Any]) -> None:
    """Put other leaves in the place of some, by their identity."""
    held = freeze(place.read())
    if any_leaf(held, lambda leaf: id(leaf) in instead):
        put_leaves(place, with_leaves(held, lambda leaf: instead.get(id(leaf), leaf)))


def put_leaves(place: Place, mapped: Any) -> None:
    """Let a place hold a snapshot with other leaves, in the containers that are there."""
    there = place.read()
    now = put_into(mapped, there)
    if now is not there:
        place.write(now)


def labelled_leaves(frozen: Any, label: str) -> Iterator[tuple[Any, str]]:
    """The leaves of a snapshot, each with where it is."""
    if not isinstance(frozen, Frozen):
        yield frozen, label
        return
    keys = frozen.keys or range(len(frozen.items))
    for key, item in zip(keys, frozen.items, strict=True):
        yield from labelled_leaves(item, f"{label}[{key!r}]")
