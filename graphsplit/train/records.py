"""Dataclasses and named tuples in batches: their fields, and their classes by name.

A worker that reads no batch learns only the text of its signature, and must find the class that is
named there. It looks among the modules that its own script has imported and imports nothing, and it
takes nothing but a dataclass or a named tuple.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from torch.utils import _pytree as pytree

from graphsplit.errors import ConfigurationError

_known: dict[tuple[str, str], type[Any]] = {}


def fields_of(value: Any) -> list[tuple[str, Any]] | None:
    """Names and values of the fields; None if it is neither a dataclass nor a named tuple."""
    record = type(value)
    if not is_record(record):
        return None
    _register(record)
    return [(name, getattr(value, name)) for name in _names(record)]


def name_of(record: type[Any]) -> tuple[str, str]:
    """Module and qualified name."""
    return record.__module__, record.__qualname__


def is_record(record: Any) -> bool:
    """Whether it is the class of a dataclass or of a named tuple."""
    if not isinstance(record, type):
        return False
    return dataclasses.is_dataclass(record) or (
        issubclass(record, tuple) and isinstance(getattr(record, "_fields", None), tuple)
    )


def make(module: str, name: str, values: dict[str, Any]) -> Any:
    """Make a record.

    Raises:
        ConfigurationError: There is no such class here, or it has other fields.
    """
    record = _known.get((module, name)) or _find(module, name)
    if record is None or set(_names(record)) != set(values):
        raise ConfigurationError(
            f"a batch holds a {module}.{name} with the fields {', '.join(values)}, and this worker "
            f"knows no such dataclass or named tuple\n"
            f"  Fix: define it at the top level of a module that the script of every worker "
            f"imports."
        )
    _register(record)
    return record(**values)


def _names(record: type[Any]) -> list[str]:
    if dataclasses.is_dataclass(record):
        return [field.name for field in dataclasses.fields(record)]
    return list(record._fields)


def _find(module: str, name: str) -> type[Any] | None:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if is_record(found) else None


def _register(record: type[Any]) -> None:
    """Let PyTorch's pytrees take a dataclass apart; they know named tuples."""
    if name_of(record) in _known:
        return
    if dataclasses.is_dataclass(record) and record not in pytree.SUPPORTED_NODES:
        late = [field.name for field in dataclasses.fields(record) if not field.init]
        if late:
            raise ConfigurationError(
                f"a batch holds a {record.__qualname__}, whose field {late[0]!r} is not given to "
                f"its constructor\n"
                f"  Fix: give it init=True, or pass a dictionary or a tuple instead."
            )
        pytree.register_dataclass(record)
    _known[name_of(record)] = record
