"""Containers that code reads through objects of Python's own, where no attribute shows them.

MappingProxyType(d), d.values(), memoryview(b) and d.get show another container; ChainMap, Queue
and the dictionaries of weakref keep theirs in attributes; threading.local and ContextVar hold what
this thread sees of them; a weak reference leads to an object, multiprocessing.Value to memory. A
file in memory, a SimpleQueue and a hash have no attributes: they are asked for what they tell.
"""

from __future__ import annotations

import abc
import collections.abc
import csv
import ctypes
import decimal
import gc
import hashlib
import io
import locale
import logging
import numbers
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from contextvars import ContextVar
from itertools import pairwise
from operator import is_
from queue import SimpleQueue
from types import (
    BuiltinMethodType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from graphsplit.frames import is_users
from graphsplit.guards.classes import is_watchable, own_dictionary
from graphsplit.guards.places import Place, PlaceKind, entry, itself
from graphsplit.guards.values import (
    BUFFERS,
    CONTAINERS,
    IN_C,
    MISSING,
    SYMBOLIC,
    items_of,
    shown,
)

_EMPTY: dict[Any, Any] = {}
_dump: Any = vars(abc)["_get_dump"]  # the only way to ask a class what is registered with it
_VIEWS: tuple[type, ...] = (
    MappingProxyType,
    type(_EMPTY.keys()),
    type(_EMPTY.values()),
    type(_EMPTY.items()),
)
_OF_FUNCTIONS = frozenset(("__code__", "__defaults__", "__kwdefaults__"))
OF_OBJECTS = frozenset(("__class__",))
FIELDS = _OF_FUNCTIONS | OF_OBJECTS
_FILES = (io.BytesIO, io.StringIO)
_HASHES = tuple({type(make()) for make in (hashlib.sha256, hashlib.sha3_256, hashlib.blake2b)})
_LOCK = type(threading.Lock())
TELLING = (*_FILES, SimpleQueue, *_HASHES, _LOCK)
_WRITER = type(csv.writer(io.StringIO()))
_POINTER: Any = ctypes.POINTER(ctypes.c_int).__base__
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
# Packages whose objects keep what they were given in a dictionary of attributes. Those that draw
# random numbers are looked at when they do; annotations hold nothing.
_HOLDING = (sys.stdlib_module_names | {"networkx", "numpy"}) - {"builtins", "random", "typing"}


def hidden_places(value: Any, label: str) -> Iterator[Place]:
    """The holders of values behind an object of Python's own."""
    if isinstance(value, defaultdict):
        yield Place(PlaceKind.FIELD, value, "default_factory", f"{label}.default_factory")
    if isinstance(value, ContextVar):
        yield Place(PlaceKind.CONTEXT, value, value.name, f"the context variable {value.name}")
    elif isinstance(value, _VIEWS):
        for held in gc.get_referents(value):
            if isinstance(held, dict):
                yield itself(held, label)
    elif isinstance(value, (memoryview, BuiltinMethodType, MethodWrapperType)):
        of = value.obj if isinstance(value, memoryview) else value.__self__
        if isinstance(of, CONTAINERS):
            yield itself(of, label)
    elif isinstance(value, decimal.Context):
        for name in ("prec", "rounding"):
            yield Place(PlaceKind.FIELD, value, name, f"{label}.{name}")
    elif isinstance(value, BaseException):
        yield Place(PlaceKind.FIELD, value, "args", f"{label}.args")
    elif isinstance(value, logging.Logger):  # what decides whether it logs, but for its cache
        while value is not None:
            for name in ("level", "disabled"):
                yield entry(vars(value), name, f"{name} of the logger {value.name}")
            value = value.parent
    elif isinstance(value, _WRITER):
        yield from (p for of in _written_by(value) for p in hidden_places(of, label))
    elif isinstance(value, TELLING):
        yield Place(PlaceKind.FIELD, _Told(value), "state", f"what {label} holds")
    elif type(value).__module__ == "multiprocessing.sharedctypes" and hasattr(value, "get_obj"):
        yield itself(value.get_obj(), label)
    elif _may_hold(value):
        held = getattr(value, "__dict__", None)
        if type(held) is dict:
            yield itself(held, f"the attributes of {label}")


def class_places(kind: type, label: str, names: Set[str]) -> Iterator[Place]:
    """The places that Python itself keeps for a class of the user's: bases, names, who derives.

    Args:
        kind: The class.
        label: The class, for people.
        names: What code asks for.
    """
    for name in ("__bases__", *sorted(names & {"__name__", "__qualname__"})):
        yield Place(PlaceKind.FIELD, kind, name, f"{name.strip('_')} of {label}")
    if isinstance(kind, abc.ABCMeta):
        yield _answer_of(kind, _registered, f"the classes registered with {label}")
    if "__subclasses__" in names:
        yield _answer_of(kind, type.__subclasses__, f"{label}.__subclasses__()")


def _registered(kind: Any) -> frozenset[Any]:
    token = abc.get_cache_token()  # another one once any class was registered
    known = _registries.get(kind)
    if known is None or known[0] != token:
        known = _registries[kind] = token, frozenset(_dump(kind)[0])
    return known[1]


def _answer_of(of: Any, ask: Callable[[Any], Any], label: str) -> Place:
    known, reference = _answers.setdefault(of, {}), weakref.ref(of)
    answer = known.setdefault(ask, _Answer(lambda: ask(reference())))
    return Place(PlaceKind.FIELD, answer, "now", label)


class _Answer:
    """The answer to a question: the same one as long as it is an equal one.

    Args:
        ask: Gives it.
        put: Lets it be another one, where that can be.
    """

    def __init__(self, ask: Callable[[], Any], put: Callable[[Any], object] = id) -> None:
        self._ask, self._put, self._last = ask, put, ask()

    @property
    def now(self) -> Any:
        """See above."""
        now = self._ask()
        if now is not self._last and now != self._last:
            self._last = now
        return self._last

    @now.setter
    def now(self, answer: Any) -> None:
        self._put(answer)


def setting_places(names: Set[str], imports: Iterable[str] = ()) -> Iterator[Place]:
    """Settings of Python, NumPy and torch that only functions tell, where code names one of these.

    Also which modules there are, and which classes Python's own abstract ones know.

    Args:
        names: What code asks for.
        imports: The modules that it may ask for.
    """
    for name in sorted(names & _ABSTRACT.keys()):
        yield _answer_of(_ABSTRACT[name], _registered, f"the classes registered with {name}")
    for name in sorted(set(imports)) if "modules" in names else ():
        yield presence_of(sys.modules, name, "sys.modules")
    for label, (asked, ask, put) in _SETTINGS.items():
        if not names.isdisjoint(asked):
            answer = _settings.setdefault(label, _Answer(ask, put))
            yield Place(PlaceKind.FIELD, answer, "now", label)


def presence_of(held: dict[str, Any], name: str, label: str) -> Place:
    """Whether something is there under a name.

    Args:
        held: The table of a module, or of all modules.
        name: The name.
        label: The table, for people.
    """
    label = f"{name!r} in {label}"
    answer = _settings.setdefault(label, _Answer(lambda: name in held))
    return Place(PlaceKind.FIELD, answer, "now", label)


_ABSTRACT: dict[str, Any] = {
    name: kind
    for library in (collections.abc, numbers)
    for name, kind in vars(library).items()
    if isinstance(kind, abc.ABCMeta)
}
_LOGGING = ("debug", "info", "warning", "error", "critical", "exception", "isEnabledFor")
_SHOWING = ("str", "repr", "print", "format", "array2string", "array_repr", "array_str")
_SETTINGS: dict[str, tuple[tuple[str, ...], Callable[[], Any], Callable[[Any], object]]] = {
    "sys.getrecursionlimit()": (
        ("getrecursionlimit", "setrecursionlimit"),
        sys.getrecursionlimit,
        sys.setrecursionlimit,
    ),
    "sys.getswitchinterval()": (
        ("getswitchinterval", "setswitchinterval"),
        sys.getswitchinterval,
        sys.setswitchinterval,
    ),
    "logging.root.manager.disable": (
        (*_LOGGING, "disable"),
        lambda: logging.root.manager.disable,
        logging.disable,
    ),
    "the locale": (
        ("getlocale", "setlocale", "localeconv", "strftime", "atof", "format_string", "strxfrm"),
        lambda: locale.setlocale(locale.LC_ALL),
        lambda found: locale.setlocale(locale.LC_ALL, found),
    ),
    "gc.get_threshold()": (
        ("get_threshold", "set_threshold"),
        gc.get_threshold,
        lambda found: gc.set_threshold(*found),
    ),
    "csv.field_size_limit()": (
        ("field_size_limit",),
        csv.field_size_limit,
        csv.field_size_limit,
    ),
    "np.get_printoptions()": (
        ("get_printoptions", "set_printoptions", *_SHOWING),
        np.get_printoptions,
        lambda found: np.set_printoptions(**found),
    ),
    "np.geterr()": (("geterr", "seterr"), np.geterr, lambda found: np.seterr(**found)),
    "torch.is_anomaly_enabled()": (
        ("is_anomaly_enabled", "set_detect_anomaly"),
        torch.is_anomaly_enabled,
        torch.autograd.set_detect_anomaly,
    ),
    "torch.is_warn_always_enabled()": (
        ("is_warn_always_enabled", "set_warn_always"),
        torch.is_warn_always_enabled,
        torch.set_warn_always,
    ),
}
_settings: dict[str, _Answer] = {}
_answers: weakref.WeakKeyDictionary[Any, dict[Any, _Answer]] = weakref.WeakKeyDictionary()
_registries: weakref.WeakKeyDictionary[Any, tuple[Any, frozenset[Any]]] = (
    weakref.WeakKeyDictionary()
)


def _written_by(writer: Any) -> Iterator[Any]:
    """The file to which a writer of ``csv`` writes: it holds a method of it."""
    held = gc.get_referents(writer)
    yield from (one.__self__ for one in held if isinstance(one, (BuiltinMethodType, MethodType)))


def kept_fields(value: Any, names: Set[str]) -> Iterator[Place]:
    """The places that Python itself keeps for a function or object of the user's.

    Args:
        value: The function or object.
        names: Those of such places that are asked for.
    """
    if isinstance(value, FunctionType):
        found = names & _OF_FUNCTIONS if is_users(value.__code__.co_filename) else ()
    else:
        is_thing = isinstance(value, nn.Module) or is_watchable(type(value))
        found = names & OF_OBJECTS if is_thing else ()
    for name in sorted(n for n in found if hasattr(value, n)):
        of = getattr(value, "__qualname__", type(value).__name__)
        yield Place(PlaceKind.FIELD, value, name, f"{name} of {of}")


def held_in(container: Any) -> list[Any]:
    """The values that a container holds; of ``ctypes``, what its pointers lead to."""
    if not isinstance(container, BUFFERS):
        return list(items_of(container))
    if isinstance(container, np.ndarray):
        return container.ravel().tolist() if container.dtype.hasobject else []
    return list(_pointed_to(container)) if isinstance(container, IN_C) else []


def _pointed_to(value: Any) -> Iterator[Any]:
    if isinstance(value, ctypes.Structure):
        for name, *_ in getattr(value, "_fields_", ()):
            yield from _pointed_to(getattr(value, name))
    elif isinstance(value, _POINTER) and value:
        yield value.contents


def hidden_values(value: Any) -> Iterator[Any]:
    """Values that an object of Python's own leads to, and does not hold or show as it is."""
    found = _referent(value)
    if found is not None:
        yield found
    if isinstance(value, _WRITER):
        yield from _written_by(value)
    while isinstance(value, logging.Logger):  # a handler of the user's may count what is logged
        yield from (one for one in (*value.handlers, *value.filters) if is_watchable(type(one)))
        value = value.parent if value.propagate else None


def weak_place(value: Any, label: str) -> Place | None:
    """The class of the object of a weak reference; None for what is none, or leads to a module.

    What is watched of the object then does not hold it: the script may let go of it.
    """
    found = _referent(value)
    if found is None or type(value) in _PROXIES or isinstance(found, nn.Module):
        return None  # a dead proxy answers nothing, not even its class
    return Place(PlaceKind.FIELD, _Referent(value, found), "kind", f"the class of {label}")


def _referent(value: Any) -> Any:
    """The object of a weak reference, while it is there."""
    if type(value) in _PROXIES:  # which is asked for nothing else, as its object may be gone
        with suppress(ReferenceError):
            return value.__repr__.__self__
        return None
    return value() if isinstance(value, weakref.ReferenceType) else None


def can_set(value: Any) -> bool:
    """Whether an object of ``TELLING`` can be given a state that it told before."""
    return isinstance(value, (*_FILES, _LOCK))


def told_by(value: Any) -> Any:
    """The state of an object of ``TELLING``, as far as it tells."""
    if isinstance(value, _FILES):
        return MISSING if value.closed else (value.getvalue(), value.tell())
    if isinstance(value, _LOCK):
        return value.locked()
    return value.qsize() if isinstance(value, SimpleQueue) else value.digest()


class _Told:
    """The state that an object tells: the same answer as long as it is an equal one."""

    def __init__(self, value: Any) -> None:
        self._value, self._last = value, told_by(value)

    @property
    def state(self) -> Any:
        """See ``told_by``."""
        now = told_by(self._value)
        self._last = self._last if now == self._last else now
        return self._last

    @state.setter
    def state(self, told: Any) -> None:  # of queues and hashes: a step that moves one is refused
        if isinstance(self._value, _LOCK):
            if self._value.locked() != told:
                self._value.acquire(blocking=False) if told else self._value.release()
        elif isinstance(self._value, _FILES) and told is not MISSING:
            text, position = told
            self._value.seek(0)
            self._value.truncate()
            self._value.write(text)
            self._value.seek(position)


def names_place(held: dict[str, Any], label: str) -> Place:
    """The names of an object's attributes, where code asks for all of them.

    Args:
        held: The dictionary of its attributes.
        label: The object, for people.
    """
    return Place(PlaceKind.FIELD, _Names(held), "now", f"the attributes of {label}")


class _Names:
    """The keys of a dictionary: one tuple as long as they are the same."""

    def __init__(self, held: dict[str, Any]) -> None:
        self._held, self.first = held, tuple(held)

    @property
    def now(self) -> tuple[str, ...]:
        return self.first if (now := tuple(self._held)) == self.first else now


class _Referent:
    """The object of a weak reference, as long as it has the attributes that it had."""

    def __init__(self, reference: Any, found: Any) -> None:
        self._reference, self._held = reference, own_dictionary(found)

    @property
    def kind(self) -> type | None:
        """Its class; None where it is gone, or has another dictionary of attributes."""
        found = _referent(self._reference)
        return type(found) if own_dictionary(found) is self._held else None


def cached_results(cache: Any, label: str) -> Iterator[Place]:
    """Values in a ``functools.lru_cache``: once they are gone, its function is called again."""
    held, is_bounded = _held_by(cache)
    keys = [key for key in held if not _is_symbolic(key)]
    if is_bounded and keys:
        results = _results.setdefault(cache, _Results(weakref.ref(cache)))
        yield entry(results, tuple(keys), f"the results of {label}")
    elif not is_bounded:
        for key in keys:
            yield entry(held, key, f"the result of {label} for {shown(key)}")


def _is_symbolic(key: Any) -> bool:
    """Whether a key is of a number that is lifted: it stands for that while it is captured."""
    parts = key if isinstance(key, (tuple, list)) else (key,)
    return any(isinstance(part, SYMBOLIC) for part in parts)


def _held_by(cache: Any) -> tuple[dict[Any, Any], bool]:
    """The results of a cache by key, and whether it lets go of some when it is full."""
    seen = gc.get_referents(cache)
    if seen and seen[0] is type(cache):  # where the version has the class go first
        del seen[0]
    for number, (held, following) in enumerate(pairwise(seen)):
        if following is cache.__wrapped__ and type(held) is dict:
            if number == 0:
                return held, cache.cache_parameters()["maxsize"] is not None
            step = number // len(held)  # each key, its result, and what else a link refers to
            results = zip(seen[:number:step], seen[1:number:step], strict=True)
            return {key: one for key, one in results if not _is_symbolic(key)}, True
    return {}, False


class _Results:
    """The results in a bounded cache: its dictionary has links, each used again for another one."""

    def __init__(self, cache: weakref.ref[Any]) -> None:
        self._cache = cache
        self._last: dict[Any, tuple[Any, ...]] = {}

    def __getitem__(self, keys: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results for some keys: the same tuple, while they are the same."""
        held, _ = _held_by(self._cache())
        now = tuple([held.get(key, MISSING) for key in keys])
        last = self._last.get(keys, ())
        if len(last) == len(now) and all(map(is_, last, now)):
            return last
        if len(self._last) == _MOST_KEPT:
            self._last.clear()
        self._last[keys] = now
        return now


_MOST_KEPT = 64
_results: weakref.WeakKeyDictionary[Any, _Results] = weakref.WeakKeyDictionary()


def _may_hold(value: Any) -> bool:
    """Whether an object of Python's own keeps values of the user's in its attributes."""
    if isinstance(value, threading.local):  # one of a class of the user's, too
        return True
    package = type(value).__module__.partition(".")[0]
    return package in _HOLDING and not isinstance(value, (type, ModuleType))
