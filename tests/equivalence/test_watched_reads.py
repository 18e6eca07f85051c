"""Values that code reads on other ways than by an attribute: each change of them counts."""

from __future__ import annotations

import builtins
import collections
import concurrent.futures
import contextvars
import copy
import ctypes
import decimal
import functools
import hashlib
import importlib
import inspect
import io
import logging
import math
import multiprocessing
import optparse
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, Literal, get_args, get_type_hints

import networkx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import KeptByWeakReference, batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import distributions, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.data import Subset

from graphsplit.errors import CaptureError, StaleGraphError
from graphsplit.guards.values import shown

Weigh = Callable[[], float]
SetWeight = Callable[[float], object]
pytestmark = [
    pytest.mark.filterwarnings("ignore:network or loss reads"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]
ORDINARY = 1.0
settings = ModuleType("settings_of_a_test")
settings.__file__ = __file__
sys.modules[settings.__name__] = settings


class Holder:
    weight = 1.0


class Meta(type):
    weight = 1.0


class OfMeta(metaclass=Meta):
    pass


class Base:
    weight = 1.0


class Derived(Base):
    pass


class Scalar(float):
    weight: float


class Stubborn(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class PastItself:
    def __init__(self) -> None:
        self._values = {"weight": 1.0}

    def __getattribute__(self, name: str) -> Any:
        if name == "weight":
            return object.__getattribute__(self, "_values")[name]
        return object.__getattribute__(self, name)


class OfThread(threading.local):
    weight = 1.0


class WithKept:
    weight = KeptByWeakReference()


def _entry(make: Callable[[dict[str, float]], Any]) -> tuple[Weigh, SetWeight]:
    held = {"weight": 1.0}
    shown = make(held)
    return lambda: shown["weight"], lambda value: held.update(weight=value)


def _attribute(one: Any, read: Weigh, name: str = "weight") -> tuple[Weigh, SetWeight]:
    setattr(one, name, 1.0)
    return read, lambda value: setattr(one, name, value)


def _computed_name(one: Any) -> tuple[Weigh, SetWeight]:
    name = "wei" + "ght".lower()
    return _attribute(one, lambda: getattr(one, name))


def _by_import() -> tuple[Weigh, SetWeight]:
    def read() -> float:
        from settings_of_a_test import imported  # type: ignore[import-not-found]

        return float(imported)

    return _attribute(settings, read, "imported")


def _made_by_exec() -> tuple[Weigh, SetWeight]:
    held: dict[str, Any] = {"weight": 1.0}
    exec("def read(): return weight", held)
    return held["read"], lambda value: held.update(weight=value)


def _appears() -> tuple[Weigh, SetWeight]:
    held: dict[str, Any] = {"__name__": "__main__"}
    exec("def read():\n try: return later\n except NameError: return 1.0", held)
    return held["read"], lambda value: held.update(later=value)


def _one_code_two_globals() -> tuple[Weigh, SetWeight]:
    def read() -> float:
        return ORDINARY

    one = FunctionType(read.__code__, {"ORDINARY": 1.0})
    other = FunctionType(read.__code__, {"ORDINARY": 1.0})
    return lambda: one() * other(), lambda value: other.__globals__.update(ORDINARY=value)


def _context() -> tuple[Weigh, SetWeight]:
    variable = contextvars.ContextVar("weight", default=1.0)
    return variable.get, variable.set


def _thread() -> tuple[Weigh, SetWeight]:
    local = threading.local()
    return _attribute(local, lambda: local.weight)


def _hides_metaclass() -> tuple[Weigh, SetWeight]:
    kind: Any = type("Kind", (type,), {"weight": 1.0})("Of", (), {})
    return lambda: kind.weight, lambda value: setattr(kind, "weight", value)


def _answered_by_metaclass() -> tuple[Weigh, SetWeight]:
    kind: Any = type("Kind", (type,), {"__getattr__": lambda cls, name: 1.0})("Of", (), {})
    return lambda: kind.weight, lambda value: setattr(kind, "weight", value)


class _ByCall:
    def __init__(self, get: Callable[[str], float]) -> None:
        self.get = get

    def __getitem__(self, name: str) -> float:
        return self.get(name)


def _length() -> tuple[Weigh, SetWeight]:
    held = [1.0]
    length = held.__len__
    return lambda: float(length()), held.append


def _looked_into(look: Callable[[Any], float]) -> tuple[Weigh, SetWeight]:
    weight = 1.0

    def function(of: float = 1.0) -> float:  # it is never called
        return of * weight

    def write(value: float) -> None:
        nonlocal weight
        weight, function.__defaults__ = value, (value,)

    return lambda: look(function), write


def _weak() -> tuple[Weigh, SetWeight]:
    one = Holder()
    reference = weakref.ref(one)
    return _attribute(one, lambda: reference().weight)  # type: ignore[union-attr]


def _gone(refer: Callable[[Any], Callable[[], Any]]) -> tuple[Weigh, SetWeight]:
    held = [Holder()]
    held[0].weight = 1.5
    find = refer(held[0])

    def weigh() -> Any:
        found = find()
        return 1.0 if found is None else found.weight

    def let_go(value: float) -> None:
        if value < 3:
            held[0].weight = value
        else:
            held.clear()
            assert find() is None  # nobody else holds it, as in the plain loop

    return weigh, let_go


def _in_weak_values(one: Any) -> Callable[[], Any]:
    found = weakref.WeakValueDictionary({"one": one})
    return lambda: found.get("one")


def _in_weak_set(one: Any) -> Callable[[], Any]:
    found = weakref.WeakSet([one])
    return lambda: next((known for known in found), None)


def _copied(one: Any, copied: Callable[[Any], Any]) -> tuple[Weigh, SetWeight]:
    held = {"one": one}
    return _attribute(one, lambda: copied(held["one"]).weight)


def _number_with_attribute() -> tuple[Weigh, SetWeight]:
    one = Scalar(1.0)
    return _attribute(one, lambda: one.weight)


def _equal_to_all() -> tuple[Weigh, SetWeight]:
    held = [Stubborn(1)]
    return lambda: int(held[0]), lambda value: held.__setitem__(0, Stubborn(int(value)))


def _of_torch(one: Any, name: str) -> tuple[Weigh, SetWeight]:
    return _attribute(one, lambda: getattr(one, name), name)


def _waiting() -> tuple[Weigh, SetWeight]:
    waiting: queue.Queue[float] = queue.Queue()
    return lambda: 1.0 + waiting.qsize(), waiting.put


def _in_memory() -> tuple[Weigh, SetWeight]:
    text = io.StringIO("1")
    return lambda: float(text.getvalue()), lambda value: text.write(f"{value:.0f}") and None


def _waiting_in_c() -> tuple[Weigh, SetWeight]:
    waiting: queue.SimpleQueue[float] = queue.SimpleQueue()
    return lambda: 1.0 + waiting.qsize(), waiting.put


def _hashed() -> tuple[Weigh, SetWeight]:
    made = hashlib.sha256()
    return lambda: made.digest()[0] / 256, lambda value: made.update(str(value).encode())


class Slotted:
    __slots__ = ("weight",)


def _slot(read: Callable[[Any], Any]) -> tuple[Weigh, SetWeight]:
    one = Slotted()
    return _attribute(one, lambda: read(one))


def _static(one: Any) -> tuple[Weigh, SetWeight]:
    return _attribute(one, lambda: inspect.getattr_static(one, "weight"))


def _replaced() -> tuple[Weigh, SetWeight]:
    one = Holder()
    return _attribute(one, lambda: one.weight)[0], lambda v: setattr(one, "__dict__", {"weight": v})


def _valued(one: Any) -> tuple[Weigh, SetWeight]:
    return lambda: one.value, lambda value: setattr(one, "value", value)


def _of_thread() -> tuple[Weigh, SetWeight]:
    one = OfThread()
    return lambda: one.weight, lambda value: setattr(one, "weight", value)


def _asked(answers: Callable[[], bool], write: SetWeight) -> tuple[Weigh, SetWeight]:
    return lambda: 2.0 if answers() else 1.0, write


def _event() -> tuple[Weigh, SetWeight]:
    event = threading.Event()
    return _asked(event.is_set, lambda value: event.set())


def _raised() -> tuple[Weigh, SetWeight]:
    error = ValueError(1.0)
    return lambda: error.args[0], lambda value: setattr(error, "args", (value,))


def _logged() -> tuple[Weigh, SetWeight]:
    logger = logging.getLogger("a logger of a test")
    logger.setLevel(logging.ERROR)
    return _asked(lambda: logger.isEnabledFor(20), lambda value: logger.setLevel(20))


def _marked() -> tuple[Weigh, SetWeight]:
    one = torch.ones(1)
    return _asked(lambda: one.requires_grad, lambda value: one.requires_grad_())


def _computed_import() -> tuple[Weigh, SetWeight]:
    name = "settings" + "_of_a_test".lower()
    return _attribute(settings, lambda: importlib.import_module(name).weight)


def _appears_in_vars() -> tuple[Weigh, SetWeight]:
    one = Holder()
    return lambda: vars(one).get("later", 1.0), lambda value: setattr(one, "later", value)


def _order() -> tuple[Weigh, SetWeight]:
    held = collections.OrderedDict(a=1.0, b=2.0)

    def read() -> float:
        return functools.reduce(lambda one, other: one * 0.5 + other, held.values())

    return read, lambda value: held.move_to_end("a" if value % 2 else "b")


def _set_order() -> tuple[Weigh, SetWeight]:
    held = [{0, 8}]

    def read() -> float:
        return functools.reduce(lambda one, other: one * 0.5 + other, held[0], 1.0)

    return read, lambda value: held.__setitem__(0, {8, 0} if value % 2 else {0, 8})


def _past_its_class() -> tuple[Weigh, SetWeight]:
    one = PastItself()
    return lambda: one.weight, lambda value: one._values.update(weight=value)


def _descriptor() -> tuple[Weigh, SetWeight]:
    one = WithKept()
    return _attribute(one, lambda: one.weight)


def _dispatched() -> tuple[Weigh, SetWeight]:
    @functools.singledispatch
    def read(one: object) -> float:
        return 0.5

    read.register(int, lambda one: 1.0)
    return lambda: read(3), lambda value: read.register(int, lambda one: value)


def _cached(**options: Any) -> tuple[Weigh, SetWeight]:
    held = {"weight": 1.0}

    @functools.lru_cache(**options)
    def read(name: str) -> float:
        return held[name]

    def write(value: float) -> None:
        held.update(weight=value)
        if value > 2:  # the step before finds the old one still
            read.cache_clear()

    return lambda: read("weight"), write


def _let_go() -> tuple[Weigh, SetWeight]:
    held = {"weight": 1.0, "other": 0.0}

    @functools.lru_cache(maxsize=1)
    def read(name: str) -> float:
        return held[name]

    def write(value: float) -> None:
        held.update(weight=value)
        read("other"), read("weight")  # Python uses the object that held the first result again

    return lambda: read("weight"), write


def _unlike_keys() -> tuple[Weigh, SetWeight]:
    class Key:
        def __repr__(self) -> str:
            return "key"

    first, second = Key(), Key()

    class Table:
        def __init__(self) -> None:
            self.held = {first: 1.0, second: 2.0}

        def read(self) -> float:
            one, other = first, second
            return self.held[one] * self.held[other]

    table = Table()
    return table.read, lambda value: table.held.update({second: value})


def _made_by_hand(what: str, *, is_named: bool = True) -> tuple[Weigh, SetWeight]:
    """A module that no import knows, as ``module_from_spec`` gives it, or mere globals."""
    made = ModuleType("settings_made_by_hand")
    held = vars(made) if is_named else {}
    exec("class Settings:\n    weight = 1.0\nweight, one = 1.0, Settings()", held)
    one, kind = held["one"], held["Settings"]
    return {
        "global": lambda: _attribute(made, lambda: made.weight),
        "object": lambda: _attribute(one, lambda: one.weight),
        "class": lambda: _attribute(kind, lambda: kind.weight),
    }[what]()


def _in_place_of(module: ModuleType, name: str, read: Weigh) -> tuple[Weigh, SetWeight]:
    """Another function is put into a library."""
    return read, lambda value: setattr(module, name, lambda _: value)


def _imported_anew() -> tuple[Weigh, SetWeight]:
    def read() -> float:
        import settings_of_a_test  # type: ignore[import-not-found]

        return float(settings_of_a_test.weight)

    def write(value: float) -> None:
        sys.modules["settings_of_a_test"] = other = ModuleType("settings_of_a_test")
        other.__dict__["weight"] = value

    return read, write


def _global_that_appears() -> tuple[Weigh, SetWeight]:
    return lambda: globals().get("NOT_YET", 1.0), lambda v: globals().update(NOT_YET=v)


@pytest.fixture
def python_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = decimal.getcontext()
    decimal.setcontext(before.copy())
    monkeypatch.setattr(builtins, "ascii", ascii)
    monkeypatch.setattr(math, "fsum", math.fsum)
    monkeypatch.setattr(math, "of_a_test", 1.0, raising=False)
    monkeypatch.setitem(sys.modules, "settings_of_a_test", settings)
    yield
    decimal.setcontext(before)
    globals().pop("NOT_YET", None)


def _decimals() -> tuple[Weigh, SetWeight]:
    def read() -> float:
        return float(decimal.Decimal(1) / decimal.Decimal(3))

    return read, lambda value: setattr(decimal.getcontext(), "prec", int(value))


def _own_decimals() -> tuple[Weigh, SetWeight]:
    own = decimal.Context()
    third = decimal.Decimal(1), decimal.Decimal(3)
    return lambda: float(own.divide(*third)), lambda value: setattr(own, "prec", int(value))


def _promised() -> tuple[Weigh, SetWeight]:
    promise: concurrent.futures.Future[float] = concurrent.futures.Future()

    def write(value: float) -> None:
        if not promise.done():
            promise.set_result(value)

    return lambda: promise.result() if promise.done() else 1.0, write


def _polynomial(made: Any, coefficients: Any) -> tuple[Weigh, SetWeight]:
    return lambda: float(made(0.5)), lambda value: coefficients.__setitem__(0, value)


def _edge() -> tuple[Weigh, SetWeight]:
    graph = networkx.DiGraph()
    graph.add_edge(0, 1, weight=1.0)
    read = lambda: sum(graph[u][v]["weight"] for u, v in graph.edges)  # noqa: E731
    return read, lambda value: graph.add_edge(0, int(value), weight=value)


def _built_in() -> tuple[Weigh, SetWeight]:
    return _attribute(builtins, lambda: of_a_test, "of_a_test")  # type: ignore[name-defined]  # noqa: F821


def _on_torchs_class() -> tuple[Weigh, SetWeight]:
    layer = nn.Bilinear(1, 1, 1)
    return _attribute(nn.Bilinear, lambda: layer.of_a_test, "of_a_test")


def _class_gets() -> tuple[Weigh, SetWeight]:
    class Slotted:
        __slots__ = ()

    one = Slotted()
    return lambda: getattr(one, "late", 1.0), lambda value: setattr(Slotted, "late", value)


def _class_gets_method() -> tuple[Weigh, SetWeight]:
    class Plain:
        pass

    one = Plain()
    write = lambda value: setattr(Plain, "__len__", lambda self: int(value) - 2)  # noqa: E731
    return lambda: float(len(one)) if one and hasattr(one, "__len__") else 1.0, write


def _class_gets_property() -> tuple[Weigh, SetWeight]:
    class Own(Base):
        pass

    own = Own()
    own.scale = 1.0  # type: ignore[attr-defined]
    write = lambda value: setattr(Own, "scale", property(lambda self: value))  # noqa: E731
    return lambda: own.scale, write  # type: ignore[attr-defined]


def _annotated() -> tuple[Weigh, SetWeight]:
    class Fields:
        first: float

    def write(value: float) -> None:
        Fields.__annotations__[f"of_{value}"] = float

    return lambda: float(len(Fields.__annotations__)), write


def _text_of_function() -> tuple[Weigh, SetWeight]:
    def function() -> None:
        """1.0"""

    return (
        lambda: float(function.__doc__ or 0.0),
        lambda value: setattr(function, "__doc__", str(value)),
    )


def _annotated_function() -> tuple[Weigh, SetWeight]:
    def function() -> None: ...

    held = function.__annotations__
    held["weight"] = 1.0
    return lambda: function.__annotations__["weight"], lambda value: held.update(weight=value)


class Dotted(dict[str, Any]):
    __getattr__ = dict.get
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


def _dotted() -> tuple[Weigh, SetWeight]:
    held = Dotted(weight=1.0, inner=Dotted())
    return lambda: held.weight * 1.0, lambda value: held.update(weight=value)


def _among_all(ask: Callable[[Any], Iterable[Any]]) -> tuple[Weigh, SetWeight]:
    held = Holder()
    held.first = 1.0

    def write(value: float) -> None:
        setattr(held, f"later{value:.0f}", value)

    return lambda: float(len([*ask(held)])), write


def _bounded() -> tuple[Weigh, SetWeight]:
    held = Holder()
    held.last = collections.deque([1.0], maxlen=1)

    def write(value: float) -> None:
        held.last = collections.deque([1.0], maxlen=int(value))

    return lambda: float(held.last.maxlen or 0), write


def _record() -> tuple[Weigh, SetWeight]:
    table = np.array([(1.0, 2)], dtype=[("weight", "f8"), ("count", "i4")])
    record = table[0]
    return lambda: float(record["weight"]), lambda value: table["weight"].fill(value)


def _object_in_array() -> tuple[Weigh, SetWeight]:
    table = np.array([Holder(), None], dtype=object)
    table[0].weight = 1.0
    return lambda: float(table[0].weight), lambda value: setattr(table[0], "weight", value)


def _dictionary_in_array() -> tuple[Weigh, SetWeight]:
    table = np.array([{"weight": 1.0}, None], dtype=object)
    return lambda: float(table[0]["weight"]), lambda value: table[0].update(weight=value)


def _hints() -> tuple[Weigh, SetWeight]:
    def annotated(value: float) -> None: ...

    def write(value: float) -> None:
        annotated.__annotations__ = {"value": Literal[value]}

    write(1.0)
    return lambda: float(get_args(get_type_hints(annotated)["value"])[0]), write


WAYS: dict[str, Callable[[], tuple[Weigh, SetWeight]]] = {
    "object in an array": _object_in_array,
    "dictionary in an array": _dictionary_in_array,
    "hints of types": _hints,
    "record of an array": _record,
    "attributes that appear in vars()": lambda: _among_all(lambda held: vars(held).values()),
    "attributes that appear in dir()": lambda: _among_all(dir),
    "attributes that appear in a copy": lambda: _among_all(lambda held: vars(copy.copy(held))),
    "bound of a deque": _bounded,
    "computed name of a module": lambda: _computed_name(settings),
    "computed name of a class": lambda: _computed_name(Holder),
    "globals()": lambda: _attribute(sys.modules[__name__], lambda: globals()["OWN"], "OWN"),
    "vars(module)": lambda: _attribute(settings, lambda: vars(settings)["weight"]),
    "dictionary of a class": lambda: _attribute(Holder, lambda: Holder.__dict__["weight"]),
    "import": _by_import,
    "sys.modules": lambda: _attribute(settings, lambda: sys.modules["settings_of_a_test"].weight),
    "metaclass": lambda: _attribute(Meta, lambda: OfMeta.weight),
    "hides a metaclass's": _hides_metaclass,
    "answered by a metaclass": _answered_by_metaclass,
    "a dictionary's own method": lambda: _entry(lambda held: _ByCall(held.get)),
    "a wrapped method": _length,
    "defaults of a function": lambda: _looked_into(lambda f: f.__defaults__[0]),
    "variables of a function": lambda: _looked_into(lambda f: f.__closure__[0].cell_contents),
    "a signature": lambda: _looked_into(lambda f: inspect.signature(f).parameters["of"].default),
    "inherited": lambda: (lambda: Derived.weight, lambda value: setattr(Derived, "weight", value)),
    "mapping proxy": lambda: _entry(MappingProxyType),
    "chain map": lambda: _entry(lambda held: collections.ChainMap({}, held)),
    "past its class": _past_its_class,
    "descriptor": _descriptor,
    "exec": _made_by_exec,
    "module that was not imported": lambda: _made_by_hand("global"),
    "object of its class": lambda: _made_by_hand("object"),
    "its class": lambda: _made_by_hand("class"),
    "object of a class without a module": lambda: _made_by_hand("object", is_named=False),
    "name that appears": _appears,
    "one code, two globals": _one_code_two_globals,
    "context variable": _context,
    "precision of decimals": _decimals,
    "thread local": _thread,
    "weak reference": _weak,
    "weak reference whose object is gone": lambda: _gone(weakref.ref),
    "weak values whose object is gone": lambda: _gone(_in_weak_values),
    "weak set whose object is gone": lambda: _gone(_in_weak_set),
    "shallow copy": lambda: _copied(Holder(), copy.copy),
    "deep copy": lambda: _copied(Holder(), copy.deepcopy),
    "number with an attribute": _number_with_attribute,
    "number equal to all": _equal_to_all,
    "queue": _waiting,
    "scale of a distribution": lambda: _of_torch(distributions.Normal(0.0, 1.0), "scale"),
    "scale of a transform": lambda: _of_torch(distributions.AffineTransform(0.0, 1.0), "scale"),
    "number of a hook of torch's": lambda: _of_torch(SpectralNorm(), "eps"),
    "indices of a data set": lambda: _of_torch(Subset([1.0], [0]), "indices"),
    "memory of other processes": lambda: _valued(multiprocessing.Value("d", 1.0)),
    "number in C": lambda: _valued(ctypes.c_double(1.0)),
    "event": _event,
    "file in memory": _in_memory,
    "queue in C": _waiting_in_c,
    "hash": _hashed,
    "slot past its class": lambda: _slot(lambda one: object.__getattribute__(one, "weight")),
    "slot by its descriptor": lambda: _slot(lambda one: vars(Slotted)["weight"].__get__(one)),
    "statically": lambda: _static(Holder()),
    "dictionary that is replaced": _replaced,
    "thread local of a class": _of_thread,
    "arguments of an exception": _raised,
    "level of a logger": _logged,
    "mark of a tensor": _marked,
    "computed name of an import": _computed_import,
    "name that appears in vars()": _appears_in_vars,
    "order of a dictionary": _order,
    "order of a set": _set_order,
    "dispatch": _dispatched,
    "keys that look alike": _unlike_keys,
    "cache that is cleared": _cached,
    "context of decimals": _own_decimals,
    "result of a future": _promised,
    "options of optparse": lambda: _attribute(o := optparse.Values(), lambda: o.weight),
    "polynomial": lambda: _polynomial(p := np.poly1d([1.0, 2.0]), p.coeffs),
    "newer polynomial": lambda: _polynomial(p := np.polynomial.Polynomial([1.0, 2.0]), p.coef),
    "edges of a graph": _edge,
    "name among Python's own": _built_in,
    "attribute that a script has hung on a class of torch": _on_torchs_class,
    "attribute that a class gets": _class_gets,
    "special method that a class gets": _class_gets_method,
    "property that a class gets": _class_gets_property,
    "annotations": _annotated,
    "annotations of a function": _annotated_function,
    "text of a function": _text_of_function,
    "dictionary that has all attributes": _dotted,
    "cache that lets go of results": _let_go,
    "cache without a bound": lambda: _cached(maxsize=None),
    "function of Python's own": lambda: _in_place_of(builtins, "ascii", lambda: float(ascii(1.0))),
    "function of a library": lambda: _in_place_of(math, "fsum", lambda: math.fsum((1.0,))),
    "number in a library": lambda: _attribute(math, lambda: math.of_a_test, "of_a_test"),  # type: ignore[attr-defined]
    "import of another module": _imported_anew,
    "globals().get()": _global_that_appears,
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.usefixtures("python_as_before")
def test_whatever_way_code_reads_a_value_its_changes_count(name: str) -> None:
    read, write = WAYS[name]()
    seen: list[tuple[int, float]] = []

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return rows_against_target(outputs, target) * read()

    def change(step: int, net: Any, loss: Any) -> None:
        if not seen or seen[-1][0] != step:  # once for the loop and its worker
            seen.append((step, step))
            if step:
                write(float(step + 1))

    assert_same_bits(
        lambda: nn.Linear(3, 4),
        batches_of(4, 3),
        steps=3,
        num_workers=1,
        loss_fn=loss_fn,
        before_step=change,
        plan_everywhere=True,
        evaluate_after=(),
    )


def test_what_a_script_puts_among_modules_needs_no_specification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "settings_made_by_hand", SimpleNamespace())
    test_whatever_way_code_reads_a_value_its_changes_count("module that was not imported")


def test_values_are_shown_alike_on_all_workers() -> None:
    one, other = lambda: 1.0, lambda: 1.0
    assert repr(one) != repr(other)
    assert shown(collections.defaultdict(one, a=2)) == shown(collections.defaultdict(other, a=2))


def test_builtins_that_were_watched_are_no_globals_afterwards() -> None:
    test_whatever_way_code_reads_a_value_its_changes_count("computed name of a class")
    assert "getattr" not in globals()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 4), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        made: torch.Tensor = torch.cond(
            h.sum() > 0, lambda h: h * self.scale, lambda h: h - self.scale, (h,)
        )
        return made


class InOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Tanh()})
        self.out = nn.Linear(3, 4)
        self.out.register_forward_hook(lambda module, args, output: output * 2)
        self.out.register_forward_hook(lambda module, args, output: output + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        made: torch.Tensor = self.out(x)
        return made


def _reorder_layers(step: int, net: Any, loss_fn: Any) -> None:
    net.layers["a"] = net.layers.pop("a")


def _reorder_hooks(step: int, net: Any, loss_fn: Any) -> None:
    net.out._forward_hooks.move_to_end(next(iter(net.out._forward_hooks)))


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (Branching, lambda step, net, loss_fn: setattr(net, "scale", 1.0 + step)),
        (InOrder, _reorder_layers),
        (InOrder, _reorder_hooks),
    ],
)
def test_order_of_layers_and_numbers_in_branches_count(make: Any, change: Any) -> None:
    assert_same_bits(
        make,
        batches_of(4, 3),
        steps=3,
        num_workers=1,
        loss_fn=rows_against_target,
        before_step=change,
        plan_everywhere=True,
        evaluate_after=(),
    )


