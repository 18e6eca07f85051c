"""Follow the values that code reads to all that can be read through them, and note what was there.

A function leads to its cells and defaults, a container to what it holds, an object to its class.
The attributes of classes, modules and functions are noted by the names that code uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from graphsplit.frames import is_own, where_defined
from graphsplit.guards.classes import (
    HOOKED_METHODS,
    HookedClasses,
    OwnDictionaries,
    attributes_of,
    is_plain_class,
    is_watchable,
    is_watchable_module,
    is_watchable_of_tensors,
    is_watched_file,
    number_of,
    own_dictionary,
    slots_of,
)
from graphsplit.guards.code_facts import Item, facts_of
from graphsplit.guards.hidden import (
    class_places,
    held_in,
    hidden_places,
    hidden_values,
    weak_place,
)
from graphsplit.guards.places import Place, PlaceKind, cell, entry, inside, itself, named_place
from graphsplit.guards.values import (
    BUFFERS,
    BY_VALUE,
    CONTAINERS,
    MISSING,
    SYMBOLIC,
    Frozen,
    any_leaf,
    freeze,
    is_mapping,
    with_leaves,
)
from graphsplit.torch_ext.attributes import (
    ALL_HOOKS,
    CALLS,
    FLAT_WEIGHTS,
    NOT_SAVED,
    TABLES,
    writes_of,
)
from graphsplit.torch_ext.private import FakeTensor, disable_current_modes
from graphsplit.torch_ext.stand_ins import StandIn

_ATOMS = frozenset((type(None), *BY_VALUE))
# Those that users hardly hide by an attribute; of ``forward`` others take care.
_OF_MODULES = frozenset(name for name in vars(nn.Module) if name.startswith("_")) | {"forward"}
WITHOUT_VALUES = (*SYMBOLIC, FakeTensor)
# What a function has that is no entry of its dictionary, and that code asks for by name.
_TOLD_BY_FUNCTIONS = frozenset(("__doc__", "__annotations__", "__name__", "__qualname__"))
_CALLABLES = (
    MethodType,
    BuiltinFunctionType,
    functools.partial,
    staticmethod,
    classmethod,
    property,
    functools._lru_cache_wrapper,
)


@dataclass
class Noted:
    """A place that was read or written, and what was there first.

    Attributes:
        place: The place.
        first: The snapshot of its first value.
        is_read: Whether it was read before it was written.
        is_whole: Whether a container there was taken for more than one entry.
        is_written: Whether it was seen to be written.
        uses: For each part of the step in which it was used: whether it was read there first.
        is_read_behind: Whether it is read behind a call kept whole, which may have changed it.
    """

    place: Place
    first: Any
    is_read: bool = True
    is_whole: bool = True
    is_written: bool = False
    uses: dict[int, bool] = field(default_factory=dict)
    is_read_behind: bool = False

    @property
    def is_timed(self) -> bool:
        """Whether it is known when it was written."""
        return self.is_written and bool(self.uses)


class ValueVisitor:
    """The values that were met, and the places through which they were.

    Args:
        root: The module that holds the network and the loss.
        labels: The name for people of the module at a path: ``net.fc``.
        classes: Classes of objects that are met are added to these.
        real_of: Gives for what stands for a tensor that is kept in a place the tensor itself, for
            anything else that.

    Attributes:
        noted: Every place, in the order of first use.
        part: The number of the part of the step that is recorded.
        containers: What each container held when it was first met, by identity: forward may have
            changed it since, wherever it is by now.
        tensors: Tensors that were met and that are no state of ``root``.
        values: Those of them that torch computes with for real, with their values.
        tables: Every module, its path and its name for people, by the identity of its dictionary:
            while torch records, others stand for modules.
        executed: The code that has run, with its globals, by identity.
        names: The attributes that this code uses.
        special: Names of special methods (``__call__``) whose code has run.
        special_of: The names of special methods that a piece of code is of.
        touched: Every module that was read, and every object of the user's classes that was met,
            by the identity of its dictionary (or its own): their classes count.
        dictionaries: Those of such objects.
        weakly_met: Identities of dictionaries of objects that weak references led to.
        named: Classes, modules and functions whose attributes are noted by name, each with those
            that it had when it was met.
        passes_by: Whether code asks objects for attributes past their classes.
        looks_into: Whether code asks functions what they consist of.
        on_first: Called with each place that is noted, and the snapshot of what was there.
    """

    def __init__(
        self,
        root: nn.Module,
        labels: Callable[[str], str],
        classes: HookedClasses,
        real_of: Callable[[Any], Any],
    ) -> None:
        self.noted: dict[Any, Noted] = {}
        self.part = 0
        self.containers: dict[int, Frozen] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.tables: dict[int, tuple[nn.Module, str | None, str]] = {
            id(vars(m)): (m, path, labels(path)) for path, m in root.named_modules()
        }
        self.executed: dict[tuple[int, int], Any] = {}
        self.names: set[str] = set()
        self.special: set[str] = set()
        self.special_of: dict[int, set[str]] = {}
        self.touched: dict[int, Any] = {}
        self.named: list[tuple[Any, str, frozenset[str]]] = []
        self.functions: dict[int, list[FunctionType]] = {}
        self.met: dict[int, tuple[Any, str]] = {}
        self.weakly_met: set[int] = set()
        self.made: dict[int, Any] = {}  # objects that forward has made
        self.dictionaries = OwnDictionaries()
        self.passes_by = self.looks_into = False
        self.on_first: Callable[[Place, Any], object] = lambda place, first: None
        self._classes = classes
        self.real_of = real_of
        self._state = {id(t) for t in (*root.parameters(), *root.buffers())}

    # Noting.

    def note_read(self, place: Place, items: tuple[Item, ...] | None = None) -> bool:
        """Note a read of a value, or of some of its items; whether all of it was read."""
        value = place.read()
        is_whole = items is None or not all(_is_asked_for(value, item) for item in items)
        self.note(place, is_whole=is_whole)
        outer = self.containers.get(id(value))
        for item in () if is_whole else items or ():
            inner = inside(value, item.key, place)
            if inner.identity not in self.noted and outer is not None:
                self._note_first(inner, _item_of(outer, item.key), is_whole=False)
            self.note_read(inner, (item.then,) if item.then is not None else None)
            self.meet(inner.read(), inner.label)
        return is_whole

    def note(self, place: Place, *, is_read: bool = True, is_whole: bool = True) -> None:
        """Note a place, with what is there, unless it was noted before."""
        if place.identity not in self.noted:
            first = self._as_met(freeze(place.read()))
            self._note_first(place, first, is_read=is_read, is_whole=is_whole)
        known = self.noted[place.identity]
        known.is_whole |= is_whole
        known.uses.setdefault(self.part, is_read)

    def _note_first(
        self, place: Place, first: Any, *, is_read: bool = True, is_whole: bool = True
    ) -> None:
        if any_leaf(first, _has_no_value):
            first = with_leaves(first, self.real_of)
        if any_leaf(first, _has_no_value):
            is_read = False
        self.on_first(place, first)
        self.noted[place.identity] = Noted(place, first, is_read, is_whole)

    def _as_met(self, frozen: Any) -> Any:
        """A snapshot in which containers that were met before hold what they held then."""
        if not isinstance(frozen, Frozen):
            return frozen
        if id(frozen.container) not in self.containers:
            items = tuple([self._as_met(item) for item in frozen.items])
            self.containers[id(frozen.container)] = replace(frozen, items=items)
        return self.containers[id(frozen.container)]

    def put_values_back(self) -> None:
        """Give the tensors that torch has computed with for real their values."""
        with torch.no_grad():
            for tensor, value in self.values:
                if writes_of(tensor) and not torch.equal(tensor, value):
                    tensor.copy_(value)

    def let_go(self) -> None:
        """Hold no object any more that was met: the script may let go of it."""
        self.dictionaries.clear()
        for held in (self.met, self.touched, self.made, self.tensors, self.containers):
            held.clear()

    def has_made(self, one: Any) -> bool:
        """Whether code has made an object; modules, classes, functions and tensors aside.

        One that was made unseen (a frozen data class) is known by the tensors that it holds.
        """
        attributes = attributes_of(one)
        if attributes is None or isinstance(
            one, (nn.Module, type, FunctionType, Enum, torch.Tensor)
        ):
            return False
        number = number_of(one)
        if number not in self.made and is_plain_class(type(one)):
            is_new = any_leaf(
                freeze(attributes), lambda t: _has_no_value(t) and self.real_of(t) is t
            )
            self.made.update({number: one} if is_new else {})
        return number in self.made

    # Meeting values.

    def meet(self, value: Any, label: str) -> None:
        """Watch what can be read through a value."""
        if type(value) in _ATOMS or isinstance(value, WITHOUT_VALUES) or id(value) in self.met:
            return
        self.met[id(value)] = value, label
        if isinstance(value, torch.Tensor):
            is_here = id(value) not in self._state and not isinstance(value, StandIn)
            if is_here and not value.is_inference():
                self.tensors[id(value)] = value
                if value.numel() <= 1:
                    with disable_current_modes():
                        self.values.append((value, value.detach().clone()))
                self.note(itself(vars(value), f"the attributes of {label}"))
        elif isinstance(value, FunctionType):
            self._meet_function(value, label)
        elif isinstance(value, type):
            self.meet_class(value)
            if is_watchable(value):
                self._classes.add(value)  # code may make objects of it
        elif isinstance(value, ModuleType):
            if is_watchable_module(value):
                self._name(value, label)
        elif isinstance(value, nn.Module):
            self._meet_module(value, label)
        elif isinstance(value, CONTAINERS):
            self._meet_items(value, label)
        else:
            self._meet_object(value, label)

    def _meet_module(self, module: nn.Module, label: str) -> None:
        """A module beside the network, perhaps: one that a closure holds."""
        if id(own_dictionary(module)) not in self.tables:
            for path, inner in module.named_modules():
                name = f"{label}.{path}" if path else label
                self.tables[id(vars(inner))] = (inner, None, name)
                self.meet_class(type(inner))
                if self.passes_by and self._classes.has_own_way(type(inner)):
                    self.note_all_of(inner, name)
        self.meet_class(type(module))

    def _meet_items(self, value: Any, label: str) -> None:
        is_array = isinstance(value, BUFFERS)
        for item in held_in(value):
            if is_array and isinstance(item, CONTAINERS):  # which shows none of them
                self.note(itself(item, f"{label}[…]"))
            self.meet(item, f"{label}[…]")
        if not is_array and type(value) not in CONTAINERS:
            self._meet_object(value, label)

    def _meet_object(self, value: Any, label: str) -> None:
        parts = ("__self__", "__func__", "__wrapped__", "func", "args", "keywords", "fget")
        for name in parts if isinstance(value, _CALLABLES) else ():
            if not isinstance(inner := getattr(value, name, None), ModuleType):
                self.meet(inner, label)
        if isinstance(value, functools.partial):
            place = Place(PlaceKind.FIELD, value, "keywords", f"keywords of {label}")
            self.note(place)
            self.note(Place(PlaceKind.FIELD, value, "args", f"arguments of {label}"))
        for place in hidden_places(value, label):
            self.note(place)
            self.meet(place.read(), place.label)
        if (weak := weak_place(value, label)) is not None:
            self.note(weak)
        for inner in hidden_values(value):
            if weak is not None:
                self.weakly_met.add(id(own_dictionary(inner)))
            self.meet(inner, label)
        if is_watchable(type(value)):
            if number_of(value) not in self.made:
                self.touched[number_of(value)] = value
                self.dictionaries.add(value)
            self.meet_class(type(value))
            self._classes.add(type(value))
            if self.passes_by:
                self.note_all_of(value, label)

    def _meet_function(self, function: FunctionType, label: str) -> None:
        self._register(function)
        self._name(function, label)
        wrapped = vars(function).get("__wrapped__")
        if wrapped is not None:
            self.meet(wrapped, label)
        file = function.__code__.co_filename
        is_run = (id(function.__code__), id(function.__globals__)) in self.executed
        is_asked = self.looks_into or not is_watched_file(file)
        if is_run or (is_asked and not is_own(file)):
            self.note_closure(function)

    def _register(self, function: FunctionType) -> None:
        known = self.functions.setdefault(id(function.__code__), [])
        if not any(one is function for one in known):
            known.append(function)

    def meet_class(self, kind: type) -> None:
        """Watch the attributes of a class, of its bases and of its metaclass."""
        bases: tuple[type, ...] = (*kind.__mro__, *type.mro(type(kind)))
        for one in bases:
            is_one = is_watchable(one) or is_watchable_of_tensors(one)
            if not is_one or any(one is known for known, *_ in self.named):
                continue
            for name, value in list(vars(one).items()):
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, FunctionType):
                    self._register(function)
                    if _is_special(name) and name not in HOOKED_METHODS:
                        self._add_special(name, function)
            self._name(one, one.__qualname__)

    def _add_special(self, name: str, function: FunctionType) -> None:
        self.special_of.setdefault(id(function.__code__), set()).add(name)
        if (id(function.__code__), id(function.__globals__)) in self.executed:
            self.special.add(name)
            self.note_names({name})

    def note_names(self, names: set[str] | frozenset[str]) -> None:
        """Note the attributes of classes, modules and functions that code may read by names."""
        self.names |= names
        for holder, label, _ in self.named:
            self.note_named(holder, label, names)

    def _name(self, holder: Any, label: str) -> None:
        self.named.append((holder, label, frozenset(vars(holder))))
        self.note_named(holder, label, self.names)

    def note_new(self) -> None:
        """Note the attributes that classes, modules and functions have got: code has made them."""
        for holder, label, before in self.named:
            for name in [name for name in vars(holder) if name not in before]:
                place = named_place(holder, name, f"{label}.{name}")
                is_module = isinstance(vars(holder)[name], ModuleType)  # that was imported
                if place.identity not in self.noted and not is_module and not _is_special(name):
                    new = Noted(place, MISSING, is_read=False, is_written=True)
                    self.noted[place.identity] = new

    def note_closure(self, function: FunctionType) -> None:
        """Note the variables of a function's closure, its defaults and its code."""
        name, code = function.__qualname__, function.__code__
        source = where_defined(code)
        for variable, held in zip(code.co_freevars, function.__closure__ or (), strict=False):
            place = cell(held, f"{variable!r} in the closure of {name}", source)
            if variable != "__class__":
                self.note_read(place, facts_of(code).cells_read.get(variable, ()))
                self.meet(place.read(), variable)
        for kept in ("__code__", "__defaults__", "__kwdefaults__"):
            if getattr(function, kept) is not None:
                self._note_field(function, kept)

    def _note_field(self, function: FunctionType, field: str) -> None:
        label = f"{field.strip('_')} of {function.__qualname__}"
        source = where_defined(function.__code__)
        self.note(Place(PlaceKind.FIELD, function, field, label, source))
        self.meet(getattr(function, field), label)

    def note_named(self, holder: Any, label: str, names: set[str] | frozenset[str]) -> None:
        """Note those attributes of a class, a module or a function that code may read by name."""
        known = set(vars(holder))
        is_function = isinstance(holder, FunctionType)
        for told in sorted(_TOLD_BY_FUNCTIONS & names) if is_function else ():
            self._note_field(holder, told)
        for place in class_places(holder, label, names) if isinstance(holder, type) else ():
            self.note(place)
        if isinstance(holder, type):  # what its bases and its metaclass have, it may get itself
            for kind in filter(is_watchable, (*holder.__mro__[1:], *type.mro(type(holder)))):
                known |= vars(kind).keys()
        own = vars(holder) if isinstance(holder, ModuleType) else {}
        has_own_way = "__getattr__" in own or hasattr(type(holder), "__getattr__")
        for name in sorted(names if has_own_way else names & known):  # as on every worker
            is_counted = name in self.special and isinstance(holder, type)
            is_counted |= isinstance(vars(holder).get(name), (dict, str, tuple))  # annotations
            if _is_special(name) and not is_counted:
                continue
            place = named_place(holder, name, f"{label}.{name}")
            self.note(place)
            self.meet(place.read(), place.label)

    def note_passed_by(self) -> None:
        """From now on code may ask objects for attributes past their classes: note them all."""
        self.passes_by = True
        modules = [(module, label) for module, _, label in self.tables.values()]
        own = [pair for pair in modules if self._classes.has_own_way(type(pair[0]))]
        for one, label in [*self.met.values(), *own]:
            self.note_all_of(one, label)

    def note_looked_into(self) -> None:
        """From now on code may ask functions that do not run for what they consist of."""
        self.looks_into = True
        for one, _ in list(self.met.values()):
            if isinstance(one, FunctionType) and not is_own(one.__code__.co_filename):
                self.note_closure(one)

    def note_all_of(self, one: Any, label: str) -> None:
        """Note all attributes of an object."""
        if number_of(one) in self.made or isinstance(one, (FunctionType, ModuleType)):
            return
        held = own_dictionary(one) or {}
        slots = slots_of(type(one)) if is_watchable(type(one)) else ()
        places = [entry(held, n, f"{label}.{n}", "", self.path_of(held)) for n in held]
        places += [Place(PlaceKind.SLOT, one, s.__name__, f"{label}.{s.__name__}") for s in slots]
        for place in places:
            if not isinstance(one, nn.Module) or not is_torchs(one, place.key):
                self.note_read(place)
                self.meet(place.read(), place.label)

    def path_of(self, held: Any) -> str | None:
        """The path of the module with a dictionary of attributes; None if there is none."""
        return self.tables.get(id(held), (None, None))[1]


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _has_no_value(leaf: Any) -> bool:
    return isinstance(leaf, (FakeTensor, torch.fx.Proxy))


