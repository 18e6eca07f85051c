"""Code kept whole keeps state in objects of Python's own, and in what Python keeps of others.

It is as often changed as in eager mode.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import io
import queue
import sys
import threading
import weakref
from collections import ChainMap, UserDict
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from alone_helpers import assert_as_alone
from equivalence_helpers import batches_of, rows_against_target
from plain_model import PlainModel
from recovery_helpers import threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.errors import GraphsplitError

assert threads_as_workers


class Kept:
    """A number in some object of a library."""

    def __init__(self, held: Any, get: Callable[[Any], int], put: Callable[[Any, int], object]):
        self.held, self.get, self.put = held, get, put


class Key:
    """Something to which a weak reference may lead."""


KEY = Key()


def _queue() -> Any:
    made: queue.Queue[int] = queue.Queue()
    made.put(1)
    return made


def _taken(held: Any) -> int:
    number: int = held.get()
    held.put(number)
    return number


def _entry(held: Any) -> int:
    found: int = held.get("n", 1)
    return found


def _put_entry(held: Any, n: int) -> None:
    held["n"] = n


def _put_attribute(held: Any, n: int) -> None:
    held.n = n


def _put_weak(held: Any, n: int) -> None:
    held[KEY] = n


def _optimizer() -> Any:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)


def _put_rate(held: Any, n: int) -> None:
    held.param_groups[0]["lr"] = n


def _put_value(held: Any, n: int) -> None:
    held.value = n


def _class() -> type:
    class Counting(type):
        n = 1

    return Counting("Counted", (), {})


def _put_in_metaclass(held: Any, n: int) -> None:
    type(held).n = n


class One:
    n = 1


class Two:
    n = 2


class Three:
    n = 3


class Four:
    n = 4


def _put_class(held: Any, n: int) -> None:
    held.__class__ = (One, Two, Three, Four)[(n - 1) % 4]


def _writer() -> Any:
    file = io.StringIO()
    return file, csv.writer(file)


def _rows(held: Any) -> int:
    return 1 + len(held[0].getvalue().splitlines())


def _put_attributes(held: Any, n: int) -> None:
    held.__dict__ = {"n": n}


def _with_default() -> Any:
    def default(n: int = 1, *, more: int = 0) -> int:
        return n + more

    return default


def _put_defaults(held: Any, n: int) -> None:
    held.__defaults__ = (n - held.__kwdefaults__["more"],)


def _put_keyword_default(held: Any, n: int) -> None:
    held.__kwdefaults__["more"] = n - held.__defaults__[0]


def _put_keyword(held: Any, n: int) -> None:
    held.keywords["n"] = n


class Slotted:
    __slots__ = ("m", "n")


def _put_slot(held: Any, n: int) -> None:
    name, other = ("n", "m") if n % 2 else ("m", "n")
    setattr(held, name, n)
    if hasattr(held, other):
        delattr(held, other)


def _slotted() -> Any:
    made = Slotted()
    made.n = 1
    return made


def _slot(held: Any) -> int:
    found: int = held.n if hasattr(held, "n") else held.m
    return found


class Checked:
    """Gets a dictionary of attributes anew with each of them, as classes of pydantic do."""

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "__dict__", values)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "__dict__", {**vars(self), name: value})


class PastItself:
    """Keeps the number in a slot of its own, and reads it past its class."""

    __slots__ = ("__n",)

    def __init__(self) -> None:
        self.__n = 1

    def __getattr__(self, name: str) -> Any:
        return object.__getattribute__(self, "_PastItself__n")

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "_PastItself__n", value)


def _put_past_its_class(held: Any, n: int) -> None:
    object.__setattr__(held, "n", n)


def _put_text(held: Any, n: int) -> None:
    held.seek(0)
    held.truncate()
    held.write(str(n))


KINDS: dict[str, Callable[[], Kept]] = {
    "class": lambda: Kept(One(), lambda held: held.n, _put_class),
    "attributes": lambda: Kept(Key(), lambda held: vars(held).get("n", 1), _put_attributes),
    "defaults": lambda: Kept(_with_default(), lambda held: held(), _put_defaults),
    "keyword default": lambda: Kept(_with_default(), lambda held: held(), _put_keyword_default),
    "keyword": lambda: Kept(partial(_with_default(), n=1), lambda held: held(), _put_keyword),
    "slots": lambda: Kept(_slotted(), _slot, _put_slot),
    "frozen": lambda: Kept(Key(), lambda held: getattr(held, "n", 1), _put_past_its_class),
    "checked": lambda: Kept(Checked(n=1), lambda held: held.n, _put_attribute),
    "slot": lambda: Kept(PastItself(), lambda held: held.n, _put_attribute),
    "text": lambda: Kept(io.StringIO("1"), lambda held: int(held.getvalue()), _put_text),
    "rows": lambda: Kept(_writer(), _rows, lambda held, n: held[1].writerow([n])),
    "namespace": lambda: Kept(argparse.Namespace(n=1), lambda held: held.n, _put_attribute),
    "local": lambda: Kept(threading.local(), lambda held: getattr(held, "n", 1), _put_attribute),
    "dictionary": lambda: Kept(UserDict(n=1), _entry, _put_entry),
    "chain": lambda: Kept(ChainMap({}, {"n": 1}), _entry, _put_entry),
    "queue": lambda: Kept(_queue(), _taken, lambda held, n: (held.get(), held.put(n))),
    "weak": lambda: Kept(weakref.WeakKeyDictionary(), lambda held: held.get(KEY, 1), _put_weak),
    "number in C": lambda: Kept(ctypes.c_int(1), lambda held: held.value, _put_value),
    "function": lambda: Kept(partial(int), lambda held: getattr(held, "n", 1), _put_attribute),
    "metaclass": lambda: Kept(_class(), lambda held: type(held).n, _put_in_metaclass),
    "rate": lambda: Kept(_optimizer(), lambda held: held.param_groups[0]["lr"], _put_rate),
    "variable": lambda: Kept(ContextVar("n", default=1), ContextVar.get, ContextVar.set),
}

OF_PYTHON = ("class", "attributes", "defaults", "keyword default", "keyword", "slots")


class Whole(nn.Module):
    """Kept whole, for it asks for a value."""

    def __init__(self, kept: Kept, *, counts: bool) -> None:
        super().__init__()
        self.inner, self.kept, self.counts = nn.Linear(8, 8), kept, counts

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        kept = self.kept
        if self.counts:
            kept.put(kept.held, kept.get(kept.held) + 1)
        values = self.inner(values)
        return values / kept.get(kept.held) if values.sum() < 1e9 else values


class Around(nn.Module):
    """Calls it; sets the number for that time alone, if the call does not count."""

    def __init__(self, kept: Kept, *, counts: bool) -> None:
        super().__init__()
        self.first, self.kept, self.counts = nn.Linear(8, 8), kept, counts
        self.whole = Whole(kept, counts=counts)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values, kept = self.first(values), self.kept
        if not self.counts:
            kept.put(kept.held, 3)
        values = self.whole(values)
        if not self.counts:
            kept.put(kept.held, 1)
        return values


def _losses(
    make: Callable[..., Any], kept: Kept, microbatches: int, *, counts: bool
) -> list[float]:
    return _losses_of(Around(kept, counts=counts), make, microbatches)


def _losses_of(net: Any, make: Callable[..., Any], microbatches: int) -> list[float]:
    torch.manual_seed(0)
    for layer in (module for module in net.modules() if isinstance(module, nn.Linear)):
        layer.reset_parameters()
    net.first.place("MS_WORKER", 0)
    net.whole.place("MS_WORKER", 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = make(net, rows_against_target, optimizer, microbatches=microbatches)
    return [float(model.train_step(*batch)) for batch in batches_of(8, 8, num=3)]


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"variable"}))
def test_a_call_counts_as_often_as_in_eager_mode(kind: str, microbatches: int) -> None:
    def losses(make: Callable[..., Any]) -> list[float]:
        return _losses(make, KINDS[kind](), microbatches, counts=True)

    assert_as_alone(lambda: losses(PlainModel), lambda: losses(gs.Model))


class Captured(nn.Module):
    """Counts in its own forward, around parts on two workers."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.first, self.whole, self.kept = nn.Linear(8, 8), nn.Linear(8, 8), kept

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        kept, values = self.kept, self.first(values)
        kept.put(kept.held, kept.get(kept.held) + 1)
        made: torch.Tensor = self.whole(values / kept.get(kept.held))
        return made


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("kind", sorted(OF_PYTHON))
def test_forward_counts_as_often_as_in_eager_mode(kind: str, microbatches: int) -> None:
    def losses(make: Callable[..., Any]) -> list[float]:
        return _losses_of(Captured(KINDS[kind]()), make, microbatches)

    assert_as_alone(lambda: losses(PlainModel), lambda: losses(gs.Model))


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"queue", "metaclass", "text", "rows"}))
def test_a_call_finds_what_stood_there(kind: str, microbatches: int) -> None:
    def losses(make: Callable[..., Any]) -> list[float]:
        return _losses(make, KINDS[kind](), microbatches, counts=False)

    assert_as_alone(lambda: losses(PlainModel), lambda: losses(gs.Model))


