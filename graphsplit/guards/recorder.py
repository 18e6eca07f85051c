"""Record what Python reads and writes while a network is captured.

Each read is noted with the value that was there first, by what Python offers for it::

    self.beta, cfg.rate            nn.Module's and each met class's __getattribute__, replaced
    BETA, CONFIG["beta"]           names in the code of each function that runs (a trace function)
    a closure's variable, a default    cells and defaults of the functions whose code runs
    Net.scale, settings.beta       attributes of classes and modules, by the names that code uses

Only what was there before counts: tensors without values, and objects that forward makes itself,
are no state. Afterwards everything is put back as it was, so that a capture leaves no trace.
"""

from __future__ import annotations

import builtins
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from graphsplit.errors import CaptureError
from graphsplit.frames import is_own, is_users, short_path, users_frame
from graphsplit.guards.by_name import AskedByName
from graphsplit.guards.classes import (
    HookedClasses,
    Hooks,
    attributes_of,
    functions_of,
    is_hung_on,
    is_watchable,
    is_watchable_module,
    is_watched_file,
    number_of,
    own_dictionary,
    slot_of,
    tracing,
)
from graphsplit.guards.code_facts import (
    CodeFacts,
    Item,
    facts_of,
    hung_on,
    is_put_there,
    places_asked,
)
from graphsplit.guards.hidden import OF_OBJECTS, cached_results, names_place, setting_places
from graphsplit.guards.places import Place, PlaceKind, entry
from graphsplit.guards.values import CONTAINERS, MISSING, freeze, reference_of, with_leaves
from graphsplit.guards.visitor import WITHOUT_VALUES, Noted, ValueVisitor, is_torchs
from graphsplit.torch_ext.attributes import FORWARD_HOOKS, is_of_user
from graphsplit.torch_ext.private import FakeTensor

# Between a control-flow operator and the call in which the user gave it its functions.
_MAX_FRAMES_OF_TORCH = 8
_BUILTINS = frozenset(vars(builtins))
_PASSING_BY = {"__getattribute__", "__get__", "getattr_static"}  # past the way of a class
_DISPATCHING = functools.singledispatchmethod
_NOT_READ = frozenset(("__class__", "__doc__", "__module__"))
# What asks for all attributes at once: the code itself, and copy and pickle, which then read in C.
_ALL_READ = frozenset(("__dict__", "__reduce_ex__", "__reduce__", "__getstate__"))