def _is_asked_for(value: Any, item: Item) -> bool:
    """Whether no more of a container is read than an item; a class of its own may do anything."""
    if type(value) is SimpleNamespace:
        return item.is_attribute
    is_key = type(value) is dict or (type(value) is list and isinstance(item.key, int))
    return is_key and not item.is_attribute


def is_torchs(module: nn.Module, name: str) -> bool:
    """Whether a module's attribute is one of PyTorch's own tables, or an entry of one.

    A method's name may be the user's attribute as well, or become one: ``self.type = "post"``.
    """
    held = own_dictionary(module) or {}  # not by a way of the module's own to read attributes
    if name in TABLES or name in ALL_HOOKS or name in CALLS or name == NOT_SAVED:
        return True
    if name not in held and name in _OF_MODULES:
        return True
    if isinstance(module, nn.RNNBase) and name.startswith(FLAT_WEIGHTS):
        return True
    return any(name in (held.get(table) or ()) for table in TABLES)


def _item_of(frozen: Frozen, key: Any) -> Any:
    """An item of a mapping or sequence as it was; ``MISSING`` if there was none."""
    if is_mapping(frozen.container):
        item = dict(zip(frozen.keys, frozen.items, strict=True)).get(key, MISSING)
    else:
        is_there = -len(frozen.items) <= key < len(frozen.items)
        item = frozen.items[key] if is_there else MISSING
    return freeze(item)  # a container that holds itself stands there as it is
