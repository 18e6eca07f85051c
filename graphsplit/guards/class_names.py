"""Names that classes get after a step was captured, and that change what objects do.

Python calls a special method, and a property before an attribute of the same name, as soon as the
class has one. Code that ran before has read nothing there that could be compared.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from graphsplit.guards.classes import is_watchable
from graphsplit.guards.places import Place, PlaceKind
from graphsplit.torch_ext.private import dict_version


def names_of_class(kind: type) -> Mapping[str, Any]:
    """A class's own attributes: where writes to dictionaries are numbered, the dictionary itself.

    A view of it has no number. What is written to the class goes into the dictionary.
    """
    view = vars(kind)
    return view if dict_version is None else gc.get_referents(view)[0]


class ClassNames:
    """The names in the user's classes of some objects, at one moment.

    Args:
        objects: The objects.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        kinds = dict.fromkeys(kind for one in objects for kind in type(one).__mro__)
        self._names = {kind: frozenset(vars(kind)) for kind in kinds if is_watchable(kind)}

    def rows(self) -> list[tuple[Mapping[str, Any], int]]:
        """The classes' attributes, and how many there are by now."""
        return [(names_of_class(kind), len(vars(kind))) for kind in self._names]

    def gained(self) -> Iterator[Place]:
        """The places of names that classes have got since, and that decide what objects do."""
        for kind, before in self._names.items():
            for name in sorted(vars(kind).keys() - before):
                if _decides(name, vars(kind)[name]):
                    yield Place(PlaceKind.CLASS, kind, name, f"{kind.__qualname__}.{name}")


def _decides(name: str, value: Any) -> bool:
    is_special = name.startswith("__") and name.endswith("__")
    return hasattr(type(value), "__set__") or (is_special and callable(value))