def _step_with(change: Callable[[int], object]) -> None:
    """Train with a function of torch.nn, one of torch and a method of tensors."""

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return rows_against_target(torch.tanh(outputs).sigmoid(), target)

    assert_same_bits(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU()),
        batches_of(4, 3),
        steps=4,
        num_workers=1,
        loss_fn=loss_fn,
        before_step=lambda step, net, loss: change(step),
        plan_everywhere=True,
        evaluate_after=(),
    )


def test_functions_of_torch_that_are_replaced_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(step: int) -> None:
        if step == 1:
            monkeypatch.setattr(F, "relu", lambda x, inplace=False: torch.cos(x))
        elif step == 2:
            monkeypatch.setattr(torch, "tanh", torch.sin)
        elif step == 3:
            monkeypatch.setattr(torch.Tensor, "sigmoid", torch.Tensor.exp)

    _step_with(change)


def test_a_wrapper_around_a_method_of_tensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.Tensor.sigmoid
    monkeypatch.setattr(torch.Tensor, "sigmoid", lambda x: original(x) * 0.5)
    with pytest.raises(CaptureError, match=r"torch.Tensor.sigmoid .* calls the original.*\n.*py:"):
        _step_with(lambda step: None)


def test_an_autocast_that_forward_keeps_is_watched() -> None:
    cast = torch.autocast("cpu", torch.bfloat16, enabled=False)

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with cast:
            return rows_against_target((outputs @ outputs.T).float()[:, :4], target)

    assert_same_bits(
        lambda: nn.Linear(3, 4),
        batches_of(4, 3),
        steps=3,
        num_workers=1,
        loss_fn=loss_fn,
        before_step=lambda step, net, loss: setattr(cast, "_enabled", step > 0),
        plan_everywhere=True,
        evaluate_after=(),
    )