@pytest.mark.usefixtures("threads_as_workers")
def test_a_context_variable_that_has_a_value_counts() -> None:
    def losses(make: Callable[..., Any]) -> list[float]:
        kept = KINDS["variable"]()
        kept.held.set(1)
        return _losses(make, kept, 1, counts=True)

    assert_as_alone(lambda: losses(PlainModel), lambda: losses(gs.Model))


@pytest.mark.usefixtures("threads_as_workers")
def test_a_context_variable_without_a_value_is_refused_where_a_call_sets_it() -> None:
    with pytest.raises(GraphsplitError, match=r"(?s)context variable 'n' its first value.*Fix: n"):
        assert_as_alone(lambda: [], lambda: _losses(gs.Model, KINDS["variable"](), 1, counts=True))


COUNTS = 0


def _in_sys_modules() -> int:
    module: Any = sys.modules[__name__]
    module.COUNTS += 1
    count: int = module.COUNTS
    return count


def _in_an_imported_module() -> int:
    import state_of_a_module

    state_of_a_module.n += 1
    return state_of_a_module.n


def _in_globals() -> int:
    globals()["COUNTS"] += 1
    count: int = globals()["COUNTS"]
    return count


class Counts(nn.Module):
    """Counts somewhere; asks for a value or not."""

    def __init__(self, count: Callable[[], int], *, asks: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.count, self.asks = gs.opaque(_Counting(count)) if asks else _Counting(count), asks

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.count(self.first(values)))
        return made


