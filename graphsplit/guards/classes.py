"""Step between a class and its attributes for a while, to see them read and written."""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import (
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any

import torch
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from graphsplit.frames import is_users
from graphsplit.guards.values import MISSING
from graphsplit.torch_ext.fake_caches import freeze_what_is_there

# Packages that torch itself calls while it records.
_BELOW_TORCH = frozenset(
    (
        "_distutils_hack",
        "filelock",
        "fsspec",
        "jinja2",
        "mpmath",
        "networkx",
        "numpy",
        "optree",
        "packaging",
        "pkg_resources",
        "pybind11_builtins",
        "setuptools",
        "sympy",
        "typing_extensions",
    )
)
HOOKED_METHODS = ("__getattribute__", "__setattr__", "__delattr__")
_HEAP_TYPE = 1 << 9
_MARK = "_graphsplit_sees"
# Classes of Python's own in which users keep values of theirs.
_HOLDERS = (argparse.Namespace, collections.UserDict, collections.UserList)
# Of PyTorch's classes: forward may look at the learning rate, or enter an autocast that it keeps;
# a prior that a module holds may be given another scale, a hook another number of iterations, and
# a data set other tensors.
_OF_TORCH = (
    torch.autocast,
    torch.distributions.Distribution,
    torch.distributions.Transform,
    torch.utils.data.Dataset,
    SpectralNorm,
    WeightNorm,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)


@dataclass(frozen=True)
class Hooks:
    """Functions to call.

    Attributes:
        read: ``read(object, name, value)``; ``MISSING`` where there is no such attribute.
        write: ``write(object, name)``, before it is assigned or deleted.
        replaced: ``replaced()``, when that has given an object another dictionary of attributes.
        seen: Objects and names of which ``read`` has no more to know; it is not called for them.
    """

    read: Callable[[Any, str, Any], None]
    write: Callable[[Any, str], None]
    replaced: Callable[[], None]
    seen: Mapping[tuple[int, str], Any]


def is_watchable(kind: type) -> bool:
    """Whether a class is the user's, or one in which users keep values."""
    if not kind.__flags__ & _HEAP_TYPE or issubclass(kind, (torch.Tensor, torch.fx.Proxy)):
        return False
    name: Any = kind.__module__
    if not isinstance(name, str):  # what it gives of an instance; of Cython's functions
        return not isinstance(name, GetSetDescriptorType)
    if kind.__module__ == "__main__" or issubclass(kind, (*_HOLDERS, *_OF_TORCH)):
        return True
    if kind.__module__ == "builtins":
        return "__module__" in vars(kind)  # of code that exec was given, with no name for it
    module = sys.modules.get(kind.__module__)
    return is_made_by_hand(kind.__module__) if module is None else is_watchable_module(module)


def is_plain_class(kind: type) -> bool:
    """Whether all that objects of a class consist of are attributes, in a dictionary or slots."""
    *own, last = kind.__mro__
    return last is object and all(k.__flags__ & _HEAP_TYPE for k in own)


def is_watchable_of_tensors(kind: type) -> bool:
    """Whether a class is one that a user derives from those of tensors."""
    module = sys.modules.get(kind.__module__)
    return issubclass(kind, torch.Tensor) and module is not None and is_watchable_module(module)


def is_hung_on(value: Any) -> bool:
    """Whether a script has hung this on a class that is not its own: ``nn.Linear.gain = 2.0``."""
    if isinstance(value, FunctionType):
        return is_users(value.__code__.co_filename)
    return not hasattr(type(value), "__get__")


def is_watchable_module(module: ModuleType) -> bool:
    """Whether a module may hold values of the user's."""
    file, name = getattr(module, "__file__", None), module.__name__
    if isinstance(file, str):
        return is_watched_file(file)
    is_imported = getattr(module, "__spec__", None) is not None or type(module) is not ModuleType
    return name == "__main__" or (not is_imported and is_made_by_hand(name))


def is_made_by_hand(name: str) -> bool:
    """Whether a module has a name, or would have it, that no import has given."""
    package = name.partition(".")[0]
    root = sys.modules.get(package)
    return package not in _BELOW_TORCH and (
        root is None or getattr(root, "__file__", getattr(root, "__spec__", None)) is None
    )


@functools.lru_cache(maxsize=4096)
def is_watched_file(file: str) -> bool:
    """Whether a file's code may read values of the user's: not that of what torch stands on."""
    if not is_users(file):
        return False
    _, is_installed, package = file.rpartition("site-packages/")
    return not is_installed or package.partition("/")[0].removesuffix(".py") not in _BELOW_TORCH


def is_watched_code(code: CodeType, held: dict[str, Any]) -> bool:
    """Whether code may read values of the user's; made by ``exec`` it may, too.

    Args:
        code: The code.
        held: Its globals.
    """
    file = code.co_filename
    if not file.startswith("<"):
        return is_watched_file(file)
    if file.startswith(("<frozen", "<eval_with_key")):
        return False
    name, of_globals = held.get("__name__"), held.get("__file__")
    if isinstance(of_globals, str):
        return is_watched_file(of_globals)
    return name is None or name == "__main__" or is_made_by_hand(name)


_frozen: weakref.WeakSet[FunctionType] = weakref.WeakSet()  # the user's; gc does not find them


def freeze_all() -> None:
    """``gc.freeze``, after which functions and caches are found as before."""
    found = (one for one in gc.get_objects() if type(one) is FunctionType)
    _frozen.update(f for f in found if is_watched_code(f.__code__, f.__globals__))
    freeze_what_is_there()


def functions_of(code: CodeType) -> Iterator[FunctionType]:
    """The functions that run some code, whatever holds them."""
    for one in (*_frozen, *gc.get_referrers(code)):
        if isinstance(one, FunctionType) and one.__code__ is code:
            yield one


def own_dictionary(one: Any) -> dict[str, Any] | None:
    """The dictionary of an object's attributes, if it has one."""
    try:
        held = object.__getattribute__(one, "__dict__")
    except AttributeError:
        return None
    return held if type(held) is dict else None


def number_of(one: Any) -> int:
    """The identity of an object's dictionary of attributes; its own where it has none."""
    held = own_dictionary(one)
    return id(one if held is None else held)


def attributes_of(one: Any) -> dict[str, Any] | None:
    """All attributes of an object: its dictionary, or a new one where it has slots besides."""
    held, slots = own_dictionary(one), slots_of(type(one))
    if not slots:
        return held
    found = dict(held or {})
    for slot in slots:
        with suppress(AttributeError):  # nothing is in it
            found[slot.__name__] = slot.__get__(one)
    return found


def slots_of(kind: type) -> list[MemberDescriptorType]:
    """The descriptors of a class's slots, and of those that it inherits.

    Classes of extensions have the like of them, which may be read-only, and name no slots.
    """
    made = [one for one in kind.__mro__ if one.__flags__ & _HEAP_TYPE and "__slots__" in vars(one)]
    held = (value for one in made for value in vars(one).values())
    return [value for value in held if type(value) is MemberDescriptorType]


def put_attributes(one: Any, attributes: Mapping[str, Any]) -> None:
    """Let an object have attributes, whatever its class makes of that."""
    held = own_dictionary(one)
    for name, value in attributes.items():
        slot = slot_of(type(one), name)
        if slot is not None:
            slot.__set__(one, value)
        elif held is not None:
            held[name] = value


class OwnDictionaries:
    """The dictionaries of attributes that objects have; code may give one another dictionary.

    So does ``one.__dict__ = {...}``, and each attribute that pydantic checks when it is assigned.
    """

    def __init__(self) -> None:
        self._known: list[tuple[Any, dict[str, Any]]] = []

    def add(self, one: Any) -> None:
        """Note that of an object."""
        held = own_dictionary(one)
        if held is not None:
            self._known.append((one, held))

    def put_back(self, note: Callable[[Any, dict[str, Any], str], None]) -> None:
        """Let each object have its own again, which holds what is in the other one.

        Args:
            note: Given the object, its own dictionary as it was, and a name in either.
        """
        for one, held in self._known:
            now = own_dictionary(one)
            if now is not None and now is not held:
                for name in {**held, **now}:
                    note(one, held, name)
                held.clear()
                held.update(now)
                object.__setattr__(one, "__dict__", held)

    def clear(self) -> None:
        """Hold no object any more."""
        self._known.clear()


class HookedClasses:
    """Classes whose instances call hooks at each read and write of an attribute.

    Args:
        hooks: What to call.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._before: dict[type, dict[str, Any]] = {}
        self._replaced: dict[type, dict[str, Any]] = {}

    def add(self, kind: type) -> None:
        """Hook a class, unless a class that it inherits from is; one that is fixed stays so.

        That of classes stays as well: what is read of a class is seen without.
        """
        if issubclass(kind, type) or _is_hooked(kind):
            return
        hooks = (
            _reading(kind.__getattribute__, self._hooks),
            _writing(kind.__setattr__, self._hooks),
            _writing(kind.__delattr__, self._hooks),
        )
        replacements = dict(zip(HOOKED_METHODS, hooks, strict=True))
        before = {name: vars(kind).get(name, MISSING) for name in replacements}
        try:
            _set_all(kind, replacements)
        except TypeError:  # made in C, and immutable
            return
        self._before[kind], self._replaced[kind] = before, replacements

    def has_own_way(self, kind: type) -> bool:
        """Whether a class of the user's, hooked here, says itself how instances are read."""
        before = (self._before.get(base, {}) for base in kind.__mro__)
        return any(own.get("__getattribute__", MISSING) is not MISSING for own in before)

    def remove(self) -> None:
        """Let all classes be as they were."""
        for kind, before in self._before.items():
            _set_all(kind, before)
        self._before.clear()

    @contextmanager
    def lifted_off(self) -> Iterator[None]:
        """Let all classes be as they were, for a while."""
        hooked = list(self._before)
        for kind in hooked:
            _set_all(kind, self._before[kind])
        try:
            yield
        finally:
            for kind in hooked:
                _set_all(kind, self._replaced[kind])


def _is_hooked(kind: type) -> bool:
    """Whether what is read of instances is seen: a class's own way may pass by its base's."""
    return hasattr(kind.__getattribute__, _MARK) and hasattr(kind.__setattr__, _MARK)


def _set_all(kind: type, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is not MISSING:
            type.__setattr__(kind, name, value)
        elif name in vars(kind):
            type.__delattr__(kind, name)


def _reading(original: Any, hooks: Hooks) -> Any:
    read, write, seen = hooks.read, hooks.write, hooks.seen

    def __getattribute__(self: Any, name: str) -> Any:
        if (id(self), name) in seen:
            return original(self, name)
        if _is_kept_when_read(self, name):
            read(self, name, MISSING)
            write(self, name)
        try:
            value = original(self, name)
        except AttributeError:
            read(self, name, MISSING)
            raise
        read(self, name, value)
        return value

    setattr(__getattribute__, _MARK, True)
    return __getattribute__


def _is_kept_when_read(one: Any, name: str) -> bool:
    """Whether reading an attribute writes it: ``functools.cached_property`` passes by setting."""
    for kind in type(one).__mro__:
        if name in vars(kind):
            found = vars(kind)[name]
            return isinstance(found, functools.cached_property) and name not in (
                own_dictionary(one) or ()
            )
    return False


def _writing(original: Any, hooks: Hooks) -> Any:
    def write_attribute(self: Any, name: str, *value: Any) -> None:
        held = own_dictionary(self)
        hooks.write(self, name)
        original(self, name, *value)
        if own_dictionary(self) is not held:
            hooks.replaced()

    setattr(write_attribute, _MARK, True)
    return write_attribute


def slot_of(kind: type, name: str) -> Any:
    """The descriptor of a slot, if a class has one of this name."""
    for one in kind.__mro__:
        found = vars(one).get(name)
        if type(found) is MemberDescriptorType:
            return found
    return None


_passed: dict[int, CodeType] = {}  # code of files that are not watched; held, as modules hold it


def tracing(
    ran: Callable[[CodeType, dict[str, Any]], None], imported: Callable[[str], None]
) -> Callable[..., Any]:
    """A trace function that tells of the user's functions; of others as quickly as it can."""
    passed = _passed

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if id(code) in passed:
            return None
        if event == "exception":
            return trace
        if is_watched_code(code, frame.f_globals):
            spec = frame.f_globals.get("__spec__") if code.co_name == "<module>" else None
            if event == "call" and getattr(spec, "_initializing", False):  # no exec: that is code
                frame.f_trace_lines = False
                return trace  # what an import runs has its values when it returns
            ran(code, frame.f_globals)
        elif code is importlib.import_module.__code__:
            name, package = frame.f_locals["name"], frame.f_locals["package"]
            imported(importlib.util.resolve_name(name, package))
        elif not code.co_filename.startswith("<"):
            passed[id(code)] = code
        return None

    return trace