@pytest.mark.parametrize(("every", "evaluate_after"), [(2, ()), (3, (0, 1))])
def test_what_nothing_watches_is_found_by_capturing_again(
    every: int, evaluate_after: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training has its turn, too, where eval and predict come between its steps."""
    monkeypatch.setenv("GS_RECAPTURE_EVERY", str(every))

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return rows_against_target(outputs, target) * sys.get_coroutine_origin_tracking_depth()

    def change(step: int, net: Any, loss: Any) -> None:
        sys.set_coroutine_origin_tracking_depth(1 if step == every - 1 else 2)

    line = loss_fn.__code__.co_firstlineno + 1
    found = (
        rf"GS_RECAPTURE_EVERY={every}: the train step .*\n  "
        rf"aten.mul.Tensor\(%\d+, 1\), \S*{Path(__file__).name}:{line} was .*\(%\d+, 2\)"
    )
    before = sys.get_coroutine_origin_tracking_depth()
    try:
        with pytest.raises(StaleGraphError, match=found):
            assert_same_bits(
                lambda: nn.Linear(3, 4),
                batches_of(4, 3),
                steps=every,
                num_workers=1,
                loss_fn=loss_fn,
                before_step=change,
                plan_everywhere=True,
                evaluate_after=evaluate_after,
            )
    finally:
        sys.set_coroutine_origin_tracking_depth(before)


class _OfObjects(nn.Module):
    """Reads an attribute of an object, one of a module, and one of the loss's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.held = nn.Linear(3, 4), nn.Linear(4, 4), Base()
        self.held.weight = 1.0
        self.first.scale = 1.0  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.first(x) * self.held.weight * self.first.scale)
        return found


