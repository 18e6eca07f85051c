"""The tensor in a Python place whose value is kept with the network.

In eager mode a reference to the tensor there would keep the value of its step. The buffer behind it
moves on, so the script is not given it: it would read other numbers without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from graphsplit.errors import OwnershipError
from graphsplit.guards.places import Place
from graphsplit.guards.values import Frozen, freeze, paired
from graphsplit.torch_ext.attributes import shown_form, storage_of
from graphsplit.torch_ext.stand_ins import StandIn, without_memory

_LABEL = "_graphsplit_label"
_NOT_KEPT = "_graphsplit_not_kept"
_WAS_READ = "_graphsplit_was_read"  # from a save, which may put it into any place
_STANDING = "_graphsplit_standing"


@dataclass(eq=False)
class Standing:
    """The stand-ins that have one buffer behind them, one after the other.

    Attributes:
        now: What stands in the places.
        is_held: Whether the script may hold it besides.
        first: The tensor of the user's that stood in the place when it was first read; else None.
    """

    now: KeptValue
    is_held: bool = False
    first: torch.Tensor | None = None


class KeptValue(StandIn):
    """A tensor without a value, in a place whose tensor the network keeps."""

    harmless = StandIn.harmless - {
        getattr(torch.Tensor, name) for name in ("stride", "is_contiguous", "storage_offset")
    }

    @staticmethod
    def of(tensor: torch.Tensor, label: str, not_kept: str = "") -> KeptValue:
        """Make the one for a tensor that is kept in a place, or why it is not kept."""
        made: Any = without_memory(tensor)
        made.__class__ = KeptValue
        setattr(made, _LABEL, label)
        setattr(made, _NOT_KEPT, not_kept)
        setattr(made, _STANDING, Standing(made))
        return cast(KeptValue, made)

    def latest(self) -> KeptValue:
        """The one that stands for the same buffer now."""
        return standing_of(self).now

    def need_value(self, asked: str) -> None:
        """Refuse.

        Raises:
            OwnershipError: Always.
        """
        label, not_kept = getattr(self, _LABEL), getattr(self, _NOT_KEPT)
        if not_kept:
            raise OwnershipError(
                f"the tensor in {label} was there for one call, and is not kept (asked for by "
                f"{asked}): it {not_kept}\n"
                f"  Fix: return it beside the loss or the outputs; or keep a copy in a buffer "
                f"(register_buffer)."
            )
        raise OwnershipError(
            f"the value in {label} is kept with the network, and changes at every step: the script "
            f"cannot read it (asked for by {asked})\n"
            f"  Fix: return it beside the loss or the outputs; or keep it in a buffer "
            f"(register_buffer), which its worker can read."
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"<{getattr(self, _LABEL)}: kept with the network>"


def label_of(value: KeptValue) -> str:
    """The place whose tensor it stands for, for people."""
    return str(getattr(value, _LABEL))


def shares_memory(value: Any, storage: int) -> bool:
    """Whether a value is a tensor whose memory has a number: what stands for one has none."""
    return (
        isinstance(value, torch.Tensor)
        and type(value) is not KeptValue
        and storage_of(value) == storage
    )


def standing_of(value: KeptValue) -> Standing:
    """The one and those with the same buffer behind them."""
    standing: Standing = getattr(value, _STANDING)
    return standing


def follow(older: KeptValue) -> KeptValue:
    """Make the one for the same buffer from now on: scripts may hold the one that was there."""
    made = KeptValue.of(older, label_of(older))
    standing = standing_of(older)
    setattr(made, _STANDING, standing)
    standing.now, standing.is_held = made, False
    return made


def note_first(value: torch.Tensor, first: torch.Tensor) -> None:
    """Note the tensor of the user's in whose place it stands from now on."""
    if isinstance(value, KeptValue):
        standing_of(value).first = first


def first_of(leaf: Any) -> Any:
    """The tensor of the user's that stood where this stands now; anything else as it is."""
    first = standing_of(leaf).first if isinstance(leaf, KeptValue) else None
    return leaf if first is None else first


def note_read(value: KeptValue) -> None:
    """Note that a save puts it where it was when that was written: scripts may take it there."""
    setattr(value, _WAS_READ, True)
    standing_of(value).is_held = True


def refuse_moved(places: Iterable[Place], known: Iterable[Place]) -> None:
    """Refuse what the script has put where code did not leave it: the value may be a later one.

    Args:
        places: Places in which code has found kept tensors.
        known: Places in which code has left some; what stands in a container may be noted by the
            container's place, or by its own.

    Raises:
        OwnershipError: It stands in a place that is not known.
    """
    known = [*known]
    holders = {id(place.holder) for place in known}
    inside = {number for place in known for number in _containers(place)}
    for place in places:
        if id(place.holder) in inside or not holders.isdisjoint(_containers(place)):
            continue
        moved = [leaf for leaf in _leaves(freeze(place.read())) if not hasattr(leaf, _WAS_READ)]
        if moved:
            raise OwnershipError(
                f"{place.label} holds what the script has taken from where code had left a tensor "
                f"({label_of(moved[0])}); that is kept with the network and changes at every step, "
                f"where in plain PyTorch it has the value of its own step\n"
                f"  Fix: keep it in a buffer (register_buffer), and take a copy of that; or go on "
                f"with the object whose code keeps it."
            )


def refuse_other(value: KeptValue, label: str) -> None:
    """Refuse what is kept with another network than the one whose code reads it.

    Raises:
        OwnershipError: Unless nothing is kept of it at all.
    """
    if not getattr(value, _NOT_KEPT):
        raise OwnershipError(
            f"the tensor in {label} is kept with the network of another Model, whose steps use the "
            f"same object: a step of this Model cannot go on from it\n"
            f"  Fix: keep the tensor in a buffer (register_buffer) of a module of both networks: "
            f"Models can share that. Or give each Model an object of its own."
        ) from None


def _containers(place: Place) -> Iterator[int]:
    value = place.read()
    return (id(container) for container, _ in paired(freeze(value), value))


def _leaves(frozen: Any) -> Iterator[KeptValue]:
    if isinstance(frozen, KeptValue):
        yield frozen
    elif isinstance(frozen, Frozen):
        for item in frozen.items:
            yield from _leaves(item)


def may_be_a_buffer(old: Any, place: Place) -> bool:
    """Whether an attribute of a module, with its tensor, is to become a buffer of that name."""
    new = place.read()
    return (
        place.module is not None
        and isinstance(old, torch.Tensor)
        and not isinstance(old, KeptValue)  # another Model's, over a network that shares the module
        and isinstance(new, torch.Tensor)
        and new.layout is torch.strided
        and shown_form(old) == shown_form(new)
        and not old.requires_grad
        and not new.requires_grad
    )
