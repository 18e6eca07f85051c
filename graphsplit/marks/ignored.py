"""Places of which the user says that they do not matter."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

from graphsplit.errors import ConfigurationError
from graphsplit.guards.classes import own_dictionary
from graphsplit.guards.places import Place, PlaceKind, entry
from graphsplit.text import called, described, need

H = TypeVar("H")
_ignored: dict[Any, Place] = {}  # by identity; the places hold what they are in


@called("gs.ignore")
def ignore(holder: H, *names: Any) -> H:
    """Say that a Python value does not decide what network and loss compute.

    graphsplit watches what their code reads, and captures the step anew where that has changed. A
    value that is read and changes, but decides nothing (a counter that is only printed), need not
    be watched. Results are wrong without a word if it does decide something.

    Args:
        holder: What holds it: a module, an object, a class, a Python module, a dictionary or list.
        names: Names of attributes there; keys or positions in a dictionary or list.

    Returns:
        The holder itself.

    Raises:
        ConfigurationError: No name is given, or the holder has nothing of such a name.
    """
    for name in names or (None,):
        is_entry = isinstance(holder, (dict, list)) and bool(names)
        kind = (int if isinstance(holder, list) else Hashable) if is_entry else str
        example = "the name of one of its attributes or entries, as in gs.ignore(net, 'counter')"
        need("gs.ignore", "name", name, isinstance(name, kind), example)
        place = _place_in(holder, name)
        _ignored[place.identity] = place
    return holder


def _place_in(holder: Any, name: Any) -> Place:
    if isinstance(holder, (dict, list)):
        return entry(holder, name, repr(name))
    if isinstance(holder, type):
        return Place(PlaceKind.CLASS, holder, name, name)
    held = own_dictionary(holder)
    if held is not None:
        return entry(held, name, name)
    if type(getattr(type(holder), name, None)).__name__ == "member_descriptor":
        return Place(PlaceKind.SLOT, holder, name, name)
    raise ConfigurationError(
        f"gs.ignore: {described(holder)} has no attribute or entry {name!r} to ignore\n"
        f"  Fix: pass what holds the value, and its name there, as in gs.ignore(net, 'counter')."
    )


def is_ignored(place: Place) -> bool:
    """Whether the user has said that a place does not matter."""
    return bool(_ignored) and place.identity in _ignored
