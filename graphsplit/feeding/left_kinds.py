"""Values of libraries that code kept whole leaves: sent by their names, or by their parts.

Who sends one is not trusted: names are those of a few libraries, without what runs texts or reads
files, and parts are put together by a few functions.
"""

from __future__ import annotations

import builtins
import cmath
import collections
import datetime
import decimal
import fractions
import functools
import gc
import itertools
import math
import operator
import pathlib
import re
import string
import typing
import weakref
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import (
    BuiltinMethodType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from graphsplit.capture.reach.contents import NOTHING
from graphsplit.capture.reach.holders import Holder
from graphsplit.capture.reach.reach import is_of_library
from graphsplit.errors import ConfigurationError
from graphsplit.guards.classes import attributes_of
from graphsplit.guards.values import any_leaf
from graphsplit.torch_ext.attributes import ALL_HOOKS

MARK, UNKNOWN = "\0left", "unknown"
_LIBRARIES = {
    one.__name__: one
    for one in (
        *(torch, torch.nn.functional, torch.nn, torch.special, torch.linalg, torch.fft),
        *(torch.nn.init, torch.return_types, np, math, cmath, operator, builtins, collections),
        *(datetime, decimal, fractions, functools, itertools, pathlib, re, typing),
    )
}
_CONSTANTS = (type(...), type(NotImplemented))
_TEXTS = ("compile", "eval", "exec", "getattr", "setattr", "delattr", "vars", "globals", "locals")
_FILES = ("load", "save", "loadtxt", "savetxt", "fromfile", "genfromtxt", "memmap", "savez", "open")
_DANGEROUS = frozenset((*_TEXTS, *_FILES, "savez_compressed", "breakpoint", "input", "hub"))


def name_of_class(kind: type) -> str:
    """The name of a class of ``OBJECTS``: no class of the user's has a like one."""
    return f"{kind.__module__}.{kind.__qualname__}"


# Classes of libraries whose objects are all in their attributes, and in what they hold.
OBJECTS: dict[str, Any] = {
    name_of_class(kind): kind
    for kind in (
        *(collections.Counter, collections.OrderedDict, collections.defaultdict),
        *(collections.ChainMap, collections.UserDict, collections.UserList),
        *(collections.UserString, SimpleNamespace, Namespace, string.Template, np.poly1d),
        *(getattr(np.polynomial, name) for name in np.polynomial.__all__ if name[0].isupper()),
        *(one for one in vars(nn).values() if isinstance(one, type) and issubclass(one, nn.Module)),
    )
}


# Classes from which users derive their own, in the order in which they are looked for.
BASES: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, tuple, frozenset),
    *(list, dict, set, collections.deque),
)


@functools.cache
def _names() -> dict[int, tuple[str, str]]:
    """The names of what the libraries hold, by number (``id``): they keep it alive."""
    return {
        id(value): (module, name)
        for module, library in reversed(_LIBRARIES.items())
        for name, value in vars(library).items()
        if _is_named(value, name)
    }


def _is_named(value: Any, name: str) -> bool:
    if name.startswith("_") or name in _DANGEROUS:
        return False
    if isinstance(value, ModuleType):
        return value in _LIBRARIES.values()
    return callable(value) or isinstance(value, _CONSTANTS)


def name_in_library(value: Any) -> tuple[str, str] | None:
    """The library that has a function, a class or a module, and its name there."""
    if value is NOTHING:  # in a cell, or a global that was deleted
        return "", ""
    found = _names().get(id(value))
    if found is None and isinstance(value, ModuleType) and value in _LIBRARIES.values():
        return value.__name__, ""
    is_there = found is not None and getattr(_LIBRARIES[found[0]], found[1], None) is value
    return found if is_there else None


def in_library(module: str, name: str) -> Any:
    """The value that ``name_in_library`` named on another worker.

    Raises:
        ConfigurationError: Nothing is called so.
    """
    if not module:
        return NOTHING
    library: Any = _LIBRARIES.get(module)
    found = getattr(library, name, None) if name else library
    if library is None or (name and not _is_named(found, name)):
        raise ConfigurationError(f"another worker has left {module}.{name}, which is not here")
    return found


def _called(of: Any, name: str) -> Any:
    found = getattr(of, name)
    return _a((MethodType, BuiltinMethodType), found)


def _weakly(value: Any) -> Any:
    return weakref.ref(set() if value is None else value)  # nobody has the set any more


def _sequence(kind: Any, *items: Any) -> Any:
    return kind(items) if _is_sequence(kind) else _a((), kind)


def _error(kind: Any, *args: Any) -> Any:
    return kind(*args) if _is_error(kind) else _a((), kind)


def _a(kinds: tuple[type, ...], value: Any) -> Any:
    if not isinstance(value, kinds):
        raise ConfigurationError(f"another worker has left a {type(value).__name__} as another")
    return value


def _is_sequence(kind: Any) -> bool:
    """Whether this is a class of results of torch: a tuple whose items have names."""
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "n_fields")


def _is_error(kind: Any) -> bool:
    is_one = isinstance(kind, type) and issubclass(kind, BaseException)
    return is_one and kind.__module__ == "builtins"


