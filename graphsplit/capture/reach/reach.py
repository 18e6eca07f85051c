"""All that holds Python state and that a piece of code leads to.

Reached are: globals that code names, cells, defaults, what is bound, attributes of objects and of
classes, items of containers, and what these lead to. Not reached: libraries, and what lies in
files, in other processes or in extensions written in C.
"""

from __future__ import annotations

import array
import builtins
import collections
import copy
import ctypes
import functools
import operator
import random
import re
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from graphsplit.capture.reach.contents import (
    MAX_COPIED,
    NOTHING,
    attributes_in,
    content_of,
    held_in,
    is_iterator,
    octets_in,
    position_of,
    refill,
    refuse_large,
    refuse_used,
    set_attributes,
    set_items,
    set_slots,
    set_state,
)
from graphsplit.capture.reach.holders import NUMPYS, PYTHONS, ByValue, Holder, at_place, weakly
from graphsplit.capture.reach.names import CodeNames, modules_in, names_in
from graphsplit.guards.classes import slots_of
from graphsplit.guards.code_facts import HUNG_THERE, is_hung
from graphsplit.guards.hidden import FIELDS, TELLING, can_set, hidden_places, kept_fields, told_by
from graphsplit.guards.places import Place, PlaceKind
from graphsplit.guards.values import BY_VALUE, IN_C
from graphsplit.torch_ext.attributes import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    MODULES,
    TABLES,
    code_of_scripted,
    in_cplusplus,
    writes_of,
)
from graphsplit.torch_ext.private import FakeTensor, ScriptMethod, ScriptModule

_LIBRARIES = sys.stdlib_module_names - {"__main__"} | {
    *("torch", "numpy", "sympy", "mpmath", "einops", "graphsplit", "_pytest")
}
_ATOMS = (type(None), *BY_VALUE)
# Of libraries' classes: what users keep values in, and what counts its draws.
_OF_LIBRARIES = (
    types.SimpleNamespace,
    torch.quasirandom.SobolEngine,
    torch.distributions.Distribution,
    torch.distributions.Transform,
)
_STEPPED = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
_BUILTINS = frozenset(vars(builtins))
_MODULE_OWN = frozenset(nn.Module().__dict__) - {"training"}
_BACKWARD = ("backward", "vjp")
_ALL = slice(None)
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
# What another thread changes meanwhile is not put back: it would wait for ever.
_OF_THREADS = frozenset(("threading", "concurrent", "asyncio", "multiprocessing", "subprocess"))
_SHOWN = (threading.local, threading.Event, threading.Semaphore, *TELLING)  # but for these
_HOOKING = frozenset(
    ("register_hook", "register_full_backward_hook", "register_full_backward_pre_hook")
)


def holders(roots: Iterable[Any], apart: Iterable[Any] = ()) -> tuple[list[Holder], list[Any]]:
    """All that holds state and that some values lead to.

    Args:
        roots: The values.
        apart: What they lead to that is not to be followed.

    Returns:
        What holds state; and the code found on the way that runs only in backward, not followed.
    """
    return Walk(apart).run(roots)


