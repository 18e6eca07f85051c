"""Plain Python values that forward leaves in attributes, as ones that a snapshot can hold.

``checkpoint.values`` writes numbers, strings, None, lists, tuples and dictionaries. What else is
plain is tagged by a tuple, which no attribute's value begins with by chance::

    ("$kept", "dtype", "float32")      ("$kept", "set", [...])      ("$kept", "enum", "Mode.FAST")

A member of an enumeration is told by its class and name; the class is found again among those that
the process has loaded, never imported.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import torch

from graphsplit.errors import CheckpointError
from graphsplit.guards.values import MISSING

_TAG = "$kept"


def to_kept(value: Any) -> Any:
    """A plain value, as one that can be written."""
    if value is MISSING:
        return None
    if isinstance(value, enum.Enum):
        kind = type(value)
        return (_TAG, "enum", f"{kind.__module__}:{kind.__qualname__}", value.name)
    if isinstance(value, torch.dtype):
        return (_TAG, "dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return (_TAG, "device", str(value))
    if isinstance(value, complex):
        return (_TAG, "complex", value.real, value.imag)
    if isinstance(value, bytes):
        return (_TAG, "bytes", value.hex())
    if isinstance(value, (set, frozenset)):
        return (_TAG, type(value).__name__, [to_kept(item) for item in value])
    if isinstance(value, SimpleNamespace):
        return (_TAG, "namespace", to_kept(vars(value)))
    if isinstance(value, dict):
        return {to_kept(key): to_kept(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [to_kept(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def can_be_kept(value: Any) -> bool:
    """Whether ``to_kept`` makes something of a value that can be written."""
    if type(value) is SimpleNamespace:
        return can_be_kept(vars(value))
    if isinstance(value, dict):
        return type(value) is dict and all(map(can_be_kept, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value) in (list, tuple, set, frozenset) and all(map(can_be_kept, value))
    plain = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
    return value is None or value is MISSING or isinstance(value, plain)


def from_kept(value: Any) -> Any:
    """The value again.

    Raises:
        CheckpointError: It is of an enumeration that this process does not know.
    """
    if isinstance(value, tuple) and value[:1] == (_TAG,):
        return _untagged(*value[1:])
    if isinstance(value, dict):
        return {from_kept(key): from_kept(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [from_kept(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _untagged(kind: str, *content: Any) -> Any:
    if kind == "dtype" and isinstance(getattr(torch, content[0], None), torch.dtype):
        return getattr(torch, content[0])
    if kind == "device":
        return torch.device(content[0])
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content[0])
    if kind in ("set", "frozenset"):
        items = map(from_kept, content[0])
        return set(items) if kind == "set" else frozenset(items)
    if kind == "namespace":
        return SimpleNamespace(**from_kept(content[0]))
    if kind == "enum":
        return _member(*content)
    raise CheckpointError(f"a kept attribute is marked {kind!r}, which nobody writes")


def _member(where: str, name: str) -> enum.Enum:
    for known in _all_enums(enum.Enum):
        if f"{known.__module__}:{known.__qualname__}" == where and name in known.__members__:
            return known[name]
    raise CheckpointError(
        f"forward has left {where.replace(':', '.')}.{name} in an attribute, and this process "
        f"knows no such enumeration\n  Fix: define it where the script is loaded."
    )


def _all_enums(kind: type[enum.Enum]) -> list[type[enum.Enum]]:
    return [kind, *(found for one in kind.__subclasses__() for found in _all_enums(one))]