_PARTS: dict[Any, tuple[str, Callable[[Any], list[Any]]]] = {
    functools.partial: ("partial", lambda v: [v.func, v.args, v.keywords]),
    MappingProxyType: ("proxy", gc.get_referents),
    weakref.ReferenceType: ("weak", lambda v: [v()]),
    MethodType: ("method", lambda v: [v.__self__, v.__name__]),
    BuiltinMethodType: ("method", lambda v: [v.__self__, v.__name__]),
}
MAKERS: dict[str, Callable[..., Any]] = {
    "partial": lambda func, args, keywords: functools.partial(func, *args, **keywords),
    "proxy": MappingProxyType,
    "weak": _weakly,
    "method": _called,
    "sequence": _sequence,
    "error": _error,
}


def parts_of(value: Any) -> tuple[str, list[Any]] | None:
    """The name of what makes a value, among ``MAKERS``, and its arguments; None for none."""
    kind = type(value)
    if kind in _PARTS:
        name, parts = _PARTS[kind][0], _PARTS[kind][1](value)
        is_one = name != "method" or getattr(parts[0], parts[1], None) == value
        return (name, parts) if is_one else None
    if _is_sequence(kind):
        return "sequence", [kind, *value]
    if _is_error(kind) and not vars(value):
        return "error", [kind, *value.args]
    return None


def unknown(what: Any, value: Any) -> list[Any]:
    """The message for a value that cannot be sent.

    Args:
        what: Where it is in its holder.
        value: The value.
    """
    return [MARK, UNKNOWN, f"{what}, a {type(value).__name__}"]


def is_unknown(sent: Any) -> bool:
    """Whether this is such a message."""
    return isinstance(sent, list) and sent[:2] == [MARK, UNKNOWN]


def is_plain_object(value: Any) -> bool:
    """Whether a value is an object that is all in its attributes, and in what it holds."""
    is_thing = not isinstance(value, (type, torch.Tensor)) and _is_bare(value)
    kind = type(value)
    is_users = not is_of_library(kind.__module__) or kind in OBJECTS.values()
    is_users |= hasattr(kind, "_fields")  # a named tuple of a library's
    is_own = isinstance(value, BASES) and kind not in BASES
    return is_thing and is_users and (is_own or attributes_of(value) is not None)


def _is_bare(value: Any) -> bool:
    """Whether a module holds neither tensors nor hooks; whatever else a value is."""
    if not isinstance(value, nn.Module):
        return True
    if next(itertools.chain(value.parameters(), value.buffers()), None) is not None:
        return False
    return not any(vars(one).get(table) for one in value.modules() for table in ALL_HOOKS)


class Known:
    """The objects that the code of one worker leads to, by names which all workers share.

    Args:
        holders: Their state, by name.
        home: The worker, in words.
        here: This one.

    Attributes:
        apart: The keys of what holds state: containers among that count by themselves.
    """

    def __init__(self, holders: Mapping[Any, Holder], home: str = "", here: str = "") -> None:
        self._holders, self._home, self._here = holders, home, here
        self._names = {id(one.of): name for name, one in holders.items()}
        self.apart = frozenset(one.key for one in holders.values())

    def name_of(self, value: Any) -> Any:
        """The name of a value; None for one that has none."""
        is_apart = value is None or isinstance(value, torch.Tensor)  # tensors are sent
        return None if is_apart else self._names.get(id(value))

    def is_made(self, frozen: Any) -> bool:
        """Whether a snapshot holds an object that has no name: code has made it."""
        return any_leaf(frozen, lambda leaf: is_plain_object(leaf) and self.name_of(leaf) is None)

    def has(self, name: Any) -> bool:
        """Whether an object has this name."""
        return name in self._holders

    def named(self, name: Any) -> Any:
        """The object of this name; None where there is none."""
        return self._holders[name].of if name in self._holders else None

    def holder(self, name: Any) -> Holder:
        """The holder of this name on this worker.

        Raises:
            ConfigurationError: Nothing has.
        """
        try:
            return self._holders[name]
        except KeyError:
            raise self.unlike(name) from None

    def unlike(self, name: Any) -> ConfigurationError:
        """The error for what is not here as it is on the worker that has sent something."""
        return ConfigurationError(
            f"code kept whole on {self._home} has changed {name}, which it does "
            f"not lead to on {self._here}\n"
            f"  Fix: give the code the same objects on all workers."
        )

    def where(self, name: Any) -> str:
        """The holder of this name, and the worker that has sent it, in words."""
        return f"{self.holder(name).name}, on {self._home}"

    def there(self, name: Any) -> Any:
        """The object of this name on this worker.

        Raises:
            ConfigurationError: There is none, or nobody here has it any more.
        """
        value = self.holder(name).of
        if value is None:
            raise ConfigurationError(
                f"code kept whole on {self._home} has left an object, {name}, which nobody holds "
                f"any more on {self._here}\n"
                f"  Fix: keep it in an attribute there, too, as long as the code may leave it."
            )
        return value