class ReadRecorder(ValueVisitor):
    """Notes what is read and written in a ``with recorder.recording():`` block.

    Args:
        root: The module that holds the network and the loss.
        labels: The name for people of the module at a path: ``net.fc``.
        is_paused: Whether what runs now is not to be recorded.
        real_of: Gives for what stands for a kept tensor that itself, for anything else that.

    Attributes:
        by_name: Stands for functions of Python's own.
        of_names: Where code asks for all attributes of objects, with the names that these had.
    """

    def __init__(
        self,
        root: nn.Module,
        labels: Callable[[str], str],
        is_paused: Callable[[], bool],
        real_of: Callable[[Any], Any],
    ) -> None:
        self._seen: dict[tuple[int, str], Any] = {}
        self._told: set[Any] = set()  # code and names that were noted
        self._nested: dict[int, CodeType] = {}
        hooks = Hooks(self._read, self._write, self._put_dictionaries_back, self._seen)
        super().__init__(root, labels, HookedClasses(hooks), real_of)
        self.by_name = AskedByName(self._asked)
        self._trace = tracing(self._ran, self._imported)
        self._is_off = True
        self._is_paused = is_paused
        self._root = root
        self.of_names: dict[int, tuple[Place, Any]] = {}
        self._held_first: list[tuple[nn.Module, dict[str, Any]]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        self._classes.add(nn.Module)
        for module in self._root.modules():
            self.meet_class(type(module))
            self._classes.add(type(module))
            self.dictionaries.add(module)
            for name in FORWARD_HOOKS:
                for hook in getattr(module, name).values():
                    self.meet(hook, f"a hook of {type(module).__name__}")
        loss_fn = getattr(self._root, "loss_fn", None)
        self.meet(getattr(loss_fn, "_function", loss_fn), "loss_fn")
        self._held_first = [(module, dict(vars(module))) for module in self._root.modules()]
        before, collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # what finalizers and callbacks of collections read is no part of the step
        sys.settrace(self._trace)
        self._is_off = False
        try:
            yield
        finally:
            self._is_off = True
            sys.settrace(before)
            self.by_name.remove()
            self._classes.remove()
            self._seen.clear()
            self.note_new()
            if collects:
                gc.enable()

    def begin_part(self, *, with_code: bool = False) -> int:
        """Begin another part of the step, and number it: uses are noted for each."""
        self._seen.clear()  # these reads would not be noted again
        self._told = set() if with_code else self._told
        self.part += 1
        return self.part

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Note nothing of what is read inside."""
        was_off, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = was_off

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let torch's compiler look at code inside, as it does at the branches of ``torch.cond``.

        That code does not run, so nobody sees what it reads: everything that it could reach counts.
        """
        self._note_all_within_reach(sys._getframe(2))
        self._is_off = True
        sys.settrace(None)
        try:
            with self._classes.lifted_off():
                yield
        finally:
            self._is_off = False
            sys.settrace(self._trace)

    def _note_all_within_reach(self, frame: FrameType | None) -> None:
        for _ in range(_MAX_FRAMES_OF_TORCH):
            for value in list(frame.f_locals.values()) if frame is not None else ():
                if isinstance(value, FunctionType) and is_watched_file(value.__code__.co_filename):
                    self.meet(value, value.__qualname__)
                    self._note_code(value.__code__, value.__globals__)
                    self.note_closure(value)
            frame = frame.f_back if frame is not None else None
        for held, (module, path, label) in list(self.tables.items()):
            if type(module).__module__.startswith("graphsplit."):
                continue
            self.touched[held] = module
            for name in list(vars(module)):
                if not is_torchs(module, name):
                    self.note(entry(vars(module), name, f"{label}.{name}", "", path))
                    self.meet(vars(module)[name], f"{label}.{name}")

    def results_kept(self) -> Iterator[tuple[Place, Any]]:
        """The contents of the caches of the user's functions, each with what it is by now."""
        for one, label in list(self.met.values()):
            if isinstance(one, functools._lru_cache_wrapper):
                code = getattr(one.__wrapped__, "__code__", None)
                if code is not None and is_watched_file(code.co_filename):
                    yield from ((p, p.read()) for p in cached_results(one, label))

    def touch(self, module: nn.Module) -> None:
        """Count a module as one of which something was read."""
        is_own_class = type(module).__module__.startswith("graphsplit.")
        if id(vars(module)) in self.tables and not is_own_class:
            self.touched[id(vars(module))] = module

    def note_tensors(self, place: Place, is_read: bool) -> None:
        """Note an attribute that the user has hung on a parameter or buffer."""
        place = replace(place, source=self._where(None)[0])
        if is_read and self._is_paused() and place.read() is not MISSING:
            raise CaptureError(
                f"code that is kept whole reads {place.label}, an attribute of a tensor, which the "
                f"worker that runs it may not have\n  {place.source}\n"
                f"  Fix: keep it in an attribute of the module."
            )
        if is_read and (self._is_off or self._is_paused()):
            return
        if is_read:
            self.note_read(place)
            self.meet(place.read(), place.label)
        else:
            self._note_written(place)

    def _note_written(self, place: Place, *, is_read: bool = False) -> None:
        self.note(place, is_read=is_read)
        self.noted[place.identity].is_written = True

    def note_unseen(self) -> None:
        """Note attributes that code has written past the classes of modules and objects."""
        self._put_dictionaries_back()
        for module, before in self._held_first:
            held = vars(module)
            _, path, label = self.tables[id(held)]
            for name in {**before, **held}:
                was = before.get(name, MISSING)
                if held.get(name, MISSING) is was or not is_of_user(name):
                    continue
                place = entry(held, name, f"{label}.{name}", "", path)
                if is_torchs(module, name):  # a recurrent layer's second list of its weights
                    place.write(was)
                    continue
                first = with_leaves(freeze(was), self.real_of)
                known = self.noted.get(place.identity)
                # One that was first read after it had been written was noted with what was new.
                if known is None or reference_of(known.first) is not reference_of(first):
                    new = Noted(place, first, is_read=False, is_written=True)
                    self.noted[place.identity] = new

    def _put_dictionaries_back(self) -> None:
        def note(one: Any, held: Any, name: str) -> None:
            label = f"{self._label_of(one)}.{name}"
            if not isinstance(one, nn.Module) or not is_torchs(one, name):
                self._note_written(entry(held, name, label, "", self.path_of(held)))

        if not self._is_paused():  # code kept whole runs for a trial, and is undone
            self.dictionaries.put_back(note)

    def note_lifted(self, places: Iterable[Place]) -> None:
        """Note places that hold symbols by now."""
        self.noted.update((place.identity, Noted(place, place.read())) for place in places)

    # What code reads by name.

    def _name(self, holder: Any, label: str) -> None:
        super()._name(holder, label)
        held = vars(holder)  # of functools.singledispatch: it asks for classes
        if "dispatch" in held or any(isinstance(v, _DISPATCHING) for v in list(held.values())):
            self.by_name.ask_classes()

    def _ran(self, code: CodeType, held: dict[str, Any]) -> None:
        """A function of the user's has begun to run."""
        if (id(code), id(held)) in self._told or self._is_off:
            return
        if self._is_paused():  # code kept whole runs for a trial, on tensors without values, too
            self.by_name.answer(code, facts_of(code), held)
            return
        self._told.add((id(code), id(held)))
        self.executed[id(code), id(held)] = code, held
        self._note_code(code, held)
        if id(code) not in self.functions and id(code) not in self._nested:
            for function in functions_of(code):
                self.meet(function, function.__qualname__)
        for function in self.functions.get(id(code), ()):
            self.note_closure(function)

    def _note_code(self, code: CodeType, held: dict[str, Any]) -> None:
        facts = facts_of(code)
        self._nested.update((id(inner), inner) for inner in facts.nested)
        self._note_globals(held, facts, code)
        self.by_name.answer(code, facts, held)
        self._note_imports(facts, held)
        for place in setting_places(facts.attributes | facts.globals_read.keys(), facts.imports):
            self.note(place)
        is_past = "object" in facts.globals_read and "__setattr__" in facts.attributes
        if not self.passes_by and (is_past or not _PASSING_BY.isdisjoint(facts.attributes)):
            self.note_passed_by()
        if facts.looks_into_functions and not self.looks_into:
            self.note_looked_into()
        special = self.special_of.get(id(code), set())
        self.special |= special
        new = (facts.attributes | special) - self._told
        self._told |= new
        self.note_names(new)

    def _note_imports(self, facts: CodeFacts, held: dict[str, Any]) -> None:
        own = held.get("__name__", "") if "modules" in facts.attributes else ""
        for name in (own, *facts.imports):  # own: sys.modules[__name__]
            whole = name
            if name.startswith("."):
                package = held.get("__package__") or ""
                above = package.split(".")
                above = above[: len(above) + 1 - (len(name) - len(name.lstrip(".")))]
                whole = ".".join((*above, name.strip("."))).rstrip(".")
            self._imported(whole)

    def _imported(self, name: str) -> None:
        """A module, and the packages that it is in, may be read from."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            module = sys.modules.get(".".join(parts[:count]))
            if module is not None:
                whole = ".".join(parts[:count])
                if isinstance(module, ModuleType) and is_watchable_module(module):
                    self.note(entry(sys.modules, whole, f"sys.modules[{whole!r}]"))
                self.meet(module, whole)

    def _asked(self, holder: Any, name: str | None, is_read: bool) -> None:
        """A module, a class, a function or all globals are asked for a name that was computed."""
        if self._is_off or self._is_paused():
            return
        for place in places_asked(holder, name, self._label_of(holder)):
            self.note(place, is_read=is_read)
            if name is not None or isinstance(place.read(), CONTAINERS):
                self.meet(place.read(), place.label)

    def _note_globals(self, held: dict[str, Any], facts: CodeFacts, code: CodeType) -> None:
        where = short_path(code.co_filename)
        source = f"{where}:{code.co_firstlineno}"
        for name, items in facts.globals_read.items():
            if name.startswith("__") and name.endswith("__"):
                continue
            value, label = held.get(name, MISSING), f"{where}: {name}"
            if value is MISSING and name not in _BUILTINS:  # the script may have put it there
                self.note_read(entry(vars(builtins), name, f"builtins.{name}", source), items)
                self.meet(vars(builtins).get(name), label)
            is_apart = isinstance(value, ModuleType) and not is_watchable_module(value)
            for place, inner in hung_on(value, items or ()) if is_apart else ():
                self.note_read(place, inner)
                self.meet(place.read(), place.label)
            is_apart |= isinstance(value, WITHOUT_VALUES) and where.startswith("<")  # eval's
            if is_apart or is_put_there(value) or self.by_name.has_put(held, name):
                continue
            self.note_read(entry(held, name, label, source), items)
            self.meet(value, label)
        for name in sorted(facts.globals_written):  # a set's order is another on each worker
            self.note(entry(held, name, f"{where}: {name}", source), is_read=False)

    # What code reads as an attribute.

    def _read(self, one: Any, name: str, value: Any) -> None:
        """An attribute was read; ``MISSING`` if there is none."""
        if self._is_off:
            return
        # Each call below would be told to what watches the user's code, ten times its own cost.
        seen_by, traced_by = sys.getprofile(), sys.gettrace()
        is_ours = isinstance(seen_by, MethodType)  # a profiler in C, of the script, goes on
        if is_ours:
            sys.setprofile(None)
        sys.settrace(None)
        try:
            if not self._is_paused():
                self._note_attribute(one, name, value)
        finally:
            sys.settrace(traced_by)
            if is_ours:
                sys.setprofile(seen_by)

    def _note_attribute(self, one: Any, name: str, value: Any) -> None:
        if name in _ALL_READ:
            self._read_all_of(one)
        if name in _ALL_READ or name in _NOT_READ:
            return
        held = own_dictionary(one)
        if isinstance(one, Enum) and not held:  # flags put together, which their class keeps
            self.made[id(held)] = held
        if number_of(one) in self.made or (
            isinstance(value, FakeTensor) and self.real_of(value) is value
        ):
            return
        known = self.tables.get(id(held))
        if known is None and isinstance(one, nn.Module):
            return  # torch's own, while it records
        if known is not None and type(known[0]).__module__.startswith("graphsplit."):
            return  # what holds the network and the loss
        if held is not None and not isinstance(one, torch.Tensor):  # planning moves tensors
            self.touched[id(held)] = one
        self._is_off = True
        try:
            place = self._place_of(one, held, name, value)
            is_whole = place is None
            if value is MISSING:
                self._note_absent_in(type(one).__mro__, name)
            if place is not None:
                is_whole = self.note_read(place, self._items_asked_for(value))
                self.meet(value, place.label)
            if is_whole:
                self._seen[id(one), name] = one
        finally:
            self._is_off = False

    def _read_all_of(self, one: Any) -> None:
        """``vars(one)`` or a copy may be used for anything; torch takes those of modules often."""
        asker: Any = sys._getframe(4)
        while is_own(asker.f_code.co_filename) or asker.f_code.co_name == "__getattribute__":
            asker = asker.f_back  # a watched ``vars``, and a class's own way to read
        held = own_dictionary(one)
        if held is None or id(held) in self.made:
            return
        if not held and id(one) not in self.met:
            self.made[id(held)] = held  # a copy that is being made
            return
        if isinstance(one, nn.Module) and not is_users(asker.f_code.co_filename):
            return
        label = self._label_of(one)
        self.note_all_of(one, label)
        if not isinstance(one, (nn.Module, type, FunctionType, ModuleType)):
            names = names_place(held, label)
            self.of_names.setdefault(id(held), (names, names.read()))
        texts = found.f_code.co_consts if (found := users_frame(asker)) else ()
        for text in texts:  # vars(one).get("name"), which is not there yet
            if isinstance(text, str) and text.isidentifier() and text not in held:
                self.note(entry(held, text, f"{label}.{text}", *self._where(held)))

    def _write(self, one: Any, name: str) -> None:
        """An attribute is about to be written or deleted."""
        if self._is_off or self._is_paused():
            return
        held, number = own_dictionary(one), number_of(one)
        if not held and id(one) not in self.met and attributes_of(one) == {}:
            self.made[number] = one  # it is being made
        if number in self.made or (isinstance(one, nn.Module) and id(held) not in self.tables):
            return
        place = self._place_of(one, held, name, MISSING)
        if place is not None:
            self._note_written(place, is_read=name in OF_OBJECTS)  # guards read all that is used

    def _place_of(self, one: Any, held: Any, name: str, value: Any) -> Place | None:
        """Where an attribute's value is kept; None for what is no value of the user's."""
        module = self.tables.get(id(held))
        if module is not None and is_torchs(module[0], name):
            return None
        label = f"{self._label_of(one)}.{name}"
        if name in OF_OBJECTS:
            return Place(PlaceKind.FIELD, one, name, label, self._where(held)[0])
        if held is not None and (name in held or value is MISSING):
            if value is MISSING and slot_of(type(one), name) is not None:
                return Place(PlaceKind.SLOT, one, name, label, self._where(held)[0])
            return entry(held, name, label, *self._where(held))
        for kind in type(one).__mro__:
            if name in vars(kind):
                if slot_of(kind, name) is not None:
                    return Place(PlaceKind.SLOT, one, name, label, self._where(held)[0])
                self._note_absence(one, held, name, label, kind)
                if not is_watchable(kind) and not is_hung_on(vars(kind)[name]):
                    return None
                where = f"{kind.__qualname__}.{name}"
                return Place(PlaceKind.CLASS, kind, name, where, self._where(held)[0])
        return None

    def _note_absence(self, one: Any, held: Any, name: str, label: str, owner: type) -> None:
        """The attribute that would hide a class's, if it were there."""
        if held is not None and not hasattr(type(vars(owner)[name]), "__set__"):
            self.note(entry(held, name, label, *self._where(held)))
        self._note_absent_in(type(one).__mro__[: type(one).__mro__.index(owner)], name)

    def _note_absent_in(self, kinds: tuple[type, ...], name: str) -> None:
        for kind in filter(is_watchable, kinds):
            self.note(Place(PlaceKind.CLASS, kind, name, f"{kind.__qualname__}.{name}"))

    def _where(self, held: Any) -> tuple[str, str | None]:
        """The user's line that is running, and the path of the module that is read."""
        frame = users_frame(sys._getframe(2))
        line = f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""
        module = self.tables.get(id(held))
        return line, module[1] if module is not None else None

    def _label_of(self, one: Any) -> str:
        module = self.tables.get(id(own_dictionary(one)))
        if module is not None:
            return module[2]
        met = self.met.get(id(one))
        return met[1] if met is not None else f"a {type(one).__name__}"

    def _items_asked_for(self, value: Any) -> tuple[Item, ...] | None:
        """The item that the reading code asks the value for at once; None for all of it."""
        if not isinstance(value, (list, dict, SimpleNamespace)):
            return None
        frame: Any = sys._getframe(4)
        if is_own(frame.f_code.co_filename):
            return None
        asked = facts_of(frame.f_code).items.get(frame.f_lasti)
        if asked is None or not asked.local:
            return None if asked is None else (asked,)
        key = frame.f_locals.get(asked.local, MISSING)
        return (Item(key),) if key is not MISSING else None
