"""The Python values that saves and snapshots can hold, and containers of the user's own classes."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

from graphsplit.encoding.values import has_bits, is_known_member
from graphsplit.guards.changes import containers_in
from graphsplit.guards.values import MISSING, Frozen, is_mapping, keys_of, values_of

OF_VALUES = (SimpleNamespace, Counter, OrderedDict, dict, list, tuple, set, frozenset, deque)
_WRITTEN = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, array),
    *(torch.dtype, torch.device),
)


def as_written(frozen: Any) -> Any:
    """A snapshot with containers of Python's own classes: a ``defaultdict`` as a ``dict``.

    One with attributes besides stays: they belong to what it holds.
    """
    if not isinstance(frozen, Frozen) or frozen.content is not None:
        return frozen
    held, items = frozen.container, tuple(map(as_written, frozen.items))
    has_more = not isinstance(held, SimpleNamespace) and getattr(held, "__dict__", None)
    if type(held) not in OF_VALUES and not has_more:
        held = next(kind() for kind in OF_VALUES if isinstance(held, kind))
    return Frozen(held, items, frozen.keys)


def of_own_class(frozen: Any) -> Iterator[Any]:
    """The containers that are written as those that they derive from."""
    return (one for one in containers_in(frozen) if type(one) not in OF_VALUES)


def of_class_there(frozen: Any, there: Any) -> Any:
    """The snapshot that ``as_written`` was given, where containers of these classes stand."""
    if not isinstance(frozen, Frozen) or not isinstance(there, type(frozen.container)):
        return frozen
    inside = dict(zip(keys_of(there), values_of(there), strict=True)) if is_mapping(there) else {}
    if isinstance(there, (list, tuple, deque)):
        inside = dict(enumerate(there))
    keys = frozen.keys or range(len(frozen.items))
    items = [
        of_class_there(item, inside.get(key)) for key, item in zip(keys, frozen.items, strict=True)
    ]
    held = frozen.container if type(there) in OF_VALUES else there
    return replace(frozen, container=held, items=tuple(items))


def can_be_written(value: Any, _inside: tuple[int, ...] = ()) -> bool:
    """Whether a value that was written comes back as it was, classes of containers included."""
    kind = type(value)
    if isinstance(value, (SimpleNamespace, dict, list, tuple, set, frozenset, deque)):
        parts = [*keys_of(value), *values_of(value)] if is_mapping(value) else [*value]
        inside = (*_inside, id(value))
        is_plain_kind = kind in OF_VALUES and id(value) not in _inside
        return is_plain_kind and all(can_be_written(part, inside) for part in parts)
    if isinstance(value, Enum):
        return is_known_member(value)
    return value is MISSING or has_bits(value) or kind in _WRITTEN