class _Counting(nn.Module):
    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self.count = count

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values / self.count()


@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("count", [_in_sys_modules, _in_an_imported_module, _in_globals])
def test_modules_that_code_takes_itself_are_followed(
    count: Callable[[], int], asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("state_of_a_module")
    vars(module)["n"] = 0
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules[__name__], "COUNTS", 0)

    def losses(make: Callable[..., Any]) -> list[float]:
        torch.manual_seed(0)
        vars(module)["n"] = globals()["COUNTS"] = 0
        net = Counts(count, asks=asks)
        model = make(net, rows_against_target, torch.optim.SGD(net.parameters(), lr=0.01))
        return [float(model.train_step(*batch)) for batch in batches_of(8, 8, num=3)]

    # One worker alone: those that are threads share their modules.
    assert_as_alone(lambda: losses(PlainModel), lambda: losses(gs.Model), workers=1)


class Inner(nn.Module):
    """Fits weights of its own as it runs, with an optimizer and a schedule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fast = nn.Linear(8, 8), [torch.zeros(8, 8, requires_grad=True)]
        self.optimizer = torch.optim.SGD(self.fast, lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        with torch.enable_grad():
            (values.detach() @ self.fast[0] - values.detach()).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        made: torch.Tensor = self.inner(values) + values @ self.fast[0].detach()
        return made


class ReadsRate(nn.Module):
    """Reads the learning rate with which it is trained; asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.seen: list[float] = []
        self.optimizer: Any = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        rate = self.optimizer.param_groups[0]["lr"]
        self.seen.append(rate)
        values = self.inner(values)
        return values * (1 + rate) if values.sum() < 1e9 else values


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize("kind", [Inner, ReadsRate])
def test_optimizers_of_its_own_and_that_of_the_model(kind: Callable[[], Any]) -> None:
    def losses(make: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), gs.opaque(kind()))
        net[0].place("MS_WORKER", 0)
        net[1].place("MS_WORKER", 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        if kind is ReadsRate:
            vars(net[1])["optimizer"] = optimizer
        model = make(net, rows_against_target, optimizer)
        found: list[Any] = []
        for values, target in batches_of(8, 8, num=4):
            found += [float(model.train_step(values, target)), model.predict(values)]
            optimizer.param_groups[0]["lr"] *= 0.5
        return found

    assert_as_alone(lambda: losses(PlainModel), lambda: losses(gs.Model))
