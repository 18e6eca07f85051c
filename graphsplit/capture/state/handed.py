"""Tensors that code leaves in Python places for the script: features that a hook collects, say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphsplit.guards.changes import made_in
from graphsplit.guards.classes import attributes_of, is_plain_class, put_attributes
from graphsplit.guards.places import Place
from graphsplit.guards.values import Frozen, any_leaf, freeze, put_into, with_leaves
from graphsplit.guards.visitor import Noted
from graphsplit.torch_ext.private import FakeTensor


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
    """Put other leaves in the place of some, by their identity; in attributes of objects, too."""
    held = freeze(place.read())
    if any_leaf(held, lambda leaf: id(leaf) in instead):
        put_leaves(place, with_leaves(held, lambda leaf: instead.get(id(leaf), leaf)))
    for one, own in made_in(held, _is_plain_object):
        _put(one, own, instead)


def _put(one: Any, own: Frozen, instead: Mapping[int, Any]) -> None:
    if any_leaf(own, lambda leaf: id(leaf) in instead):
        mapped = with_leaves(own, lambda leaf: instead.get(id(leaf), leaf))
        put_attributes(one, put_into(mapped, own.container))


def _is_plain_object(leaf: Any) -> bool:
    kind = type(leaf)
    is_one = is_plain_class(kind) and not isinstance(leaf, (nn.Module, torch.Tensor))
    return (
        is_one and not kind.__module__.startswith("graphsplit.") and attributes_of(leaf) is not None
    )


def tensors_in_objects(
    noted: Iterable[Noted],
    has_made: Callable[[Any], bool],
    real_of: Callable[[Any], Any],
    stand_in: Callable[[str], Any],
) -> list[Handed]:
    """Put stand-ins for the tensors in objects that code has made and left, but does not read.

    Args:
        noted: The places that code has read or written.
        has_made: Whether the code has made an object.
        real_of: Gives for what stands for a parameter or buffer that itself.
        stand_in: Gives what is to stand for another tensor, by where it is.
    """
    found: list[Handed] = []
    for one in noted:
        objects = () if one.is_read else made_in(freeze(one.place.read()), has_made)
        for number, (thing, own) in enumerate(objects):
            instead: dict[int, Any] = {}
            holder = f"{one.place.label} ({number})" if number else one.place.label
            for leaf, label in labelled_leaves(own, holder):
                if not isinstance(leaf, FakeTensor) or id(leaf) in instead:
                    continue
                instead[id(leaf)] = real_of(leaf)
                if instead[id(leaf)] is leaf:
                    instead[id(leaf)] = stand_in(label)
                    found.append(Handed(one.place, instead[id(leaf)], leaf))
            _put(thing, own, instead)
    return found


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