class _Halved(Base):
    @property
    def weight(self) -> float:  # type: ignore[override]
        return 0.5


def _another_dictionary(one: Any, name: str) -> None:
    one.__dict__ = {**vars(one), name: 0.5}


_PUT_IN_PLACE: dict[str, Callable[[Any], None]] = {
    "the dictionary of an object": lambda net: _another_dictionary(net.held, "weight"),
    "the dictionary of a module": lambda net: _another_dictionary(net.first, "scale"),
    "the class of an object": lambda net: setattr(net.held, "__class__", _Halved),
}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("what", _PUT_IN_PLACE)
def test_what_is_put_in_place_of_all_attributes_counts(what: str, microbatches: int) -> None:
    def change(step: int, net: Any, loss: Any) -> None:
        if step == 1:
            _PUT_IN_PLACE[what](net)

    def place(net: Any) -> None:
        net.first.place("MS_WORKER", 0)
        net.last.place("MS_WORKER", 1)

    assert_same_bits(
        _OfObjects,
        batches_of(4, 3),
        steps=3,
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        before_step=change,
        microbatches=microbatches,
    )


class OfDefaults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.weights: Any = collections.defaultdict(lambda: 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x) * self.weights["one"]
        return made


@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_a_dictionary_gives_by_default_counts(microbatches: int) -> None:
    """The step found the graph of the former default, without a word."""

    def change(step: int, net: Any, loss: Any) -> None:
        if step in (2, 4):
            net.weights.clear()
            net.weights.default_factory = lambda: 1.0 + step

    assert_same_bits(
        OfDefaults,
        batches_of(4, 3),
        steps=6,
        num_workers=1,
        loss_fn=rows_against_target,
        before_step=change,
        microbatches=microbatches,
    )
