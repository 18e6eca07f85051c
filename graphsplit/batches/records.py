"""Dataclasses and named tuples in batches: their fields, and their classes by name.

A worker that reads no batch learns only the text of its signature, and must find the class that is
named there. A name in a message never decides what is made: the class must be one that this worker
has met in a batch of its own, or one that stands in a module whose code takes part in the training
here (that of the network, the loss, the data set, its ``collate_fn``, or the script). Nothing is
imported, no attribute is asked for by a name that came, and nothing but a dataclass or a named
tuple is ever taken.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from torch import nn

from graphsplit.errors import ConfigurationError
from graphsplit.torch_ext.private import pytree

_known: dict[tuple[str, str], type[Any]] = {}
_trusted: dict[str, ModuleType] = {}
_NOBODYS = {"torch", "builtins"}
_MAX_NESTING = 3


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


def trust_network(network: nn.Module, loss_fn: object) -> None:
    """Records may be of the modules that define the network, the loss, or the script."""
    for one in (network, loss_fn):
        _trust(one.modules() if isinstance(one, nn.Module) else [one])
    script = sys.modules.get("__main__")
    if script is not None:
        _trusted["__main__"] = script


def trust_loader(loader: object) -> None:
    """Records may be of the modules that define a loader, its data set or its ``collate_fn``."""
    names = ("dataset", "collate_fn", "batch_sampler", "sampler")
    _trust([loader, *(getattr(loader, name, None) for name in names)])


def _trust(owners: Iterable[object]) -> None:
    for owner in owners:
        for one in (owner, type(owner)):
            name = getattr(one, "__module__", None)
            module = sys.modules.get(name) if isinstance(name, str) else None
            # PyTorch's own modules define no batches.
            if module is not None and module.__name__.partition(".")[0] not in _NOBODYS:
                _trusted[module.__name__] = module


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
            f"  Fix: define it, or import it by name, in the script, or in the module of the "
            f"network, of the data set or of its collate_fn."
        )
    _register(record)
    return record(**values)


def _names(record: type[Any]) -> list[str]:
    if dataclasses.is_dataclass(record):
        return [field.name for field in dataclasses.fields(record)]
    return list(record._fields)


def _find(module: str, name: str) -> type[Any] | None:
    """The record of this name among those that trusted modules hold already."""
    for trusted in list(_trusted.values()):
        for record in _classes_in(vars(trusted), _MAX_NESTING):
            if name_of(record) == (module, name) and is_record(record):
                return record
    return None


def _classes_in(namespace: Any, nesting: int) -> Iterator[type[Any]]:
    """The classes that a module holds, and those inside of its own classes."""
    for value in list(namespace.values()):
        if not isinstance(value, type):
            continue
        yield value
        if nesting and value.__module__ in _trusted:
            yield from _classes_in(vars(value), nesting - 1)


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