class Walk:
    """Goes from value to value.

    Attributes:
        most: How many holders to find; then what is near comes first. None: all.
        seen: All that was met, by identity.
    """

    most: int | None = None

    def __init__(self, apart: Iterable[Any]) -> None:
        self._found: list[Holder] = []
        self._in_backward: list[Any] = []
        # Holds what it names, so that no other gets its number.
        self.seen: dict[int, Any] = {id(value): value for value in apart}
        self._num_apart, self._stored = len(self.seen), frozenset[str]()
        self._waiting, self._visited = collections.deque[tuple[Any, str]](), None

    def run(self, roots: Iterable[Any]) -> tuple[list[Holder], list[Any]]:
        """All that holds state from the roots on, and code that runs only in backward."""
        for root in roots:
            self._push(root, getattr(root, "__qualname__", type(root).__name__))
        while self._waiting and (self.most is None or len(self._found) < self.most):
            take = self._waiting.pop if self.most is None else self._waiting.popleft
            self._visited, name = take()
            self._visit(self._visited, name)
        for value in list(self.seen.values())[self._num_apart :] if self._stored else ():
            self._hold_fields(value)
        return self._found, self._in_backward

    def _push(self, value: Any, name: str) -> None:
        if isinstance(value, _ATOMS) or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        self._waiting.append((value, name))

    def _hold(
        self, thing: Any, name: str, read: Callable[[], Any], write: Callable[[Any], None]
    ) -> None:
        self._found.append(Holder(thing, name, read, write, of=self._visited))

    def _hold_fields(self, value: Any) -> None:
        """Hold what Python itself keeps of a value, and code sets: ``f.__defaults__ = (1,)``."""
        for place in kept_fields(value, self._stored):
            self._hold_field(place)

    def _hold_field(self, place: Place) -> None:
        self._hold(("global", id(place.holder), place.key), place.label, *at_place(place))

    def _hold_value(
        self, thing: Any, name: str, read: Callable[[], Any], write: Callable[[Any], None]
    ) -> None:
        def look() -> ByValue:
            found = read()
            return ByValue(octets_in(found), found)

        self._hold(thing, name, look, lambda noted: write(noted.kept))

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, FakeTensor):  # what is written to it on fake tensors is lost
                self._hold(value, name, lambda: writes_of(value), lambda _: None)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self._push(value.__self__, name)
            self._push(value.__func__, name)
        elif isinstance(value, types.BuiltinMethodType):
            if not isinstance(value.__self__, types.ModuleType):
                self._push(value.__self__, name)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, value.keywords):
                self._push(part, name)
            self._visit_attributes(value, name)
        elif isinstance(value, (staticmethod, classmethod)):
            self._push(value.__func__, name)
        elif isinstance(value, property):
            for function in (value.fget, value.fset):
                self._push(function, name)
        elif isinstance(value, weakref.ReferenceType):
            if isinstance(inner := value(), nn.Module):  # all else the script may let go of
                self._push(inner, name)
        elif isinstance(value, types.CellType):
            self._visit_cell(value, name)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, functools._lru_cache_wrapper):
            clear = value.cache_clear
            holder = Holder(value, name, value.cache_info, lambda _: clear(), decides=False)
            self._found.append(holder)
            self._push(value.__wrapped__, name)
        elif not self._visit_generator(value, name) and not self._visit_container(value, name):
            self._visit_object(value, name)

    def _visit_function(self, function: types.FunctionType) -> None:
        if is_of_library(function.__module__):
            # Of a library: only what the user has handed it; what records him leads to all he has.
            records = str(function.__module__).startswith("graphsplit.guards.")
            cells: Iterable[Any] = function.__closure__ or ()
            for cell in cells:
                if not records or isinstance(content_of(cell), types.FunctionType):
                    self._push(cell, function.__qualname__)
            return
        if function.__defaults__ is not None:
            label = f"the defaults of {function.__qualname__}"
            self._hold_field(Place(PlaceKind.FIELD, function, "__defaults__", label))
        for value in function.__defaults__ or ():
            self._push(value, f"a default of {function.__qualname__}")
        if function.__kwdefaults__ is not None:
            self._visit_dict(function.__kwdefaults__, f"a default of {function.__qualname__}")
        code = function.__code__
        names = names_in(code)
        self._stored |= names.stored & FIELDS
        for cell, cell_name in zip(function.__closure__ or (), code.co_freevars, strict=False):
            self._push(cell, cell_name)
            if isinstance(module := content_of(cell), types.ModuleType):
                self._visit_module(module, names)
        # An empty dictionary may get entries.
        self._visit_dict(vars(function), f"an attribute of {function.__qualname__}")
        if not _HOOKING.isdisjoint(names.every):  # what it registers runs in backward
            self._in_backward.append(function)
        held = function.__globals__
        self._visit_names(held, names.globals, names)
        if "globals" in names.every:
            self._visit_names(held, (names.every | names.texts) & held.keys(), names)
        for module in modules_in(names, held):
            self._visit_module(module, names)

    def _visit_names(self, held: dict[str, Any], names: frozenset[str], inner: CodeNames) -> None:
        # In an order that all workers share.
        own = sorted(n for n in names if n in held or n not in _BUILTINS)
        for name in own:
            self._hold_global(held, name)
        for name in own:
            if name not in held and name in vars(builtins):  # the script has put it there
                self._visit_names(vars(builtins), frozenset((name,)), inner)
            value = held.get(name)
            if isinstance(value, types.ModuleType):
                self._visit_module(value, inner)
            else:
                self._push(value, name)

    def _hold_global(self, held: dict[str, Any], name: str) -> None:
        def write(noted: tuple[Any]) -> None:
            if noted[0] is NOTHING:
                held.pop(name, None)
            else:
                held[name] = noted[0]

        label = f"the global {name!r} of {held.get('__name__', 'a module')}"
        decides = not isinstance(held.get(name), _CODE)
        key = ("global", id(held), name)
        self._found.append(
            Holder(key, label, lambda: (held.get(name, NOTHING),), write, decides=decides)
        )

    def _visit_module(self, module: types.ModuleType, names: CodeNames) -> None:
        if module is random:
            self._push(PYTHONS, "Python's module random")
        elif module is np.random or (module is np and "random" in names.every):
            self._push(NUMPYS, "numpy.random")
        held, of_library = vars(module), is_of_library(module.__name__)
        if of_library:  # values of the script's, which it has put there
            asked = names.every & held.keys()
            own = frozenset(n for n in asked if type(held[n]) in HUNG_THERE or is_hung(held[n]))
            self._visit_names(held, own, names)
        elif id(module) not in self.seen:
            self.seen[id(module)] = module
            asked = (names.every | names.texts) & held.keys()
            self._visit_names(held, asked | names.stored & names.every, names)

    def _visit_cell(self, cell: types.CellType, name: str) -> None:
        def read() -> Any:
            return (content_of(cell), None)

        def write(noted: tuple[Any, None]) -> None:
            if noted[0] is NOTHING:
                del cell.cell_contents
            else:
                cell.cell_contents = noted[0]

        self._hold(cell, name, read, write)
        if (content := content_of(cell)) is not NOTHING:
            self._push(content, name)

    def _visit_class(self, kind: type) -> None:
        if is_of_library(kind.__module__):
            return

        def read() -> dict[str, Any]:
            return {n: v for n, v in list(vars(kind).items()) if not n.startswith("__")}

        def write(noted: dict[str, Any]) -> None:
            for name in read().keys() - noted.keys():
                delattr(kind, name)
            for name, value in noted.items():
                if vars(kind).get(name, NOTHING) is not value:
                    setattr(kind, name, value)

        self._hold(kind, f"class {kind.__qualname__}", read, write)
        self._push(type(kind), f"the class of {kind.__qualname__}")
        backward = _BACKWARD if issubclass(kind, torch.autograd.Function) else ()
        self._in_backward += [vars(kind)[name] for name in backward if name in vars(kind)]
        for name, value in list(vars(kind).items()):
            is_code = isinstance(value, types.FunctionType)
            if name not in backward and (is_code or not name.startswith("__")):
                self._push(value, f"{kind.__qualname__}.{name}")
        for base in kind.__bases__:
            self._push(base, base.__qualname__)

    def _visit_generator(self, value: Any, name: str) -> bool:
        """Generators of random numbers, and iterators."""
        if isinstance(value, random.Random):
            name = "Python's module random" if value is PYTHONS else name
            self._hold_value(value, name, value.getstate, value.setstate)
        elif isinstance(value, torch.Generator):
            self._hold_value(value, name, value.get_state, lambda s: set_state(value, s))
        elif isinstance(value, np.random.RandomState):
            name = "numpy.random" if value is NUMPYS else name
            read = functools.partial(value.get_state, legacy=False)
            self._hold_value(value, name, read, value.set_state)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._hold_value(value, name, lambda: bits.state, lambda s: setattr(bits, "state", s))
        elif is_iterator(value):
            self._hold(value, name, lambda: position_of(value), lambda s: refuse_used(name))
        else:
            return False
        return True

    def _visit_container(self, value: Any, name: str) -> bool:
        if isinstance(value, dict):
            self._visit_dict(value, name)
        elif isinstance(value, list):
            self._hold(value, name, lambda: list(value), lambda s: operator.setitem(value, _ALL, s))
        elif isinstance(value, IN_C):
            where, size = ctypes.addressof(value), ctypes.sizeof(value)
            read = functools.partial(ctypes.string_at, where, size)
            self._hold_value(value, name, read, lambda s: _copy(where, s))
        elif isinstance(value, (bytearray, array.array)):
            self._hold_value(
                value, name, lambda: value[:], lambda s: operator.setitem(value, _ALL, s)
            )
        elif isinstance(value, collections.deque):
            self._hold(value, name, lambda: list(value), lambda s: refill(value, s))
        elif isinstance(value, set):
            self._hold(value, name, lambda: frozenset(value), lambda s: refill(value, s))
        elif isinstance(value, np.ndarray):
            self._visit_array(value, name)
        elif not isinstance(value, (tuple, frozenset)):
            return False
        if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            for item in value:
                self._push(item, name)
        self._visit_attributes(value, name)
        return True

    def _visit_array(self, value: np.ndarray[Any, Any], name: str) -> None:
        if value.dtype == object:
            for item in value.flat:
                self._push(item, name)
            self._hold(value, name, lambda: list(value.flat), lambda s: set_items(value, s))
        elif value.nbytes <= MAX_COPIED:
            self._hold_value(value, name, value.copy, lambda s: np.copyto(value, s))
        else:
            self._hold(
                value, name, lambda: zlib.crc32(value.tobytes()), lambda _: refuse_large(name)
            )

    def _visit_dict(self, value: dict[Any, Any], name: str, of: Any = None) -> None:
        """Visit a dictionary; that of an object's attributes, which may be given another one."""
        self._hold_dict(value, name, of)
        for key, item in held_in(value).items():
            self._push(key, name)
            self._push(item, f"{name}[{key!r}]" if isinstance(key, (str, int)) else name)

    def _visit_object(self, value: Any, name: str) -> None:
        kind = type(value)
        if isinstance(value, torch.jit.ScriptModule):
            self._visit_scripted(in_cplusplus(value), name)
        elif isinstance(value, (ScriptMethod, ScriptModule)):
            self._visit_scripted(getattr(value, "owner", value), name)
        if isinstance(value, nn.Module):
            self._visit_nn_module(value, name)
        elif not is_of_library(kind.__module__) or issubclass(kind, _OF_LIBRARIES):
            self._visit_attributes(value, name)
        elif isinstance(value, _STEPPED) and self.most is None:
            self._visit_stepped(value, name)
        else:
            self._visit_hidden(value, name)
        self._push(kind, kind.__qualname__)

    def _visit_stepped(self, value: Any, name: str) -> None:
        """An optimizer of the code's own, for a trial: that of a Model changes with each step."""
        walk = Walk(self.seen.values())
        walk._visit_attributes(value, name)
        for holder in walk.run(())[0]:
            if not holder.is_tensor:
                holder.decides, holder.is_stepped = False, True
                self._found.append(holder)

    def _visit_hidden(self, value: Any, name: str) -> None:
        """Visit what the user keeps in an object of Python's own: a queue, a context variable."""
        package = str(type(value).__module__).partition(".")[0]
        if package in _OF_THREADS and not isinstance(value, _SHOWN):
            return
        if isinstance(value, TELLING) and not can_set(value):  # others take and put, too
            if self.most is None:
                self._hold(value, name, lambda: told_by(value), lambda s: refuse_used(name))
            return
        for place in hidden_places(value, name):
            if place.kind is PlaceKind.ITSELF:
                self._push(place.holder, name)
                continue
            is_variable = place.kind is PlaceKind.CONTEXT
            thing = value if is_variable else ("global", id(place.holder), place.key)
            self._hold(thing, place.label, *at_place(place))
            self._push(place.read(), place.label)

    def _visit_nn_module(self, module: nn.Module, name: str) -> None:
        label = type(module).__name__
        held = vars(module)
        self._hold_dict(held, f"an attribute of {label}")
        for kind in (*TABLES, *FORWARD_HOOKS, *BACKWARD_HOOKS):
            if isinstance(held.get(kind), dict):  # a scripted module has others, of its own
                self._hold_dict(held[kind], f"{label}.{kind}")
        for attribute, value in list(held.items()):
            if attribute not in _MODULE_OWN:
                self._push(value, f"{label}.{attribute}")
        for kind in BACKWARD_HOOKS:
            self._in_backward += (held.get(kind) or {}).values()
        for kind in (MODULES, *FORWARD_HOOKS):
            for inner in list((held.get(kind) or {}).values()):
                self._push(inner, f"{label}.{kind}")

    def _hold_dict(self, value: dict[Any, Any], name: str, of: Any = None) -> None:
        owner = weakly(of)
        read = lambda: attributes_in(owner(), value)  # noqa: E731
        self._hold(value, name, read, lambda noted: set_attributes(owner(), value, noted))

    def _visit_attributes(self, value: Any, name: str) -> None:
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):  # an empty one may get entries
            self._visit_dict(held, f"an attribute of {type(value).__name__}", value)
        of_users = (
            s for s in slots_of(type(value)) if not is_of_library(s.__objclass__.__module__)
        )
        slots = [slot.__name__ for slot in of_users]
        if slots:
            self._hold(
                value,
                f"an attribute of {type(value).__name__}",
                lambda: {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)},
                lambda noted: set_slots(value, slots, noted),
            )
            for slot in slots:
                self._push(getattr(value, slot, None), f"{type(value).__name__}.{slot}")

    def _visit_scripted(self, module: Any, name: str) -> None:
        if id(module) in self.seen:
            return
        self.seen[id(module)] = module
        code = code_of_scripted(module)
        names = [n for n in dict.fromkeys(re.findall(r"\b\w+\.(\w+)", code)) if module.hasattr(n)]
        values = {n: module.getattr(n) for n in names}
        for value in values.values():
            if isinstance(value, ScriptModule):
                self._visit_scripted(value, name)
        kept = [n for n, value in values.items() if isinstance(value, _SCRIPTED)]
        if kept:

            def write(values: dict[str, Any]) -> None:
                for attribute, value in values.items():
                    module.setattr(attribute, value)

            self._hold_value(
                module,
                f"an attribute of {name} (scripted)",
                lambda: {n: copy.deepcopy(module.getattr(n)) for n in kept},
                write,
            )


_SCRIPTED = (bool, int, float, str, list, dict, tuple)


def _copy(where: int, octets: bytes) -> None:
    ctypes.memmove(where, octets, len(octets))


def is_of_library(module: Any) -> bool:
    """Whether code in a module is no user's; classes of some extensions name none."""
    return not isinstance(module, str) or module.partition(".")[0] in _LIBRARIES
