"""A place where Python keeps a value that code reads: an attribute, an entry, a global, a cell."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from contextvars import ContextVar, Token, copy_context
from dataclasses import dataclass
from enum import Enum
from types import CellType, SimpleNamespace
from typing import Any

from graphsplit.errors import CaptureError
from graphsplit.guards.values import MISSING, holder_of
from graphsplit.text import without_identities
from graphsplit.torch_ext.attributes import PARAMETERS, form_in, put_form
from graphsplit.torch_ext.steering import number_in, put_number

NUMBER_OF = "the value of "  # with which the labels of numbers in buffers begin


class PlaceKind(Enum):
    """How a place is read and written."""

    ENTRY = "entry"  # of a dictionary or list: attributes and globals are entries of dictionaries
    SLOT = "slot"  # of an object without a dictionary
    CLASS = "class"  # an attribute of a class
    CELL = "cell"  # of a closure
    FIELD = "field"  # an attribute that Python itself keeps: the code of a function
    ITSELF = "itself"  # a container that is reached by no name: behind a view, in a C object
    CONTEXT = "context"  # a context variable
    MARK = "mark"  # of a parameter: whether it is trained
    BUFFER = "buffer"  # what is in a buffer's place, and whether it is saved
    NUMBER = "number"  # the value of a buffer of one element


@dataclass(frozen=True, eq=False)
class Place:
    """Where a value is kept.

    Attributes:
        kind: How to read and write it.
        holder: The dictionary, list, object, class, cell or function; held, so that its identity
            stays its own.
        key: Its key, index or name there. A mark is held by the dictionary of a module's
            attributes, and its key is the parameter's name; a buffer and its number likewise.
        label: What it is, for people: ``net.beta``, ``train.py: CONFIG['beta']``.
        source: Where it was first read: ``file:line``.
        module: The path of the module whose attribute it is, below what is captured, or None: such
            a place is found again in another copy of the network.
        is_inside: Whether another place holds it: an item of a container that stands there.
    """

    kind: PlaceKind
    holder: Any
    key: Any
    label: str
    source: str = ""
    module: str | None = None
    is_inside: bool = False

    @property
    def identity(self) -> tuple[int, PlaceKind, Any]:
        """A key that is equal for one place, while it is held."""
        key = self.key
        if type(key) is not str and not isinstance(key, Hashable):
            key = repr(key)
        return id(self.holder), self.kind, (type(key), key)

    def read(self) -> Any:
        """The present value; ``MISSING`` if there is none."""
        try:
            if self.kind is PlaceKind.ITSELF:
                return self.holder
            if self.kind is PlaceKind.CONTEXT:
                return self.holder.get(MISSING)
            if self.kind is PlaceKind.MARK:
                return self.holder[PARAMETERS][self.key].requires_grad
            if self.kind is PlaceKind.BUFFER:
                return form_in(self.holder, self.key, MISSING)
            if self.kind is PlaceKind.NUMBER:
                return number_in(self.holder, self.key, MISSING)
            if self.kind is PlaceKind.FIELD:  # of a dictionary too: its default
                return object.__getattribute__(self.holder, self.key)
            if isinstance(self.holder, dict):  # a dictionary of defaults must not make one
                return dict.get(self.holder, self.key, MISSING)
            if self.kind is PlaceKind.ENTRY:
                return self.holder[self.key]
            if self.kind is PlaceKind.CELL:
                return self.holder.cell_contents
            if self.kind is PlaceKind.CLASS:
                return vars(self.holder).get(self.key, MISSING)
            return object.__getattribute__(self.holder, self.key)
        except (AttributeError, LookupError, ValueError):  # the latter: an empty cell
            return MISSING

    def write(self, value: Any) -> None:
        """Put a value there; ``MISSING`` deletes it."""
        if value is MISSING:
            self._delete()
        elif self.kind is PlaceKind.CONTEXT:
            _set_variable(self.holder, value)
        elif self.kind is PlaceKind.MARK:
            self.holder[PARAMETERS][self.key].requires_grad_(value)
        elif self.kind is PlaceKind.BUFFER:
            put_form(self.holder, self.key, value, MISSING)
        elif self.kind is PlaceKind.NUMBER:
            put_number(self.holder, self.key, value)
        elif isinstance(self.holder, dict) and self.kind is not PlaceKind.FIELD:
            dict.__setitem__(self.holder, self.key, value)
        elif self.kind is PlaceKind.ENTRY:
            self.holder[self.key] = value
        elif self.kind is PlaceKind.CELL:
            self.holder.cell_contents = value
        elif self.kind is PlaceKind.CLASS or isinstance(self.holder, type):
            type.__setattr__(self.holder, self.key, value)
        else:
            object.__setattr__(self.holder, self.key, value)

    def _delete(self) -> None:
        if self.kind is PlaceKind.CONTEXT:
            _unset_variable(self.holder)
            return
        with contextlib.suppress(AttributeError, LookupError, ValueError):
            if self.kind is PlaceKind.ENTRY:
                del self.holder[self.key]
            elif self.kind is PlaceKind.CELL:
                del self.holder.cell_contents
            elif self.kind is PlaceKind.CLASS:
                type.__delattr__(self.holder, self.key)
            else:
                object.__delattr__(self.holder, self.key)


# Python unsets a context variable only by what it gave when the variable was set: by number, with
# the variable, so that no other gets its number.
_set_here: dict[int, tuple[ContextVar[Any], Token[Any]]] = {}


def _set_variable(variable: ContextVar[Any], value: Any) -> None:
    token = variable.set(value)
    if token.old_value is Token.MISSING:
        _set_here[id(variable)] = variable, token


def _unset_variable(variable: ContextVar[Any]) -> None:
    if variable not in copy_context():
        return
    try:
        variable.reset(_set_here.pop(id(variable))[1])
    except (KeyError, RuntimeError, ValueError):  # the user's code, or another context, has set it
        raise CaptureError(
            f"network or loss gives the context variable {variable.name!r} its first value; Python "
            f"cannot take that back, as capturing has to\n"
            f"  Fix: {variable.name}.set(...) before the first step."
        ) from None


def entry(holder: Any, key: Any, label: str, source: str = "", module: str | None = None) -> Place:
    """An entry of a dictionary or list."""
    return Place(PlaceKind.ENTRY, holder, key, label, source, module)


def inside(container: Any, key: Any, place: Place) -> Place:
    """An item of a container that a place holds, or of one in it: ``CONFIG["rate"]``, ``c.rate``.

    Args:
        container: The container.
        key: The item's key, position or name.
        place: Where the container was met.
    """
    shown = without_identities(repr(key))
    step = f".{key}" if isinstance(container, SimpleNamespace) else f"[{shown}]"
    holder, label = holder_of(container), place.label + step
    return Place(PlaceKind.ENTRY, holder, key, label, place.source, is_inside=True)


def itself(container: Any, label: str) -> Place:
    """A container as a whole, wherever it is kept."""
    return Place(PlaceKind.ITSELF, container, "", label)


def cell(holder: CellType, label: str, source: str = "") -> Place:
    """The variable of a closure."""
    return Place(PlaceKind.CELL, holder, "cell_contents", label, source)


def named_place(holder: Any, name: str, label: str) -> Place:
    """The place of an attribute of a class, a module or a function; of a global."""
    if isinstance(holder, type):
        return Place(PlaceKind.CLASS, holder, name, label)
    return entry(holder if isinstance(holder, dict) else vars(holder), name, label)
