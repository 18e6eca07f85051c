"""How the contents of containers, cells and objects are read, and put back."""

from __future__ import annotations

import collections
import pickle
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from graphsplit.errors import CaptureError
from graphsplit.guards.classes import own_dictionary
from graphsplit.guards.values import fill_set, keys_of, values_of

MAX_COPIED = 1 << 24  # octets of an array
_WITH_ITERATORS = frozenset(("builtins", "itertools", "_collections", "array"))  # of Python
NOTHING: Any = object()  # in an empty cell, or a global that was deleted


def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Let a generator stand where it stood."""
    generator.set_state(state)


def content_of(cell: types.CellType) -> Any:
    """The value in a cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return NOTHING


def octets_in(value: Any) -> Any:
    """Octets by which two values are compared."""
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.tobytes()
    return pickle.dumps(value)


def attributes_in(of: Any, own: dict[Any, Any]) -> dict[Any, Any]:
    """The contents of a dictionary; of the one that an object has by now, if it was its own."""
    held = own_dictionary(of)
    return held_in(own if held is None else held)


def set_attributes(of: Any, own: dict[Any, Any], noted: dict[Any, Any]) -> None:
    """Give a dictionary its contents back; that of an object's attributes, if it is one, to it."""
    if of is not None and own_dictionary(of) is not own:
        object.__setattr__(of, "__dict__", own)
    refill(own, noted)


def set_slots(value: Any, slots: Iterable[str], noted: dict[str, Any]) -> None:
    """Let slots hold what they held, those that are not noted nothing."""
    for slot in slots:
        if slot in noted:
            object.__setattr__(value, slot, noted[slot])
        elif hasattr(value, slot):
            object.__delattr__(value, slot)


def set_items(value: np.ndarray[Any, Any], items: list[Any]) -> None:
    """Let an array of objects hold what it held."""
    for index, item in enumerate(items):
        value.flat[index] = item


def held_in(value: dict[Any, Any]) -> dict[Any, Any]:
    """The contents of a dictionary."""
    # Whatever its class makes of asking for them: one of transformers imports all models.
    return dict(zip(keys_of(value), values_of(value), strict=True))


def refill(value: Any, noted: Any) -> None:
    """Give a deque, a set or a dictionary its contents back."""
    if isinstance(value, set):
        fill_set(value, noted)
        return
    value.clear()
    (value.extend if isinstance(value, collections.deque) else value.update)(noted)


def is_iterator(value: Any) -> bool:
    """Whether this is an iterator of Python's own, or a generator."""
    return type(value).__module__ in _WITH_ITERATORS and isinstance(value, Iterator)


def position_of(iterator: Any) -> str | None:
    """The state that changes when an iterator is used; None where it does not tell."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return "ended" if frame is None else f"{frame.f_lasti} {sorted(frame.f_locals.items())!r}"
    try:
        if hasattr(iterator, "tell"):
            return str(iterator.tell())
        return repr(_told_in(iterator.__reduce__()))
    except (TypeError, AttributeError, NotImplementedError, OSError):
        return None


def _told_in(part: Any) -> Any:
    """All that makes an iterator anew, with positions in place of those that it asks in turn."""
    if isinstance(part, tuple):
        return tuple(map(_told_in, part))
    if is_iterator(part):
        return position_of(part)
    if isinstance(part, list):  # what is left, or all beside an index
        return len(part)
    return part if isinstance(part, (int, float, str, range, type(None))) else id(part)


def refuse_large(name: str) -> None:
    """Refuse to put a large array back."""
    raise CaptureError(
        f"what is kept whole writes to a large array, {name}; making a plan has to run it, and "
        f"keeps no copies of arrays above {MAX_COPIED >> 20} MiB\n"
        f"  Fix: keep it in a buffer, or say what it returns, with gs.opaque(..., outputs=f): it "
        f"is then not run when a plan is made."
    )


def refuse_used(name: str) -> None:
    """Refuse to put an iterator, or what tells no more than that it has changed, back."""
    raise CaptureError(
        f"what is kept whole takes items from an iterator, a queue or a hash, {name}; making a "
        f"plan has to run it, and cannot give them back\n"
        f"  Fix: keep an index or a list instead, or say what it returns, with "
        f"gs.opaque(..., outputs=f): it is then not run when a plan is made."
    )
